#include "loops.h"

namespace scaledot::bench {

extern const ArithmeticLoop kAvx512Float = {"fp32 FMA, AVX-512", multiply_add_flops<float, 64>(), fma<float, 64>};
extern const ArithmeticLoop kAvx512Double = {"fp64 FMA, AVX-512", multiply_add_flops<double, 64>(), fma<double, 64>};
extern const ReadLoop kAvx512Read[kReadLoops] = {{"1 stream", read<64, 1>},
                                                 {"4 streams", read<64, 4>},
                                                 {"8 streams", read<64, 8>},
                                                 {"4 streams in each MiB", read_blocks<64, 4>}};

}  // namespace scaledot::bench
