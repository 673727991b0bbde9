// The kernels "avx512" and "avx512_few_rows".
#include "cpu/simd/avx512.h"

#include "cpu/simd/kernel.h"

namespace scaledot {
namespace {

const char* why_not(const Problem&, Pass) {
  return capability() < Capability::avx512 ? "cpu_capability() is below avx512" : nullptr;
}

const char* why_not_few_rows(const Problem& p, Pass pass) {
  const char* reason = why_not(p, pass);
  return reason ? reason : few_rows_why_not(p, pass);
}

}  // namespace

extern const Kernel kAvx512Kernel = {"avx512", why_not, tiled_workspace, tiled_forward, tiled_backward};
extern const Kernel kAvx512FewRowsKernel = {"avx512_few_rows", why_not_few_rows, few_rows_workspace, few_rows_forward,
                                            nullptr};

}  // namespace scaledot
