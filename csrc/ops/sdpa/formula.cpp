#include "ops/sdpa/formula.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "ops/common/checks.h"
#include "ops/sdpa/block_mask.h"
#include "ops/sdpa/checks.h"

namespace scaledot {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// (..., heads, length, columns) with all batch dimensions and query's number of heads: an expanded view, unless heads
// are grouped; those are repeated.
Tensor widen(const Tensor& tensor, const Shapes<c10::SymInt>& shapes, at::ScalarType type) {
  Tensor t = tensor.to(type);
  if (!shapes.has_heads) return t;
  const c10::SymInt heads = t.dim() > 2 ? t.sym_size(-3) : c10::SymInt(1);
  if (heads != 1 && heads != shapes.heads) t = t.repeat_interleave_symint(shapes.heads / heads, -3, shapes.heads);
  auto sizes = shapes.leading();
  sizes.push_back(t.sym_size(-2));
  sizes.push_back(t.sym_size(-1));
  return t.expand_symint(sizes);
}

// Says which scores are not masked, and which of these are computed and not replaced by masked_score. Both broadcast to
// the shape of the scores.
struct Live {
  Tensor live;
  Tensor computed;
};

Live live_scores(const SdpaArgs& args, Tensor attends, const Tensor& relative) {
  if (relative.defined()) attends = attends.logical_and(relative.detach().ne(-kInf));
  const Tensor* mask = present(args.inputs.attn_mask);
  if (!mask) return {attends, attends};
  const bool boolean = mask->scalar_type() == at::kBool;
  const Tensor allowed = attends.logical_and(boolean ? *mask : mask->detach().ne(-kInf));
  const bool replaces = boolean && args.options.masked_score.value_or(-kInf) != -kInf;
  return {replaces ? attends : allowed, allowed};
}

// relative_bias of every score; undefined if there is none.
Tensor relative_scores(const SdpaArgs& args, const Shapes<c10::SymInt>& shapes, at::ScalarType type) {
  const Tensor* bias = present(args.inputs.relative_bias);
  if (!bias) return Tensor();
  const c10::SymInt reach = bias->sym_size(-1) / 2;
  const c10::SymInt diagonal =
      args.options.causal_alignment == "lower_right" ? shapes.key_length - shapes.query_length : c10::SymInt(0);
  const at::TensorOptions index = bias->options().dtype(at::kLong);
  const Tensor rows = at::arange(at::Scalar(shapes.query_length), index).add(at::Scalar(diagonal));
  const Tensor distance = at::arange(at::Scalar(shapes.key_length), index) - rows.unsqueeze(-1);
  const Tensor entry = distance.clamp(at::Scalar(-reach), at::Scalar(reach)).add(at::Scalar(reach));
  c10::SmallVector<c10::SymInt, 5> sizes;
  if (shapes.has_heads) sizes.append(bias->sym_sizes().begin(), bias->sym_sizes().end() - 1);
  sizes.push_back(shapes.query_length);
  sizes.push_back(shapes.key_length);
  return bias->to(type).index_select(-1, entry.flatten()).reshape_symint(sizes);
}

// Zero in place of rows that are part of no score: a NaN or inf there has no effect and gets no gradient.
Tensor used_rows(const Tensor& rows, const Tensor& live, int64_t over) {
  return rows.where(live.any(over).unsqueeze(-1), at::zeros({}, rows.options()));
}

// The keys that the rows may attend to by positions and blocks.
Tensor attended(const SdpaArgs& args, const Tensor& attends, int64_t dims) {
  const Tensor* blocks = present(args.inputs.blocks);
  if (!blocks) return attends;
  Tensor shown = dense_block_mask(*blocks, *args.inputs.block_bits, args.options.block_shape);
  while (shown.dim() > dims) shown = shown.squeeze(0);  // a block mask may have more dimensions, of size 1
  return shown.logical_and(attends);
}

Tensor dropout_keep_mask(const SdpaArgs& args, const Shapes<c10::SymInt>& shapes, const Tensor& weights) {
  c10::SymInt batch = 1;
  for (const c10::SymInt& size : shapes.batch) batch *= size;
  const Tensor keep = call_dropout_mask(
      {*args.inputs.dropout_seed, batch, shapes.heads, shapes.query_length, shapes.key_length, args.options.dropout_p});
  return keep.to(weights.device()).view_symint(shapes.weights()).to(weights.scalar_type());
}

}  // namespace

Tensor3 formula(const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  const AttentionOptions& o = args.options;
  check_arguments(in, o);
  check_differentiable(in, o);
  const auto shapes = infer_shapes<c10::SymInt>(in, o);
  returned_sizes(args, shapes);  // checks
  const at::ScalarType input_type = in.query.scalar_type(), type = lse_dtype(input_type);

  const auto [attends, bias] = call<SdpaMaskOp>({in.query, in.key, in.alibi_slopes, o});
  const Tensor relative = relative_scores(args, shapes, type);
  auto [live, computed] = live_scores(args, attended(args, attends, int64_t(shapes.weights().size())), relative);
  live = live.expand_symint(shapes.weights());

  const Tensor query = used_rows(widen(in.query, shapes, type), live, -1);
  const Tensor key = used_rows(widen(in.key, shapes, type), live, -2);
  const Tensor value = used_rows(widen(in.value, shapes, type), live, -2);
  const double scale = o.scale ? *o.scale
                       : in.query.sym_size(-1) == 0
                           ? 1.0
                           : 1.0 / std::sqrt(double(in.query.sym_size(-1).guard_int(__FILE__, __LINE__)));
  Tensor score = query.matmul(key.mT()) * scale;
  if (o.softcap) score = (score / *o.softcap).tanh() * *o.softcap;
  if (present(in.alibi_slopes)) score = score + bias;
  if (relative.defined()) score = score + relative;
  if (const Tensor* mask = present(in.attn_mask); mask && mask->scalar_type() != at::kBool) {
    score = score + mask->to(type);
  }
  const double masked_score = o.masked_score.value_or(-kInf);
  if (masked_score != -kInf) score = score.where(computed, at::full({}, masked_score, score.options()));
  score = score.where(live, at::full({}, -kInf, score.options()));

  // The softmax of a row of -inf only is 0 here, with gradient 0; its lse is -inf.
  const bool no_keys = shapes.key_length == 0;
  Tensor maximum = no_keys ? score.sum(-1, true) : score.detach().amax(-1, true);
  maximum = maximum.where(maximum.ne(-kInf), at::zeros({}, score.options()));
  const Tensor exponential = (score - maximum).exp();
  const Tensor sum = exponential.sum(-1, true);
  const Tensor empty = sum.eq(0);
  const Tensor safe_sum = at::where(empty, at::ones({}, sum.options()), sum);
  const Tensor lse = at::where(empty, at::full({}, -kInf, sum.options()), maximum + safe_sum.log()).squeeze(-1);
  Tensor weights = exponential / safe_sum;
  if (o.dropout_p > 0) weights = weights * dropout_keep_mask(args, shapes, weights) * dropout_scale(o.dropout_p);
  const Tensor output = weights.matmul(value);
  if (!args.return_weights) weights = at::empty({0}, in.query.options());
  if (args.average_weights) weights = weights.mean(-3);
  return {output.to(input_type), lse, weights.to(input_type)};
}

}  // namespace scaledot
