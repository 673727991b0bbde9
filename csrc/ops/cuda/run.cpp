#include "ops/cuda/run.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>

namespace scaledot {

const CudaLibrary& cuda_library_for(c10::Device device) {
  const CudaLibrary* library = cuda_library();
  TORCH_CHECK(library, "scaledot on ", device, ": the CUDA kernels are not loaded");  // the ops have refused by now
  return *library;
}

// torch links another copy of the CUDA runtime. Both use the device's primary context, but each tracks the current
// device.
CurrentDevice::CurrentDevice(const CudaLibrary& library, c10::Device device) : guard_(device) {
  const char* error = library.set_device(int(guard_.current_device().index()));
  TORCH_CHECK(!error, "scaledot on ", device, ": ", error);
}

DeviceStream CurrentDevice::stream() const {
  const c10::Device device = guard_.current_device();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return static_cast<DeviceStream>(stream.native_handle());
}

void check_launch(const char* error) { TORCH_CHECK(!error, "scaledot: a CUDA kernel was not started: ", error); }

const DeviceKernel& choose_cuda(const CudaLibrary& library, const Problem& problem, Pass pass) {
  const DeviceKernel* kernel = library.select(problem, pass);
  if (kernel) return *kernel;
  const DeviceKernelTable table = library.kernels();
  std::string reasons;
  for (int k = 0; k < table.count; ++k)
    reasons += std::string(k ? "; " : "") + table.kernels[k].name + ": " + table.kernels[k].why_not(problem, pass);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "query: got a problem that no CUDA kernel takes (", reasons, ")");
}

// Once, before the first call that may wait for CUDA's driver to compile a file of kernels.
static void warn_of_compilation(const CudaLibrary& library) {
  static std::atomic<bool> warned{false};
  if (warned.load(std::memory_order_relaxed)) return;
  const int capability = library.needs_compiler();
  if (capability == 0 || warned.exchange(true)) return;
  TORCH_WARN("scaledot has no machine code for this GPU, of compute capability ", capability / 10, ".", capability % 10,
             ". CUDA's driver compiles the kernels of a dtype when the first of them runs, which may take a minute. It "
             "keeps them in the folder CUDA_CACHE_PATH (default: ~/.nv/ComputeCache) for later processes. A build with "
             "TORCH_CUDA_ARCH_LIST=native has the code.");
}

void run_cuda(const Problem& problem, Pass pass, c10::Device device) {
  const CudaLibrary& library = cuda_library_for(device);
  const CurrentDevice current(library, device);  // the choice of a kernel depends on the current device
  const DeviceKernel& kernel = choose_cuda(library, problem, pass);
  warn_of_compilation(library);
  const int64_t bytes = kernel.workspace(problem, pass);
  at::Tensor workspace;  // freed here, but the allocator reuses it only for later work on this stream
  if (bytes > 0) workspace = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  const DeviceExecutor executor = {current.stream(), bytes > 0 ? workspace.mutable_data_ptr() : nullptr};
  check_launch((pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor));
}

}  // namespace scaledot
