// The kernels "default" and "default_few_rows".
#include "cpu/simd/generic.h"

#include "cpu/simd/kernel.h"

namespace scaledot {
namespace {

const char* why_not(const Problem&, Pass) { return nullptr; }

}  // namespace

extern const Kernel kDefaultKernel = {"default", why_not, tiled_workspace, tiled_forward, tiled_backward};
extern const Kernel kDefaultFewRowsKernel = {"default_few_rows", few_rows_why_not, few_rows_workspace, few_rows_forward,
                                             nullptr};

}  // namespace scaledot
