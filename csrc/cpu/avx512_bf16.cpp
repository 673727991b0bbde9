// The kernel "avx512_bf16": bfloat16 products by vdpbf16ps, two multiplications and additions per lane.
#include "cpu/simd/isa/avx512.h"

#include "cpu/simd/attention/kernel.h"
#include "cpu/simd/pairs.h"

namespace scaledot {
namespace {

struct PairOperands {
  template <class Body>
  static void with_operands(const Problem&, const Body& body) {
    body(Type<Pair>{});
  }
};

const char* why_not(const Problem& p, Pass pass) {
  if (capability() < Capability::avx512_bf16) return "cpu_capability() is below avx512_bf16";
  return p.dtype == DType::bfloat16 ? tiled_why_not(p, pass) : "the dtype is not bfloat16";
}

}  // namespace

extern const Kernel kAvx512Bf16Kernel = tiled_kernel<PairOperands>("avx512_bf16", why_not);

}  // namespace scaledot
