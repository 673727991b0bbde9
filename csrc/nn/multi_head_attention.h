// scaledot::nn::MultiHeadAttention: the layer scaledot.MultiHeadAttention of Python, as a torch::nn module. Options,
// parameters and results have the same names and meanings, so that a state dict fits both.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <optional>
#include <ostream>
#include <tuple>

#include "../ops/sdpa/block_mask.h"

namespace scaledot::nn {

// Position i attends to keys i - left to i + right; absent: no limit on that side.
struct Window {
  std::optional<int64_t> left;
  std::optional<int64_t> right;
};

struct MultiHeadAttentionOptions {
  MultiHeadAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}

  TORCH_ARG(int64_t, embed_dim);            // features of query
  TORCH_ARG(int64_t, num_heads);            // query heads
  TORCH_ARG(std::optional<int64_t>, kdim);  // features of key; default embed_dim
  TORCH_ARG(std::optional<int64_t>, vdim);  // features of value; default embed_dim
  // Features of the output; default embed_dim. Without out_proj it is v_dim and cannot be given.
  TORCH_ARG(std::optional<int64_t>, out_dim);
  // Widths of all projected query heads together, and of the values as if there were num_heads value heads: multiples
  // of num_heads, default embed_dim.
  TORCH_ARG(std::optional<int64_t>, qk_dim);
  TORCH_ARG(std::optional<int64_t>, v_dim);
  TORCH_ARG(std::optional<int64_t>, num_kv_heads);  // key and value heads, a divisor of num_heads; default num_heads
  TORCH_ARG(bool, bias) = true;                     // whether the projections have biases
  TORCH_ARG(bool, out_proj) = true;                 // whether there is an output projection
  TORCH_ARG(double, dropout) = 0.0;                 // of the attention weights, in [0, 1]; in training mode only
};

// Multi-head attention, Vaswani et al., "Attention Is All You Need", 2017. With fewer key and value heads than query
// heads it is grouped-query attention, Ainslie et al., "GQA", 2023.
//
// Throws c10::ValueError for options or shapes that do not fit, c10::TypeError for a key_mask that is not boolean.
class MultiHeadAttentionImpl : public torch::nn::Cloneable<MultiHeadAttentionImpl> {
 public:
  MultiHeadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiHeadAttentionImpl(MultiHeadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiHeadAttentionImpl(const MultiHeadAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // Draws new weights (Glorot and Bengio's uniform rule, each projection by its own shape) and sets biases to 0.
  void reset_parameters();

  //   query      (B, Lq, embed_dim), or unbatched (Lq, embed_dim)
  //   key        (B, Lk, kdim) or (Lk, kdim); undefined: query
  //   value      (B, Lk, vdim) or (Lk, vdim); undefined: key
  //   attn_mask  boolean (true = may attend) or floating (added to the scores), broadcast to (B, num_heads, Lq, Lk)
  //   key_mask   boolean (B, Lk), or (Lk) for all sequences; true = may attend, false for padding
  //   is_causal  position i attends to keys 0 to i
  //   relative_bias  floating, broadcast to (B, num_heads, 2 M + 1): entry M + clamp(j - i, -M, M) is added to the
  //              score of position i and key j
  //   block_mask which keys the positions may attend to, by blocks
  // All masks compose. Returns the output, (B, Lq, out_dim) or (Lq, out_dim), and the weights after dropout,
  // (B, num_heads, Lq, Lk) or (num_heads, Lq, Lk), which are undefined unless need_weights. A position with nothing to
  // attend to has heads of 0.
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& query, const torch::Tensor& key = {},
                                                   const torch::Tensor& value = {}, const torch::Tensor& attn_mask = {},
                                                   const torch::Tensor& key_mask = {}, bool is_causal = false,
                                                   const Window& window = {}, bool need_weights = false,
                                                   const torch::Tensor& relative_bias = {},
                                                   const std::optional<BlockMask>& block_mask = std::nullopt);

  MultiHeadAttentionOptions options;
  torch::nn::Linear q_proj{nullptr};
  torch::nn::Linear k_proj{nullptr};
  torch::nn::Linear v_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};  // empty if options.out_proj() is false

 protected:
  // For torch::nn::AnyModule, which cannot see default arguments.
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())}, {2, torch::nn::AnyValue(torch::Tensor())},
                           {3, torch::nn::AnyValue(torch::Tensor())}, {4, torch::nn::AnyValue(torch::Tensor())},
                           {5, torch::nn::AnyValue(false)}, {6, torch::nn::AnyValue(Window())},
                           {7, torch::nn::AnyValue(false)}, {8, torch::nn::AnyValue(torch::Tensor())},
                           {9, torch::nn::AnyValue(std::optional<BlockMask>())})

 private:
  void check_features(const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value) const;

  int64_t num_kv_heads_ = 0;
  int64_t head_dim_ = 0;    // of one query or key head
  int64_t v_head_dim_ = 0;  // of one value head
};

TORCH_MODULE(MultiHeadAttention);

}  // namespace scaledot::nn
