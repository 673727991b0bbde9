// The kernel "avx512_bf16": bfloat16 products by vdpbf16ps, two multiplications and additions per lane.
#include "cpu/simd/isa/avx512_bf16.h"

#include "cpu/simd/attention/kernel.h"
#include "cpu/simd/bf16_pairs.h"

namespace scaledot {

extern const Kernel kAvx512Bf16Kernel =
    tiled_kernel<Bf16PairOperands>("avx512_bf16", why_not_bf16_pairs_at<Capability::avx512_bf16>);

}  // namespace scaledot
