// The kernels "avx2" and "avx2_few_rows".
#include "cpu/simd/avx2.h"

#include "cpu/simd/kernel.h"

namespace scaledot {
namespace {

const char* why_not(const Problem&, Pass) {
  return capability() < Capability::avx2 ? "cpu_capability() is below avx2" : nullptr;
}

const char* why_not_few_rows(const Problem& p, Pass pass) {
  const char* reason = why_not(p, pass);
  return reason ? reason : few_rows_why_not(p, pass);
}

}  // namespace

extern const Kernel kAvx2Kernel = {"avx2", why_not, tiled_workspace, tiled_forward, tiled_backward};
extern const Kernel kAvx2FewRowsKernel = {"avx2_few_rows", why_not_few_rows, few_rows_workspace, few_rows_forward,
                                          nullptr};

}  // namespace scaledot
