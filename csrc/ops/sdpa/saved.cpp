#include "ops/sdpa/saved.h"

#include <atomic>

#include "core/saved.h"
#include "ops/common/checks.h"
#include "ops/common/environment.h"

namespace scaledot {
namespace {

std::atomic<bool> save_for_backward_enabled{save_for_backward_at_start()};

bool is_symbolic(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

bool has_16_bits(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// Whether torch's own kernel saves the softmax of such a call, and so has a product less in its backward. For other
// calls the forward would lose more time than the backward gains.
bool pays(const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  const Tensor* mask = present(in.attn_mask);
  return args.options.dropout_p > 0 || (mask && mask->is_floating_point() && mask->requires_grad()) ||
         (in.query.dim() > 0 && in.value.dim() > 0 && in.query.size(-1) != in.value.size(-1));
}

// Why such a call saves no softmax, whatever its lengths, or nullptr.
const char* why_no_softmax(const SdpaArgs& args) {
  if (!save_for_backward_enabled.load(std::memory_order_relaxed)) return "save_for_backward is off";
  if (has_16_bits(args.inputs.query.scalar_type())) return "the dtype has 16 bits";
  if (!args.options.part.empty()) return "the call is a part of a larger attention";
  if (args.return_weights) return "weights are returned";
  if (!pays(args)) return "there is no dropout, no gradient of attn_mask, and value is as wide as query";
  if (args.options.softcap) return "the gradient of softcap needs the scores";
  if (present(args.inputs.score_program)) return "the gradient of a score function needs the scores";
  if (present(args.inputs.key_indices)) return "each row has a list of keys";
  return nullptr;
}

bool saves_output_low(const SdpaArgs& args, bool many_keys) {
  if (present(args.inputs.key_indices)) return false;  // the backward has all of a row, and so its exact delta
  // In a partial call no row sees all of its keys.
  return may_save_output_low(args.inputs.query.scalar_type()) && (many_keys || !args.options.part.empty());
}

SavedPlan plan_softmax(const SdpaArgs& args, const Shapes<int64_t>& shapes) {
  int64_t batch = 1;
  for (int64_t size : shapes.batch) batch *= size;
  const at::ScalarType type = args.inputs.query.scalar_type();
  const SavedSizes sizes = {batch,
                            shapes.heads,
                            shapes.kv_heads,
                            shapes.query_length,
                            shapes.key_length,
                            shapes.head_dim,
                            shapes.value_dim,
                            int64_t(c10::elementSize(type)),
                            int64_t(c10::elementSize(lse_dtype(type)))};
  const int64_t keys = saved_keys_of(sizes), bytes = saved_softmax_bytes(sizes, keys);
  if (keys == shapes.key_length) return {keys, bytes, ""};
  if (min(shapes.query_length, shapes.key_length) < kSavedLeastLength)
    return {0, 0, "there are fewer than 16 rows or keys"};
  return {keys, bytes, "it would take more bytes than query, key, value and output, or than 64 MiB"};
}

}  // namespace

bool may_save_output_low(at::ScalarType type) {
  return has_16_bits(type) && save_for_backward_enabled.load(std::memory_order_relaxed);
}

bool set_save_for_backward(bool value) { return save_for_backward_enabled.exchange(value); }

SavedPlan plan_saved(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes) {
  const bool output_low = saves_output_low(args, shapes.key_length > backend.keys_without_output_low);
  const int64_t output_low_bytes = output_low ? 2 * c10::multiply_integers(shapes.output()) : 0;
  if (!backend.saves_softmax) return {0, 0, "only CPU kernels save the softmax", output_low_bytes};
  if (const char* reason = why_no_softmax(args)) return {0, 0, reason, output_low_bytes};
  return plan_softmax(args, shapes);
}

SdpaRecordedArgs recorded(const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  const auto nothing = [&] { return recorded_with(args, 0, false); };
  const Backend* backend = backend_of(in.query.device());
  if (!backend || in.key.dim() < 2) return nothing();
  const bool many_keys = is_symbolic(in.key) || in.key.size(-2) > backend->keys_without_output_low;
  if (saves_output_low(args, many_keys)) return recorded_with(args, 0, true);
  if (is_symbolic(in.query) || is_symbolic(in.key) || is_symbolic(in.value)) return nothing();
  if (!backend->saves_softmax || why_no_softmax(args)) return nothing();
  // Most calls with few rows end here, before their shapes are looked at.
  const auto is_short = [](const Tensor& t) { return t.dim() < 2 || t.size(-2) < kSavedLeastLength; };
  if (is_short(in.query) || is_short(in.key)) return nothing();
  check_arguments(in, args.options);
  return recorded_with(args, plan_softmax(args, infer_shapes<int64_t>(in, args.options)).keys, false);
}

}  // namespace scaledot
