// The kernel "neon_bf16": bfloat16 products by bfdot, two multiplications and additions per lane.
#include "cpu/simd/isa/neon_bf16.h"

#include "cpu/simd/attention/kernel.h"
#include "cpu/simd/bf16_pairs.h"

namespace scaledot {

extern const Kernel kNeonBf16Kernel =
    tiled_kernel<Bf16PairOperands>("neon_bf16", why_not_bf16_pairs_at<Capability::neon_bf16>);

}  // namespace scaledot
