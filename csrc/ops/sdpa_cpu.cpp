// scaledot::sdpa and scaledot::sdpa_backward on the CPU: allocate, make the Problem, run a kernel.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <limits>

#include "ops/make_problem.h"
#include "ops/run_cpu.h"

namespace scaledot {
namespace {

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return Tensor(at::detail::empty_strided_cpu(sizes, strides, type));
}

Tensor empty(at::IntArrayRef sizes, at::ScalarType type) { return Tensor(at::detail::empty_cpu(sizes, type)); }

// Without rows there is nothing to compute, without keys nothing to compute it from.
bool has_scores(const Problem& p) { return p.batch * p.heads * p.query_length > 0 && p.key_length > 0; }

// Where the kernel writes one input's gradient, and how that becomes the gradient.
struct Gradient {
  Tensor buffer;      // undefined if not asked for
  Tensor rearranged;  // the gradient, if its strides are none that kernels write; undefined otherwise
  bool reduces = false;

  // `shape`: that of the input once it is broadcast; the buffer has it too.
  Gradient(bool wanted, const Tensor& input, at::IntArrayRef shape) {
    if (!wanted) return;
    reduces = input.sizes() != shape;
    if (reduces) {
      buffer = empty(shape, input.scalar_type());
    } else if (input.is_non_overlapping_and_dense()) {
      buffer = empty(shape, input.strides(), input.scalar_type());
    } else {
      buffer = at::empty_like(input);
    }
    if (buffer.size(-1) > 1 && buffer.stride(-1) != 1) {
      rearranged = std::move(buffer);
      buffer = empty(shape, input.scalar_type());
    }
  }

  void add_to(ProblemBuilder& builder, TensorView Problem::*field) const {
    if (buffer.defined()) builder.add(field, buffer);
  }

  // Sums over what was broadcast. `repeated`: each head of the input was repeated to make the shape's (with_heads).
  Tensor reduced_to(const Tensor& input, bool repeated) const {
    if (!buffer.defined()) return empty({0}, input.scalar_type());
    if (!reduces) return rearranged.defined() ? rearranged.copy_(buffer) : buffer;
    Tensor result = buffer;
    if (repeated) result = result.unflatten(-3, {input.size(-3), -1}).sum(-3);
    return at::sum_to(std::move(result), input.sizes()).contiguous();
  }
};

Tensor3 sdpa_cpu(const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options.enable_gqa);
  const at::ScalarType type = in.query.scalar_type();
  const Tensor key = with_heads(in.key, shapes.kv_heads), value = with_heads(in.value, shapes.kv_heads);

  const Tensor output = empty(shapes.output(), shapes.output_strides(), type);
  const Tensor lse = empty(shapes.lse(), lse_dtype(type));
  const Tensor weights = args.return_weights ? empty(shapes.weights(), type) : empty({0}, type);

  ProblemBuilder builder({in.query, key, value, in.attn_mask, in.alibi_slopes, in.dropout_seed}, args.options, shapes);
  builder.add(&Problem::output, output);
  builder.add(&Problem::lse, lse);
  if (args.return_weights) builder.add(&Problem::weights, weights);
  const Problem problem = builder.finish();
  if (has_scores(problem)) {
    run_cpu(problem, Pass::forward);
  } else {
    output.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
  }
  return {output, lse, weights};
}

Tensor4 sdpa_backward_cpu(const BackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options.enable_gqa);
  check_backward(args, shapes);
  const Tensor key = with_heads(in.key, shapes.kv_heads), value = with_heads(in.value, shapes.kv_heads);

  const Gradient grad_query(args.output_mask[0], in.query, shapes.kernel_query());
  const Gradient grad_key(args.output_mask[1], in.key, shapes.kernel_key());
  const Gradient grad_value(args.output_mask[2], in.value, shapes.kernel_value());
  const Tensor grad_mask =
      args.output_mask[3] ? empty(in.attn_mask->sizes(), in.attn_mask->scalar_type()) : empty({0}, at::kFloat);

  ProblemBuilder builder({in.query, key, value, in.attn_mask, in.alibi_slopes, in.dropout_seed}, args.options, shapes);
  builder.add(&Problem::output, args.output);
  builder.add(&Problem::lse, args.lse);
  builder.add(&Problem::weights, args.weights);
  builder.add(&Problem::grad_output, args.grad_output);
  builder.add(&Problem::grad_lse, args.grad_lse);
  builder.add(&Problem::grad_weights, args.grad_weights);
  grad_query.add_to(builder, &Problem::grad_query);
  grad_key.add_to(builder, &Problem::grad_key);
  grad_value.add_to(builder, &Problem::grad_value);
  if (args.output_mask[3]) builder.add(&Problem::grad_mask, grad_mask);
  const Problem problem = builder.finish();
  if (has_scores(problem)) {
    run_cpu(problem, Pass::backward);
  } else {
    for (const Tensor* buffer : {&grad_query.buffer, &grad_key.buffer, &grad_value.buffer, &grad_mask}) {
      if (buffer->defined()) buffer->zero_();
    }
  }
  return {grad_query.reduced_to(in.query, false), grad_key.reduced_to(in.key, needs_heads(in.key, shapes.kv_heads)),
          grad_value.reduced_to(in.value, needs_heads(in.value, shapes.kv_heads)), grad_mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) {
  m.impl("sdpa", sdpa_kernel<&sdpa_cpu>);
  m.impl("sdpa_backward", backward_kernel<&sdpa_backward_cpu>);
}

}  // namespace scaledot
