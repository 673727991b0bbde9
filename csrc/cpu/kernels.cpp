// The table of CPU kernels, fastest first, and select(), the only place where a kernel is chosen. The last kernel takes
// every call that the ops let through, except calls with lists of keys. Only the kernels for lists take these; they
// stand after the others, so that explain() does not name them in other calls.
#include <atomic>
#include <cstring>

#include "cpu/cpu.h"

namespace scaledot {
namespace {

const Kernel kKernels[] = {
#if defined(__x86_64__)
#if defined(SCALEDOT_HAS_AMX)  // the compiler knows these instructions
    kAmxBf16DecodeKernel,   kAmxBf16Kernel,
#endif
    kAvx512DecodeKernel,    kAvx512Bf16Kernel,    kAvx512Kernel,  kAvx2DecodeKernel, kAvx2Kernel,
#if defined(SCALEDOT_HAS_AMX)
    kAmxBf16KeyListsKernel,
#endif
    kAvx512KeyListsKernel,  kAvx2KeyListsKernel,
#elif defined(__aarch64__)
    kNeonDecodeKernel,      kNeonBf16Kernel,      kNeonKernel,    kNeonKeyListsKernel,
#endif
    kDefaultKeyListsKernel, kDefaultDecodeKernel, kDefaultKernel,
};
constexpr int kCount = sizeof(kKernels) / sizeof(kKernels[0]);

std::atomic<const Kernel*> forced{nullptr};

}  // namespace

KernelTable cpu_kernels() { return {kKernels, kCount}; }

const Kernel& select(KernelTable table, const Problem& problem, Pass pass) {
  const Kernel* first = forced.load(std::memory_order_relaxed);
  if (first && !first->why_not(problem, pass)) return *first;
  for (int k = 0; k < table.count - 1; ++k)
    if (!table.kernels[k].why_not(problem, pass)) return table.kernels[k];
  return table.kernels[table.count - 1];
}

bool force_kernel(const char* name) {
  forced = nullptr;
  if (!name) return true;
  for (const Kernel& kernel : kKernels)
    if (std::strcmp(kernel.name, name) == 0) {
      forced = &kernel;
      return true;
    }
  return false;
}

}  // namespace scaledot
