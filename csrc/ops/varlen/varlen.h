// The public C++ call for packed sequences: its options, its results. C++ programs include <scaledot/scaledot.h>.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "../common/options.h"

namespace scaledot {

// dropout_p, is_causal, scale, ... of UserOptions, and:
struct VarlenOptions : UserOptions {
  VarlenOptions() { causal_alignment = "lower_right"; }

  std::optional<at::Tensor> seqused_k;  // (sequences), int32 or int64: how many of its keys each sequence has
  // (sequences, pages of a sequence), int32 or int64: key j of sequence b is row j % page_size of page
  // block_table[b][j / page_size]. Needs seqused_k; has no gradient.
  std::optional<at::Tensor> block_table;
  std::optional<at::Tensor> alibi_slopes;  // (heads) or (sequences, heads): adds -slope * |distance from the diagonal|
  // Floating, of any shape that broadcasts to (sequences, heads, 2 M + 1); see SdpaOptions.
  std::optional<at::Tensor> relative_bias;
  // float32, (), (kv_heads) or (sequences, kv_heads): the factors of the numbers that quantised keys and values store.
  // Absent: 1.
  std::optional<at::Tensor> k_scale, v_scale;
  // (total_q, W) or (heads or 1, total_q, W), boolean (true = may attend) or floating (added to scores). Row r is of
  // row r of query, and the columns are the last W keys of its sequence. Keys before them are not affected. Columns
  // without a key are ignored.
  std::optional<at::Tensor> attn_mask;

  // int64 (2,), on the CPU or query's device: the same seed drops the same weights. (seeds, 2): each seed belongs to
  // an equal number of consecutive sequences. Absent: drawn from `generator`.
  std::optional<at::Tensor> dropout_seed;
  std::optional<at::Generator> generator;  // default: torch's, of the CPU or query's GPU

  std::optional<c10::SymInt> num_splits;  // into at most how many parts a GPU cuts the keys of a sequence
};

struct VarlenResult {
  at::Tensor output;  // (total_q, heads, value_dim)
  at::Tensor lse;     // (heads, total_q): log of the sum of exp(score); float32, or float64 for float64
};

// Attention over sequences of different lengths that follow each other without padding, with gradients for query,
// key, value, relative_bias and a floating attn_mask.
//   cu_seq_q, cu_seq_k  (sequences + 1), int32 or int64: sequence b has the rows cu_seq_q[b] to cu_seq_q[b + 1] of
//                       query (total_q, heads, head_dim) and the rows cu_seq_k[b] to cu_seq_k[b + 1] of key
//                       (total_k, kv_heads, head_dim) and value (total_k, kv_heads, value_dim)
//   block_table         with it key and value are (pages, page_size, kv_heads, ...), and cu_seq_k is absent
//   max_q, max_k        at least the largest number of rows and of keys of a sequence
// key and value may both be float8_e4m3fn, float8_e5m2 or int8 (quantised) with a query of float32, bfloat16 or
// float16. Such a call has no gradient.
// Throws c10::ValueError, c10::TypeError or c10::Error with a message that names the argument.
C10_EXPORT VarlenResult varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k,
                                         c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& options = {});

// Which kernels the same call would use for its sequences, why each faster one was refused and how much workspace they
// take, as JSON. It reads no tensors except the lengths, and those only on a CPU.
C10_EXPORT std::string explain_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k,
                                      c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& options = {});

}  // namespace scaledot
