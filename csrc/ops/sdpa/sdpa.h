// The public C++ call for dense tensors: its options, its results. C++ programs include <scaledot/scaledot.h>.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "../common/options.h"
#include "block_mask.h"

namespace scaledot {

// dropout_p, is_causal, scale, ... of UserOptions, and:
struct SdpaOptions : UserOptions {
  std::optional<double> masked_score;  // what a masked position of a boolean attn_mask scores; absent: -inf

  // Boolean (true = may attend) or any floating dtype (added to the scaled score), of any shape that broadcasts to
  // (..., heads, query_length, key_length). A floating mask that requires grad gets a gradient of its shape.
  std::optional<at::Tensor> attn_mask;
  std::optional<at::Tensor> alibi_slopes;  // (heads) or (batch, heads): adds -slope * |distance from the diagonal|
  // Floating, of any shape that broadcasts to (..., heads, 2 M + 1): adds entry M + clamp(distance, -M, M), where the
  // distance from the diagonal is positive for later keys. It gets a gradient of its shape.
  std::optional<at::Tensor> relative_bias;

  std::optional<BlockMask> block_mask;  // which keys the rows may attend to, by blocks; composes with all other masks

  // int32 or int64 (..., heads or kv_heads or 1, query_length, K): the keys that each row attends to, in any order.
  // A negative entry is none, and a key that is listed twice counts twice. CPU only; without attn_mask, alibi_slopes,
  // relative_bias and block_mask.
  std::optional<at::Tensor> key_indices;

  // int64 (2,), on the CPU or query's device: the same seed drops the same weights. (batch..., 2) has a seed for each
  // index of the first batch dimensions. Absent: drawn from `generator`.
  std::optional<at::Tensor> dropout_seed;
  std::optional<at::Generator> generator;  // default: torch's, of the CPU or query's GPU

  bool return_weights = false;
  bool average_weights = false;  // return the mean of the weights over the heads, and store only that
};

struct SdpaResult {
  at::Tensor output;  // (..., heads, query_length, value_dim)
  at::Tensor lse;     // (..., heads, query_length): log of the sum of exp(score); float32, or float64 for float64
  // (..., heads, query_length, key_length or K) with return_weights, without heads with average_weights; otherwise
  // (0,).
  at::Tensor weights;
};

// softmax(scale * query key^T + masks) value, with gradients for query, key, value, a floating attn_mask and
// relative_bias. Shapes and broadcasting are those of torch's scaled_dot_product_attention. Throws c10::ValueError,
// c10::TypeError or c10::Error with a message that names the argument.
C10_EXPORT SdpaResult scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const SdpaOptions& options = {});

// Which kernel the same call would use, why each faster one was refused and how much workspace it takes, as JSON.
// Reads no data and allocates none, so it also answers for meta tensors and for problems that do not fit in memory.
C10_EXPORT std::string explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const SdpaOptions& options = {});

}  // namespace scaledot
