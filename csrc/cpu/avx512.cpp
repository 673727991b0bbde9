// The kernels "avx512" and "avx512_few_rows".
#include "cpu/simd/isa/avx512.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {
namespace {

const char* missing() { return capability() < Capability::avx512 ? "cpu_capability() is below avx512" : nullptr; }

const char* why_not(const Problem& p, Pass pass) {
  const char* reason = missing();
  return reason ? reason : tiled_why_not(p, pass);
}

const char* why_not_decode(const Problem& p, Pass pass) {
  const char* reason = missing();
  return reason ? reason : decode_why_not(p, pass);
}

}  // namespace

extern const Kernel kAvx512Kernel = tiled_kernel<PlainOperands>("avx512", why_not);
extern const Kernel kAvx512DecodeKernel = decode_kernel("avx512_few_rows", why_not_decode);

}  // namespace scaledot
