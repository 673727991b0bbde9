// The kernels "avx2" and "avx2_few_rows".
#include "cpu/simd/isa/avx2.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {
namespace {

const char* missing() { return capability() < Capability::avx2 ? "cpu_capability() is below avx2" : nullptr; }

const char* why_not(const Problem& p, Pass pass) {
  const char* reason = missing();
  return reason ? reason : tiled_why_not(p, pass);
}

const char* why_not_decode(const Problem& p, Pass pass) {
  const char* reason = missing();
  return reason ? reason : decode_why_not(p, pass);
}

}  // namespace

extern const Kernel kAvx2Kernel = tiled_kernel<PlainOperands>("avx2", why_not);
extern const Kernel kAvx2DecodeKernel = decode_kernel("avx2_few_rows", why_not_decode);

}  // namespace scaledot
