// Ops without tensors: questions that Python asks the library itself. They need no extension module, so one library
// works with every version of Python.
#include <torch/library.h>

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "ops/common/environment.h"
#include "ops/common/op_namespace.h"
#include "ops/common/problem_builder.h"
#include "ops/common/score_program.h"

#include "build_info.h"
#include "core/kernel.h"
#include "cuda/library.h"
#include "ops/sdpa/saved.h"

namespace scaledot {
namespace {

std::vector<std::string> kernel_names() {
  const KernelTable table = cpu_kernels();
  std::vector<std::string> names;
  for (int k = 0; k < table.count; ++k) names.emplace_back(table.kernels[k].name);
  return names;
}

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  while (const char* name = cpu_capability_name(int(names.size()))) names.emplace_back(name);
  return names;
}

// The answer of scaledot.build_info(), as JSON. The rows of CUDA are there if the GPU kernels are loaded. The texts are
// literals of ours without a quote or backslash.
std::string build_info() {
  std::ostringstream json;
  const char* separator = "{";
  const auto row = [&](const char* name, const char* text) {
    json << separator << "\"" << name << "\": \"" << text << "\"";
    separator = ", ";
  };
  row("version", SCALEDOT_VERSION);
  row("torch", SCALEDOT_TORCH_VERSION);
  row("compiler", SCALEDOT_COMPILER);
  row("build_type", SCALEDOT_BUILD_TYPE);
  if (const CudaLibrary* cuda = cuda_library()) {
    row("cuda_version", cuda->version);
    row("cuda", cuda->toolkit);
    row("cuda_archs", cuda->archs);
    row("cuda_status", kCudaStatus);
  }
  json << "}";
  return json.str();
}

}  // namespace

SCALEDOT_LIBRARY_FRAGMENT(m) {
  m.def("build_info() -> str", &build_info);
  m.def("score_operations() -> str[]", &score_operations);
  m.def("cpu_capability() -> str", [] { return std::string(cpu_capability()); });
  m.def("cpu_capabilities() -> str[]", &cpu_capabilities);
  m.def("take_environment_warnings() -> str[]", &take_environment_warnings);
  m.def("kernel_names() -> str[]", &kernel_names);
  m.def("save_for_backward(bool enabled) -> bool", &set_save_for_backward);
  m.def("row_invariant(bool enabled) -> bool", &set_row_invariant);
  m.def("may_save_output_low(ScalarType dtype) -> bool", &may_save_output_low);
  m.def("force_kernel(str? name) -> bool",
        [](const std::optional<std::string>& name) { return force_kernel(name ? name->c_str() : nullptr); });
}

}  // namespace scaledot
