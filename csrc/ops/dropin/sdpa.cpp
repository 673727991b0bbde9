// scaledot.dropin.sdpa registers a kernel of aten::scaled_dot_product_attention that calls scaledot::sdpa, or
// torch's own function where the call is not ours. It is in C++ because a call of few numbers takes a few microseconds,
// and so does a kernel in Python.
//
// Python (python/scaledot/dropin/sdpa.py) reads the counters, and says which classes of tensors are traced.
#include <ATen/ExpandUtils.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/dropout_seed.h"
#include "ops/common/op_namespace.h"
#include "ops/common/shapes.h"
#include "ops/sdpa/op.h"

namespace scaledot {
namespace {

constexpr const char* kAtenName = "scaled_dot_product_attention";

// A call of aten::scaled_dot_product_attention.
struct AtenCall {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const OptionalTensor& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

// ------------------------------------------------------------------------------------------------ counters
// They only grow while the kernel is registered. An activation counts from what it found at its start.
struct Counters {
  std::atomic<int64_t> calls{0};
  std::mutex mutex;                     // of `left`
  std::map<std::string, int64_t> left;  // for each reason, the calls that torch ran
};
Counters& counters() {
  static auto* const all = new Counters;  // never destroyed: threads may still call at exit
  return *all;
}

std::tuple<int64_t, std::vector<std::string>, std::vector<int64_t>> read_counters() {
  Counters& all = counters();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> reasons;
  std::vector<int64_t> counts;
  for (const auto& [reason, count] : all.left) {
    reasons.push_back(reason);
    counts.push_back(count);
  }
  return {all.calls, std::move(reasons), std::move(counts)};
}

// ------------------------------------------------------------------------------------------------ which calls are ours
bool is_traced_class(const Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// The name of the tensor's class if it has its own rules for torch's operators; "" for a class that torch.compile
// traces with. The op is implemented in Python and called by its key, so that no rule of the class sees it.
std::string class_with_rules(const Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(SCALEDOT_OP("dropin_sdpa_class"), "");
  torch::jit::Stack stack{c10::List<Tensor>({tensor})};
  op.callBoxedForDispatchKey(c10::DispatchKey::CPU, stack);
  return stack.back().toStringRef();
}

// Why torch must run this call, or nothing. This covers calls that torch refuses but scaledot would compute, and calls
// that would fail inside scaledot's op. For all other arguments that it does not support, scaledot throws an error that
// names the argument, and the reason is that error.
std::optional<std::string> why_not_ours(const AtenCall& call) {
  const at::ScalarType type = call.query.scalar_type();
  if (!is_kernel_float(type)) return "the dtype is " + dtype_name(type);
  if (const Tensor* mask = present(call.attn_mask)) {
    if (call.is_causal) return "attn_mask and is_causal together are an error in torch's slower path";
    const at::ScalarType of_mask = mask->scalar_type();
    if (of_mask != at::kBool && of_mask != at::kFloat && of_mask != type)
      return "an attn_mask of dtype " + dtype_name(of_mask) + " with a query of dtype " + dtype_name(type) +
             " is an error in torch";
  }
  for (const Tensor* tensor : {&call.query, &call.key, &call.value, present(call.attn_mask)}) {
    if (!tensor || !is_traced_class(*tensor)) continue;
    const std::string name = class_with_rules(*tensor);
    if (!name.empty()) return "a tensor is a " + name;
  }
  return std::nullopt;
}

// Whether Python may run between the dispatcher and scaledot's kernel: for classes of tensors, in a mode, in tracing.
// An error from there is a Python exception, which is not caught below.
bool may_enter_python(c10::DispatchKeySet keys) {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (keys | included).has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonDispatcher}));
}

// ------------------------------------------------------------------------------------------------ the strides
// Whether torch would run the call in its fused kernel. torch's own function answers, so this holds for every version.
bool is_fused_in_torch(const AtenCall& c) {
  try {
    const int64_t choice =
        at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), c.query, c.key, c.value,
                                                c.attn_mask, c.dropout_p, c.is_causal, c.scale, c.enable_gqa);
    return choice == int64_t(at::SDPBackend::flash_attention);
  } catch (const c10::Error&) {  // sdpa_kernel() allows torch none of its kernels
    return false;
  }
}

// The strides of at::empty_like(query).
std::vector<c10::SymInt> strides_like(const Tensor& query) {
  if (query.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return at::empty_like(query).sym_strides().vec();
  if (query.is_non_overlapping_and_dense()) return query.sym_strides().vec();
  const auto strides = at::infer_dense_strides(query.sizes(), query.strides());
  return {strides.begin(), strides.end()};
}

std::vector<c10::SymInt> row_major_strides(c10::SymIntArrayRef sizes) {
  std::vector<c10::SymInt> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = sizes[d] == 0 ? strides[d] : strides[d] * sizes[d];
  return strides;
}

// ------------------------------------------------------------------------------------------------ the kernel
Tensor run_in_scaledot(c10::DispatchKeySet keys, const AtenCall& c) {
  const OptionalTensor seed = dropout_seed(std::nullopt, c.dropout_p, std::nullopt, c.query);
  AttentionOptions options;
  options.dropout_p = c.dropout_p;
  options.is_causal = c.is_causal;
  options.scale = c.scale;
  options.enable_gqa = c.enable_gqa;
  SdpaArgs args{{.query = c.query, .key = c.key, .value = c.value, .attn_mask = c.attn_mask, .dropout_seed = seed},
                std::move(options),
                /*return_weights=*/false,
                /*average_weights=*/false};
  if (may_enter_python(keys)) {
    check_arguments(args.inputs, args.options);
    infer_shapes<c10::SymInt>(args.inputs, args.options);
  }
  // A program may be traced with one of torch and scaledot and run with the other, so both give the same strides.
  args.output_strides = is_fused_in_torch(c)
                            ? strides_like(c.query)
                            : row_major_strides(infer_shapes<c10::SymInt>(args.inputs, args.options).output());
  return std::get<0>(call<SdpaOp>(args));
}

Tensor run_in_torch(const AtenCall& c) {
  return at::native::scaled_dot_product_attention(c.query, c.key, c.value, c.attn_mask, c.dropout_p, c.is_causal,
                                                  c.scale, c.enable_gqa);
}

Tensor run_aten(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& attn_mask, double dropout_p, bool is_causal, std::optional<double> scale,
                bool enable_gqa) {
  const AtenCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  std::optional<std::string> reason = why_not_ours(call);
  if (!reason) {
    try {
      Tensor output = run_in_scaledot(keys, call);
      counters().calls.fetch_add(1, std::memory_order_relaxed);
      return output;
    } catch (const c10::TypeError& error) {  // scaledot refuses the arguments; torch may accept them
      reason = error.what_without_backtrace();
    } catch (const c10::ValueError& error) {
      reason = error.what_without_backtrace();
    }
  }
  {
    Counters& all = counters();
    const std::lock_guard<std::mutex> lock(all.mutex);
    ++all.left[*reason];
  }
  return run_in_torch(call);
}

// The registration, while there is one. CPU takes calls in inference mode and from below autograd; AutogradCPU takes
// all others. It is never destroyed at exit: torch's dispatcher may be gone by then.
std::optional<torch::Library>& registration() {
  static auto* const library = new std::optional<torch::Library>;
  return *library;
}

void activate(bool active) {
  std::optional<torch::Library>& library = registration();
  if (active == library.has_value()) return;
  if (!active) return library.reset();
  Counters& all = counters();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.calls = 0;
    all.left.clear();
  }
  library.emplace(torch::Library::IMPL, "aten", std::nullopt, __FILE__, uint32_t(__LINE__));
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU})
    library->impl(kAtenName, torch::dispatch(key, torch::CppFunction::makeFromUnboxedFunction(&run_aten)));
}

}  // namespace

SCALEDOT_LIBRARY_FRAGMENT(m) {
  m.def("dropin_sdpa_activate(bool active) -> ()", &activate);
  m.def("dropin_sdpa_counters() -> (int calls, str[] reasons, int[] counts)", &read_counters);
  // Python's kernel for the CPU key answers; see class_with_rules.
  m.def("dropin_sdpa_class(Tensor[] tensor) -> str", [](at::TensorList) { return std::string(); });
}

}  // namespace scaledot
