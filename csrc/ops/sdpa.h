// The public C++ face of scaledot's attention: one call, its options and its results.
// From C++, include <scaledot/scaledot.h>. The ops' schemas are in ops/sdpa.cpp.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace scaledot {

// Everything an attention call is told besides query, key and value. Names and defaults are those of the op's schema.
struct SdpaOptions {
  // bool (true = attend) or any floating dtype (added to the scaled score), of any shape that broadcasts to
  // (..., heads, query_length, key_length). A floating mask that requires grad gets a gradient of its own shape.
  std::optional<at::Tensor> attn_mask;
  std::optional<at::Tensor> alibi_slopes;  // (heads) or (batch, heads): adds -slope * |distance from the diagonal|

  double dropout_p = 0.0;                  // inverted dropout on the weights, in [0, 1)
  std::optional<at::Tensor> dropout_seed;  // int64 (2,), CPU or query's device: the same seed drops the same weights.
                                           // Or (batch..., 2): a seed for each index of the first batch dimensions
  std::optional<at::Generator> generator;  // where it is drawn from; default: torch's, of the CPU or query's GPU

  bool is_causal = false;
  std::optional<double> scale;  // default: 1 / sqrt(head_dim)
  bool enable_gqa = false;
  std::string causal_alignment = "upper_left";  // or "lower_right"
  std::optional<c10::SymInt> window_left;       // absent: unbounded
  std::optional<c10::SymInt> window_right;
  std::optional<double> softcap;
  double masked_score = -std::numeric_limits<double>::infinity();
  std::string pattern = "none";  // a further mask kind of core/mask.h, and its arguments
  std::vector<c10::SymInt> pattern_args;
  bool return_weights = false;
  bool average_weights = false;  // those returned are the mean over the heads; on a CPU no more than that is stored
};

struct SdpaResult {
  at::Tensor output;  // (..., heads, query_length, value_dim)
  at::Tensor lse;     // (..., heads, query_length): log of the sum of exp(score); float32, or float64 for float64
  at::Tensor
      weights;  // (..., heads, query_length, key_length) if return_weights, without heads if average_weights too;
                // otherwise of shape (0,)
};

// softmax(scale * query key^T + masks) value, with gradients for query, key, value and a floating attn_mask. Shapes and
// broadcasting are those of torch's scaled_dot_product_attention. Throws c10::ValueError, c10::TypeError or c10::Error
// with a message that names the argument.
C10_EXPORT SdpaResult scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const SdpaOptions& options = {});

// Which kernel the same call would use, why each faster one was refused and how much workspace it takes, as JSON.
// Reads no data and allocates none, so it also answers for meta tensors and for problems that do not fit in memory.
C10_EXPORT std::string explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const SdpaOptions& options = {});

}  // namespace scaledot
