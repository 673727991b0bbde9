// The kernels "default" and "default_few_rows".
#include "cpu/simd/generic.h"

#include "cpu/simd/few_rows.h"

namespace scaledot {
namespace {

const char* why_not(const Problem&, Pass) { return nullptr; }

}  // namespace

extern const Kernel kDefaultKernel = tiled_kernel<PlainOperands>("default", why_not);
extern const Kernel kDefaultFewRowsKernel = few_rows_kernel("default_few_rows", few_rows_why_not);

}  // namespace scaledot
