#include "loops.h"

namespace scaledot::bench {

extern const ArithmeticLoop kAvx2Float = {"fp32 FMA, AVX2", multiply_add_flops<float, 32>(), fma<float, 32>};
extern const ArithmeticLoop kAvx2Double = {"fp64 FMA, AVX2", multiply_add_flops<double, 32>(), fma<double, 32>};
extern const ReadLoop kAvx2Read[kReadLoops] = {{"1 stream", read<32, 1>},
                                               {"4 streams", read<32, 4>},
                                               {"8 streams", read<32, 8>},
                                               {"4 streams in each MiB", read_blocks<32, 4>}};

}  // namespace scaledot::bench
