#include "ops/sdpa/kernel_call.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_like.h>

#include <limits>

#include "core/saved.h"
#include "ops/common/checks.h"
#include "ops/common/explain_json.h"
#include "ops/common/out.h"
#include "ops/common/problem_builder.h"
#include "ops/common/score_program.h"
#include "ops/sdpa/checks.h"
#include "ops/sdpa/saved.h"

namespace scaledot {
namespace {

Tensor empty(const Backend& backend, at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  return backend.empty(sizes, row_major_strides(sizes), type, device);
}

// The memory into which the kernel writes one input's gradient, and the steps from there to the gradient.
struct Gradient {
  Tensor buffer;      // undefined if not asked for
  Tensor rearranged;  // the gradient, if its strides are none that kernels write; undefined otherwise
  bool reduces = false;

  // `shape`: that of the input once it is broadcast; the buffer has it too.
  Gradient(const Backend& backend, bool wanted, const Tensor& input, at::IntArrayRef shape) : backend_(backend) {
    if (!wanted) return;
    const c10::Device device = input.device();
    reduces = input.sizes() != shape;
    if (reduces) {
      buffer = empty(backend, shape, input.scalar_type(), device);
    } else if (input.is_non_overlapping_and_dense()) {
      buffer = backend.empty(shape, input.strides(), input.scalar_type(), device);
    } else {
      buffer = at::empty_like(input);
    }
    if (buffer.size(-1) > 1 && buffer.stride(-1) != 1) {
      rearranged = std::move(buffer);
      buffer = empty(backend, shape, input.scalar_type(), device);
    }
  }

  void add_to(ProblemBuilder& builder, TensorView Problem::*field) const {
    if (buffer.defined()) builder.add(field, buffer);
  }

  // Sums over what was broadcast. `repeated`: each head of the input was repeated to make the shape's (with_heads).
  Tensor reduced_to(const Tensor& input, bool repeated) const {
    if (!buffer.defined()) return empty(backend_, {0}, input.scalar_type(), input.device());
    if (!reduces) return rearranged.defined() ? rearranged.copy_(buffer) : buffer;
    Tensor result = buffer;
    if (repeated) result = result.unflatten(-3, {input.size(-3), -1}).sum(-3);
    return at::sum_to(std::move(result), input.sizes()).contiguous();
  }

 private:
  const Backend& backend_;
};

// Key or value as kernels read it: with kv_heads heads. Kernels for key lists read whole rows.
Tensor kernel_rows(const SdpaInputs& in, const Tensor& tensor, int64_t kv_heads) {
  const Tensor rows = with_heads(tensor, kv_heads);
  const bool whole = rows.size(-1) <= 1 || rows.stride(-1) == 1 || !present(in.key_indices);
  return whole ? rows : rows.contiguous();
}

// The output of a call, yet to be written.
Tensor new_output(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes) {
  const SdpaInputs& in = args.inputs;
  const Tensor output =
      backend.empty(shapes.output(), output_strides(args, shapes), in.query.scalar_type(), in.query.device());
  TORCH_CHECK_VALUE(output.is_non_overlapping_and_dense() && (output.stride(-1) == 1 || output.size(-1) <= 1),
                    "output_strides: got ", shape_text(output.strides()), "; needs those of a dense tensor of shape ",
                    shape_of(output), ", the last of them 1");
  return output;
}

// Runs a forward. The last result is undefined unless the call is `recorded`; then that is `args` again. `out`: the
// caller's output, or null.
Tensor4 run_forward(const Backend& backend, const SdpaArgs& args, const SdpaRecordedArgs* recorded,
                    const Tensor* out = nullptr) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options);
  check_storages(in);
  const at::ScalarType type = in.query.scalar_type();
  const c10::Device device = in.query.device();
  const OptionalTensor seed = backend.seed(in.dropout_seed, device);
  const Tensor key = kernel_rows(in, in.key, shapes.kv_heads), value = kernel_rows(in, in.value, shapes.kv_heads);

  if (out) check_out_memory(*out, shapes.output(), in);
  const Tensor output = out ? *out : new_output(backend, args, shapes);
  const Tensor lse = empty(backend, shapes.lse(), lse_dtype(type), device);
  // Kernels for key lists do not average.
  const bool averages = args.average_weights && present(in.key_indices);
  const auto sizes = returned_sizes(args, shapes);
  Tensor weights = averages ? empty(backend, shapes.weights(), type, device) : empty(backend, sizes, type, device);
  const Tensor saved =
      recorded ? empty(backend, saved_sizes(*recorded, shapes), saved_dtype(*recorded), device) : Tensor();
  const Tensor by_head = args.average_weights && !averages ? weights.unsqueeze(-3) : weights;

  ProblemBuilder builder(with_qkv(in, in.query, key, value), args.options, shapes);
  builder.add_seed(seed);
  DecodedScoreProgram score(in, Pass::forward);
  builder.add_score(score.program(Tensor()));
  builder.add_written(&Problem::output, output);
  builder.add(&Problem::lse, lse);
  if (args.return_weights) builder.add(&Problem::weights, by_head);
  if (recorded && recorded->saves()) builder.add(builder.saved_field(recorded->saved_keys), saved);
  const Problem problem = builder.finish();
  if (has_scores(problem)) {
    backend.run(problem, Pass::forward, device);
    score.check_indices();
  } else {
    output.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    weights.zero_();
    if (recorded) saved.zero_();
  }
  if (averages) weights = weights.mean(-3, /*keepdim=*/false, lse_dtype(type)).to(type);
  return {output, lse, weights, saved};
}

}  // namespace

Tensor3 run_sdpa(const Backend& backend, const SdpaArgs& args) {
  auto [output, lse, weights, saved] = run_forward(backend, args, nullptr);
  return {std::move(output), std::move(lse), std::move(weights)};
}

Tensor2 run_sdpa_out(const Backend& backend, const SdpaOutArgs& args) {
  auto [output, lse, weights, saved] = run_forward(backend, args.forward(), nullptr, &args.out);
  return {std::move(lse), std::move(weights)};
}

Tensor4 run_sdpa_recorded(const Backend& backend, const SdpaRecordedArgs& args) {
  return run_forward(backend, args, &args);
}

SdpaGradients run_sdpa_backward(const Backend& backend, const SdpaBackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options);
  check_storages(in);
  check_backward(args, shapes);
  const c10::Device device = in.query.device();
  const OptionalTensor seed = backend.seed(in.dropout_seed, device);
  const Tensor key = kernel_rows(in, in.key, shapes.kv_heads), value = kernel_rows(in, in.value, shapes.kv_heads);

  const Gradient grad_query(backend, args.output_mask[0], in.query, shapes.kernel_query());
  const Gradient grad_key(backend, args.output_mask[1], in.key, shapes.kernel_key());
  const Gradient grad_value(backend, args.output_mask[2], in.value, shapes.kernel_value());
  const Tensor grad_mask = args.output_mask[3]
                               ? empty(backend, in.attn_mask->sizes(), in.attn_mask->scalar_type(), device)
                               : empty(backend, {0}, at::kFloat, device);
  // Kernels write the entries that some score reads, in the type of sums.
  const bool wants_relative = args.output_mask[4];
  const Tensor grad_relative =
      wants_relative ? empty(backend, in.relative_bias->sizes(), lse_dtype(in.query.scalar_type()), device).zero_()
                     : empty(backend, {0}, at::kFloat, device);
  const Tensor grad_numbers = args.output_mask[5]
                                  ? empty(backend, in.score_numbers->sizes(), in.score_numbers->scalar_type(), device)
                                  : empty(backend, {0}, at::kFloat, device);

  ProblemBuilder builder(with_qkv(in, in.query, key, value), args.options, shapes);
  builder.add_seed(seed);
  DecodedScoreProgram score(in, Pass::backward);
  builder.add_score(score.program(grad_numbers));
  builder.add(&Problem::output, args.output);
  builder.add(&Problem::lse, args.lse);
  builder.add(&Problem::weights, args.weights);
  if (const Tensor* saved = present(args.saved)) builder.add(builder.saved_field(args.saved_keys), *saved);
  builder.add(&Problem::grad_output, args.grad_output);
  builder.add(&Problem::grad_lse, args.grad_lse);
  builder.add(&Problem::grad_weights, args.grad_weights);
  grad_query.add_to(builder, &Problem::grad_query);
  grad_key.add_to(builder, &Problem::grad_key);
  grad_value.add_to(builder, &Problem::grad_value);
  if (args.output_mask[3]) builder.add(&Problem::grad_mask, grad_mask);
  if (wants_relative) builder.add(&Problem::grad_relative_bias, grad_relative);
  Problem problem = builder.finish();
  if (backend.saves_softmax) use_returned_weights(problem);
  if (has_scores(problem)) {
    backend.run(problem, Pass::backward, device);
  } else {
    for (const Tensor* buffer : {&grad_query.buffer, &grad_key.buffer, &grad_value.buffer, &grad_mask, &grad_numbers}) {
      if (buffer->defined()) buffer->zero_();
    }
  }
  return {grad_query.reduced_to(in.query, false),
          grad_key.reduced_to(in.key, needs_heads(in.key, shapes.kv_heads)),
          grad_value.reduced_to(in.value, needs_heads(in.value, shapes.kv_heads)),
          grad_mask,
          wants_relative ? grad_relative.to(in.relative_bias->scalar_type()) : grad_relative,
          grad_numbers};
}

Tensor2 run_sdpa_mask(const Backend& backend, const SdpaMaskArgs& args) {
  const MaskShapes<int64_t> shapes = check_mask<int64_t>(args);
  const c10::Device device = args.query.device();
  Problem p{};
  p.batch = 1;
  p.query_length = shapes.query_length;
  p.key_length = shapes.key_length;
  p.position = position_mask(args.options, p.query_length, p.key_length);
  const Tensor attends = empty(backend, {p.query_length, p.key_length}, at::kBool, device);
  if (attends.numel() > 0) backend.write_attends(p, attends.mutable_data_ptr<bool>(), device);

  const at::ScalarType type = lse_dtype(args.query.scalar_type());
  const Tensor bias = empty(backend, shapes.bias, type, device);
  if (present(args.alibi_slopes) && bias.numel() > 0) {
    check_storage(*args.alibi_slopes, "alibi_slopes");
    const Tensor slopes = args.alibi_slopes->to(type).contiguous();
    p.heads = slopes.numel();
    p.alibi_slopes.data = const_cast<void*>(slopes.const_data_ptr());
    p.alibi_slopes.dtype = dtype_of(type);
    p.alibi_slopes.head_stride = 1;
    backend.write_bias(p, bias.mutable_data_ptr(), dtype_of(type), device);
  }
  return {attends, bias};
}

Tensor run_dropout_mask(const Backend& backend, const DropoutMaskArgs& args) {
  check_dropout_mask(args);
  const c10::Device device = args.seed.device();
  check_storage(args.seed, "seed");
  const Tensor seed = args.seed.contiguous();
  Problem p{};
  p.batch = args.batch.expect_int();
  p.heads = args.heads.expect_int();
  p.query_length = args.query_length.expect_int();
  p.key_length = args.key_length.expect_int();
  p.dropout_p = args.dropout_p;
  p.dropout_seed = seed.const_data_ptr<int64_t>();
  p.dropout_batch = p.batch / max<int64_t>(seed.numel() / 2, 1);
  const Tensor keep = empty(backend, {p.batch, p.heads, p.query_length, p.key_length}, at::kBool, device);
  if (p.dropout_p == 1) return keep.zero_();
  if (keep.numel() > 0) backend.write_dropout_mask(p, keep.mutable_data_ptr<bool>(), device);
  return keep;
}

std::string run_explain(const Backend& backend, const ExplainArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options, /*needs_seed=*/false);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options);
  returned_sizes(args, shapes);  // checks
  const at::ScalarType type = in.query.scalar_type();
  // The layouts of the tensors that a call would allocate.
  struct Layout {
    c10::SmallVector<int64_t, 5> sizes, strides;
    explicit Layout(Shapes<int64_t>::Vector shape) : sizes(std::move(shape)), strides(row_major_strides(sizes)) {}
  };
  const auto output = shapes.output(), new_strides = output_strides(args, shapes);
  const Tensor* const out = present(args.out);
  if (out) check_out_memory(*out, output, in);
  const at::IntArrayRef strides = out ? out->strides() : at::IntArrayRef(new_strides);
  const Layout lse(shapes.lse()), weights(shapes.weights());
  const Layout query(shapes.kernel_query()), key(shapes.kernel_key()), value(shapes.kernel_value());
  auto by_head_sizes = shapes.weights();
  if (args.average_weights && !present(in.key_indices)) by_head_sizes[by_head_sizes.size() - 3] = 1;
  const Layout by_head(std::move(by_head_sizes));
  SavedPlan plan = plan_saved(backend, args, shapes);
  const SdpaRecordedArgs recorded = recorded_with(args, plan.keys, plan.output_low_bytes > 0);
  const Layout saved(saved_sizes(recorded, shapes));

  ProblemBuilder builder(in, args.options, shapes, /*shape_only=*/true);
  const auto add = [&](TensorView Problem::*field, const Layout& layout) {
    builder.add(field, layout.sizes, layout.strides, type);
  };
  // A real call would expand these with with_heads.
  if (needs_heads(in.key, shapes.kv_heads)) add(&Problem::key, key);
  if (needs_heads(in.value, shapes.kv_heads)) add(&Problem::value, value);
  builder.add(&Problem::output, output, strides, type);
  builder.add(&Problem::lse, lse.sizes, lse.strides, lse_dtype(type));
  if (args.return_weights) add(&Problem::weights, by_head);
  if (recorded.saves())
    builder.add(builder.saved_field(recorded.saved_keys), saved.sizes, saved.strides, saved_dtype(recorded));
  DecodedScoreProgram score(in, Pass::forward), backward_score(in, Pass::backward);
  builder.add_score(score.program(Tensor()));
  const Problem forward = builder.finish();

  builder.add(&Problem::grad_output, output, strides, type);
  if (args.return_weights) add(&Problem::grad_weights, weights);
  add(&Problem::grad_query, query);
  add(&Problem::grad_key, key);
  add(&Problem::grad_value, value);
  const Tensor* mask = present(in.attn_mask);
  if (mask && mask->is_floating_point() && mask->requires_grad()) builder.add(&Problem::grad_mask, *mask);
  const Tensor* relative = present(in.relative_bias);
  if (relative && relative->requires_grad()) builder.add(&Problem::grad_relative_bias, *relative);
  const Tensor* numbers = present(in.score_numbers);
  builder.add_score(backward_score.program(numbers && numbers->requires_grad() ? *numbers : Tensor()));
  Problem backward = builder.finish();
  if (backend.saves_softmax) use_returned_weights(backward);
  if (plan.keys == 0 && saves_softmax(backward)) plan.reason = "the backward reads the returned weights";

  std::ostringstream json;
  const auto explain = [&](const Problem& problem, Pass pass) {
    has_scores(problem) ? backend.explain(json, problem, pass, in.query.device()) : explain_no_pass(json, pass);
  };
  json << "{";
  explain(forward, Pass::forward);
  json << ", ";
  explain(backward, Pass::backward);
  json << ", \"saved\": {\"keys\": " << plan.keys << ", \"bytes\": " << plan.bytes << ", \"reason\": \"" << plan.reason
       << "\", \"output_low_bytes\": " << plan.output_low_bytes << "}";
  json << ", \"device\": \"" << backend.device << "\", \"capability\": \"" << backend.capability() << "\"}";
  return json.str();
}

}  // namespace scaledot
