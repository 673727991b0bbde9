#include "ops/cpu/large_pages.h"

#include <sys/mman.h>

#include "core/math.h"

namespace scaledot {
namespace {

// glibc keeps smaller blocks for the next call, on 64-bit machines and unless mallopt says otherwise.
[[maybe_unused]] constexpr int64_t kFromSystem = int64_t(32) << 20;
[[maybe_unused]] constexpr int64_t kLargePage = int64_t(2) << 20;

}  // namespace

void prefer_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kFromSystem) return;
  const int64_t begin = int64_t(reinterpret_cast<uintptr_t>(data));
  const int64_t first = round_up(begin, kLargePage), last = (begin + bytes) / kLargePage * kLargePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), size_t(last - first), MADV_HUGEPAGE);
#endif
}

}  // namespace scaledot
