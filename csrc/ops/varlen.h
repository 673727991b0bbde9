// The public C++ face of attention over packed sequences: one call, its options and its results.
// From C++, include <scaledot/scaledot.h>. The ops' schemas are in ops/varlen.cpp.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <vector>

namespace scaledot {

// Everything that a call is told besides its tensors and lengths. Names and defaults are those of the op's schema.
struct VarlenOptions {
  std::optional<at::Tensor> seqused_k;  // (sequences), int32 or int64: how many of its keys each sequence has
  // (sequences, pages of a sequence), int32 or int64: key j of sequence b is row j % page_size of page
  // block_table[b][j / page_size]. Needs seqused_k; has no gradient.
  std::optional<at::Tensor> block_table;
  std::optional<at::Tensor> alibi_slopes;  // (heads) or (sequences, heads): adds -slope * |distance from the diagonal|

  double dropout_p = 0.0;                  // inverted dropout on the weights, in [0, 1)
  std::optional<at::Tensor> dropout_seed;  // int64 (2,), CPU or query's device: the same seed drops the same weights.
                                           // Or (seeds, 2): each is that of as many sequences in a row
  std::optional<at::Generator> generator;  // where it is drawn from; default: torch's, of the CPU or query's GPU

  bool is_causal = false;
  std::optional<double> scale;  // default: 1 / sqrt(head_dim)
  bool enable_gqa = false;
  std::string causal_alignment = "lower_right";  // or "upper_left"
  std::optional<c10::SymInt> window_left;        // absent: unbounded
  std::optional<c10::SymInt> window_right;
  std::optional<double> softcap;
  std::string pattern = "none";  // a further mask kind of core/mask.h, and its arguments
  std::vector<c10::SymInt> pattern_args;
  std::optional<c10::SymInt> num_splits;  // in how many parts at most a GPU cuts the keys of a sequence
};

struct VarlenResult {
  at::Tensor output;  // (total_q, heads, value_dim)
  at::Tensor lse;     // (heads, total_q): log of the sum of exp(score); float32, or float64 for float64
};

// Attention over sequences of different lengths that lie one after the other, without padding, with gradients for query, key and
// value. Sequence b has the rows cu_seq_q[b] to cu_seq_q[b + 1] of query (total_q, heads, head_dim) and the rows cu_seq_k[b] to
// cu_seq_k[b + 1] of key (total_k, kv_heads, head_dim) and value (total_k, kv_heads, value_dim); with block_table key and value
// are (pages, page_size, kv_heads, ...), and cu_seq_k is absent. cu_seq_q and cu_seq_k: (sequences + 1), int32 or int64. max_q and
// max_k: at least the largest number of rows and of keys that a sequence has. Throws c10::ValueError, c10::TypeError or c10::Error
// with a message that names the argument.
C10_EXPORT VarlenResult varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k,
                                         c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& options = {});

// Which kernels the same call would use for its sequences, why each faster one was refused and how much workspace they take, as JSON.
// Looks at the lengths on a CPU, at nothing else.
C10_EXPORT std::string explain_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k,
                                      c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& options = {});

}  // namespace scaledot
