// Ops without tensors: what Python asks of the library itself. As ops they need no extension module, so one library
// serves every version of Python.
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "build_info.h"
#include "core/kernel.h"
#include "cuda/library.h"

namespace scaledot {
namespace {

std::vector<std::string> kernel_names() {
  const KernelTable table = cpu_kernels();
  std::vector<std::string> names;
  for (int k = 0; k < table.count; ++k) names.emplace_back(table.kernels[k].name);
  return names;
}

// What scaledot.build_info() tells. The rows of CUDA are there if the GPU kernels are loaded.
c10::Dict<std::string, std::string> build_info() {
  c10::Dict<std::string, std::string> info;
  info.insert("version", SCALEDOT_VERSION);
  info.insert("torch", SCALEDOT_TORCH_VERSION);
  info.insert("compiler", SCALEDOT_COMPILER);
  info.insert("build_type", SCALEDOT_BUILD_TYPE);
  if (const CudaLibrary* cuda = cuda_library()) {
    info.insert("cuda_version", cuda->version);
    info.insert("cuda", cuda->toolkit);
    info.insert("cuda_archs", cuda->archs);
    info.insert("cuda_status", kCudaStatus);
  }
  return info;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(scaledot, m) {
  m.def("build_info() -> Dict(str, str)", &build_info);
  m.def("cpu_capability() -> str", [] { return std::string(cpu_capability()); });
  m.def("kernel_names() -> str[]", &kernel_names);
  m.def("force_kernel(str? name) -> bool", [](const std::optional<std::string>& name) {
    return force_kernel(name ? name->c_str() : nullptr);
  });
}

}  // namespace scaledot
