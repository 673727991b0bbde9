#include "nn/multi_head_attention.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/where.h>
#include <torch/nn/init.h>

#include <limits>

#include "ops/sdpa/sdpa.h"

namespace scaledot::nn {
namespace {

using torch::Tensor;

int64_t positive(const char* name, int64_t size) {
  TORCH_CHECK_VALUE(size >= 1, name, ": got ", size, "; needs at least 1");
  return size;
}

// (B, L, heads * head_dim) -> (B, heads, L, head_dim), without a copy.
Tensor split_heads(const Tensor& projected, int64_t heads, int64_t head_dim) {
  return projected.unflatten(-1, {heads, head_dim}).transpose(1, 2);
}

// The one mask that says what attn_mask and key_mask say together, no larger than they broadcast.
Tensor with_key_mask(const Tensor& attn_mask, const Tensor& key_mask, const Tensor& key, bool batched) {
  const int64_t batch = key.size(0), key_length = key.size(1);
  TORCH_CHECK_TYPE(key_mask.scalar_type() == torch::kBool, "key_mask: got dtype torch.",
                   c10::getDtypeNames(key_mask.scalar_type()).first, "; needs torch.bool, true = may attend");
  const bool one_for_all = key_mask.dim() == 1 && key_mask.size(0) == key_length;
  const bool one_each = batched && key_mask.dim() == 2 && key_mask.size(0) == batch && key_mask.size(1) == key_length;
  TORCH_CHECK_VALUE(one_for_all || one_each, "key_mask: got shape ", key_mask.sizes(), "; needs ",
                    batched ? c10::str("[", batch, ", ", key_length, "] or ") : "", "[", key_length,
                    "], from the shape of key");
  const Tensor attends = key_mask.unsqueeze(-2).unsqueeze(-2);  // over heads and rows
  if (!attn_mask.defined()) return attends;
  const bool boolean = attn_mask.scalar_type() == torch::kBool;
  if (!boolean && !attn_mask.is_floating_point()) return attn_mask;  // the op says what is wrong with it
  TORCH_CHECK_VALUE(attn_mask.dim() == 0 || attn_mask.size(-1) == 1 || attn_mask.size(-1) == key_length,
                    "attn_mask: got shape ", attn_mask.sizes(), "; needs one whose last dimension is 1 or ", key_length,
                    ", the number of keys");
  TORCH_CHECK_VALUE(at::are_expandable(attn_mask.sizes(), attends.sizes()), "attn_mask: got shape ", attn_mask.sizes(),
                    "; needs one that broadcasts with key_mask's [", batch, ", 1, 1, ", key_length, "]");
  if (boolean) return attn_mask & attends;
  return at::where(attends, attn_mask, -std::numeric_limits<double>::infinity());
}

}  // namespace

MultiHeadAttentionImpl::MultiHeadAttentionImpl(const MultiHeadAttentionOptions& options_) : options(options_) {
  reset();
}

void MultiHeadAttentionImpl::reset() {
  const int64_t embed_dim = positive("embed_dim", options.embed_dim()),
                heads = positive("num_heads", options.num_heads());
  const int64_t kdim = positive("kdim", options.kdim().value_or(embed_dim));
  const int64_t vdim = positive("vdim", options.vdim().value_or(embed_dim));
  const int64_t qk_dim = positive("qk_dim", options.qk_dim().value_or(embed_dim));
  const int64_t v_dim = positive("v_dim", options.v_dim().value_or(embed_dim));
  const int64_t out_dim = positive("out_dim", options.out_dim().value_or(embed_dim));
  num_kv_heads_ = positive("num_kv_heads", options.num_kv_heads().value_or(heads));
  TORCH_CHECK_VALUE(qk_dim % heads == 0, "qk_dim: got ", qk_dim, options.qk_dim() ? "" : " (the default, embed_dim)",
                    "; needs a multiple of num_heads, ", heads);
  TORCH_CHECK_VALUE(v_dim % heads == 0, "v_dim: got ", v_dim, options.v_dim() ? "" : " (the default, embed_dim)",
                    "; needs a multiple of num_heads, ", heads);
  TORCH_CHECK_VALUE(heads % num_kv_heads_ == 0, "num_kv_heads: got ", num_kv_heads_, "; needs a divisor of num_heads, ",
                    heads);
  TORCH_CHECK_VALUE(options.dropout() >= 0 && options.dropout() <= 1, "dropout: got ", options.dropout(),
                    "; needs a probability in [0, 1]");
  TORCH_CHECK_VALUE(options.out_proj() || !options.out_dim(), "out_dim: got ", out_dim,
                    " without an output projection, where it is v_dim");
  head_dim_ = qk_dim / heads;
  v_head_dim_ = v_dim / heads;

  const auto linear = [this](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(options.bias()));
  };
  q_proj = register_module("q_proj", linear(embed_dim, qk_dim));
  k_proj = register_module("k_proj", linear(kdim, head_dim_ * num_kv_heads_));
  v_proj = register_module("v_proj", linear(vdim, v_head_dim_ * num_kv_heads_));
  if (options.out_proj()) out_proj = register_module("out_proj", linear(v_dim, out_dim));
  reset_parameters();
}

void MultiHeadAttentionImpl::reset_parameters() {
  for (const torch::nn::Linear& projection : {q_proj, k_proj, v_proj, out_proj}) {
    if (projection.is_empty()) continue;
    torch::nn::init::xavier_uniform_(projection->weight);
    if (projection->bias.defined()) torch::nn::init::zeros_(projection->bias);
  }
}

void MultiHeadAttentionImpl::check_features(const Tensor& query, const Tensor& key, const Tensor& value) const {
  TORCH_CHECK_VALUE(query.defined(), "query: got an undefined tensor");
  TORCH_CHECK_VALUE(query.dim() == 2 || query.dim() == 3, "query: got shape ", query.sizes(),
                    "; needs (B, Lq, embed_dim) or (Lq, embed_dim)");
  const auto check = [&](const char* name, const Tensor& tensor, const char* size_name, int64_t size) {
    TORCH_CHECK_VALUE(tensor.dim() == query.dim(), name, ": got shape ", tensor.sizes(), "; needs ", query.dim(),
                      " dimensions, as query has");
    TORCH_CHECK_VALUE(tensor.size(-1) == size, name, ": got shape ", tensor.sizes(), "; needs a last dimension of ",
                      size_name, ", ", size);
  };
  check("query", query, "embed_dim", options.embed_dim());
  check("key", key, "kdim", options.kdim().value_or(options.embed_dim()));
  check("value", value, "vdim", options.vdim().value_or(options.embed_dim()));
}

std::tuple<Tensor, Tensor> MultiHeadAttentionImpl::forward(const Tensor& query, const Tensor& key_or_none,
                                                           const Tensor& value_or_none, const Tensor& attn_mask,
                                                           const Tensor& key_mask, bool is_causal, const Window& window,
                                                           bool need_weights, const Tensor& relative_bias,
                                                           const std::optional<BlockMask>& block_mask) {
  const Tensor& key = key_or_none.defined() ? key_or_none : query;
  const Tensor& value = value_or_none.defined() ? value_or_none : key;
  check_features(query, key, value);
  const bool batched = query.dim() == 3;
  const auto with_batch = [batched](const Tensor& tensor) { return batched ? tensor : tensor.unsqueeze(0); };

  SdpaOptions call;
  if (key_mask.defined())
    call.attn_mask = with_key_mask(attn_mask, key_mask, with_batch(key), batched);
  else if (attn_mask.defined())
    call.attn_mask = attn_mask;
  call.dropout_p = is_training() ? options.dropout() : 0.0;
  call.is_causal = is_causal;
  call.enable_gqa = num_kv_heads_ != options.num_heads();
  call.window_left = window.left;
  call.window_right = window.right;
  call.block_mask = block_mask;
  call.return_weights = need_weights;
  if (relative_bias.defined()) call.relative_bias = relative_bias;
  const SdpaResult result =
      scaled_dot_product_attention(split_heads(q_proj(with_batch(query)), options.num_heads(), head_dim_),
                                   split_heads(k_proj(with_batch(key)), num_kv_heads_, head_dim_),
                                   split_heads(v_proj(with_batch(value)), num_kv_heads_, v_head_dim_), call);

  Tensor output = result.output.transpose(1, 2).flatten(2);  // no copy: the op lays its output out as (B, Lq, H, Dv)
  if (!out_proj.is_empty()) output = out_proj(output);
  Tensor weights = need_weights ? result.weights : Tensor();
  if (batched) return {output, weights};
  return {output.squeeze(0), need_weights ? weights.squeeze(0) : weights};
}

void MultiHeadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "scaledot::nn::MultiHeadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads();
  const auto print = [&stream](const char* name, const std::optional<int64_t>& size) {
    if (size) stream << ", " << name << '=' << *size;
  };
  print("kdim", options.kdim());
  print("vdim", options.vdim());
  print("out_dim", options.out_dim());
  print("qk_dim", options.qk_dim());
  print("v_dim", options.v_dim());
  print("num_kv_heads", options.num_kv_heads());
  if (!options.bias()) stream << ", bias=false";
  if (!options.out_proj()) stream << ", out_proj=false";
  if (options.dropout() > 0) stream << ", dropout=" << options.dropout();
  stream << ')';
}

}  // namespace scaledot::nn
