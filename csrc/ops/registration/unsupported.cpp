// The dispatcher's own error for a tensor without a kernel is a page long and names only the op. The kernel below takes
// the place of every kernel that is missing, and names the argument.
#include "ops/registration/unsupported.h"

#include <ATen/native/CPUFallback.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "cuda/library.h"
#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"

namespace scaledot {
namespace {

c10::DispatchKey dense_key(const Tensor& tensor) {
  return c10::computeDispatchKey(at::kFloat, at::kStrided, tensor.device());
}

// torch lets users ask for its CPU fallback on these two. The fallback that is there without asking is an error.
const char* fallback_variable(c10::DeviceType device) {
  if (device == c10::DeviceType::MPS) return "PYTORCH_ENABLE_MPS_FALLBACK";
  if (device == c10::DeviceType::XPU) return "PYTORCH_ENABLE_XPU_FALLBACK";
  return nullptr;
}

// Whether ops without a kernel for the device are to run on the CPU, on copies of the tensors.
bool falls_back(const Tensor& tensor) {
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(dense_key(tensor))) return false;
  const char* variable = fallback_variable(tensor.device().type());
  if (!variable) return true;
  const char* asked = std::getenv(variable);
  return asked && std::string_view(asked) == "1";
}

// Why no kernel of the op takes the tensors of the call.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const auto tensor_at = [&](size_t k) {
    const c10::IValue& value = (*stack)[first + k];
    return value.isTensor() && value.toTensor().defined() ? std::optional(value.toTensor()) : std::nullopt;
  };
  for (size_t k = 0; k < arguments.size(); ++k) {
    const std::optional<Tensor> tensor = tensor_at(k);
    if (!tensor || op.hasKernelForDispatchKey(dense_key(*tensor))) continue;
    if (falls_back(*tensor)) return at::native::cpu_fallback(op, stack);
    const std::string& name = arguments[k].name();
    const bool packed = op.operator_name().name.find("varlen") != std::string::npos;
    refuse_device(*tensor, name, cuda_library() ? "cpu or cuda" : "cpu",
                  "move it with " + name + ".cpu()" + (packed ? "" : ", or call F.scaled_dot_product_attention there"));
  }
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (const std::optional<Tensor> tensor = tensor_at(k)) check_strided(*tensor, arguments[k].name().c_str());
  }
  TORCH_CHECK_TYPE(false, op.schema().name(), ": got tensors that no kernel takes; needs dense ones");
}

void register_refusals(torch::Library& m) {
  for (const char* op : {"sdpa", "sdpa_out", "sdpa_recorded", "sdpa_backward", "sdpa_mask", "dropout_mask", "explain",
                         "varlen", "varlen_out", "varlen_recorded", "varlen_backward", "explain_varlen"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace

void refuse_device(const Tensor& tensor, std::string_view name, std::string_view devices, std::string_view advice) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": got a tensor on ", tensor.device(), "; needs ", devices, ": ", advice);
}

// This key stands for every device and layout without a kernel. torch leaves nested tensors out of it.
SCALEDOT_LIBRARY_IMPL(CompositeExplicitAutograd, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorCPU, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorCUDA, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorMeta, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorMPS, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorXPU, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorHPU, m) { register_refusals(m); }
SCALEDOT_LIBRARY_IMPL(NestedTensorPrivateUse1, m) { register_refusals(m); }

}  // namespace scaledot
