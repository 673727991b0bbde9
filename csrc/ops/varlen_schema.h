// The arguments of scaledot::varlen, its backward and its explanation as structs, in the order of the schemas in ops/varlen.cpp: attention over
// sequences of different lengths that lie one after the other, without padding. ops/schema.h says how the structs are used.
#pragma once

#include <c10/core/SymInt.h>

#include "core/problem.h"
#include "ops/schema.h"

namespace scaledot {

struct VarlenInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor& cu_seq_q;
  const OptionalTensor& cu_seq_k;
  const OptionalTensor& seqused_k;
  const OptionalTensor& block_table;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& dropout_seed;
};

struct VarlenOptionArgs {
  c10::SymInt max_q;
  c10::SymInt max_k;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
  std::string_view causal_alignment;
  std::optional<c10::SymInt> window_left;
  std::optional<c10::SymInt> window_right;
  std::optional<double> softcap;
  std::string_view pattern;
  SymIntsOrNone pattern_args;
  std::optional<c10::SymInt> num_splits;

  // What the same call on one sequence is told.
  OptionArgs of_sequence() const {
    return {dropout_p,    is_causal, scale,        enable_gqa, causal_alignment, window_left,
            window_right, softcap,   std::nullopt, pattern,    pattern_args,     std::nullopt};
  }
};

struct VarlenArgs {
  VarlenInputs inputs;
  VarlenOptionArgs options;
};

struct VarlenBackwardArgs {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  VarlenInputs inputs;
  const Tensor& output;
  const Tensor& lse;
  VarlenOptionArgs options;
  std::array<bool, 3> output_mask;  // query, key, value
};

template <class Result>
using VarlenForwardSignature = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                      const OptionalTensor&, c10::SymInt, c10::SymInt, double, bool,
                                      std::optional<double>, bool, std::string_view, std::optional<c10::SymInt>,
                                      std::optional<c10::SymInt>, std::optional<double>, std::string_view,
                                      SymIntsOrNone, std::optional<c10::SymInt>);
using VarlenSignature = VarlenForwardSignature<Tensor2>;
using ExplainVarlenSignature = VarlenForwardSignature<std::string>;
using VarlenBackwardSignature = Tensor3(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                        const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                        const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool,
                                        std::optional<double>, bool, std::string_view, std::optional<c10::SymInt>,
                                        std::optional<c10::SymInt>, std::optional<double>, std::string_view,
                                        SymIntsOrNone, std::optional<c10::SymInt>, std::array<bool, 3>);

template <auto kernel>
constexpr auto varlen_kernel = &Unbundled<VarlenArgs, kernel, VarlenSignature>::call;
template <auto kernel>
constexpr auto explain_varlen_kernel = &Unbundled<VarlenArgs, kernel, ExplainVarlenSignature>::call;
template <auto kernel>
constexpr auto varlen_backward_kernel = &Unbundled<VarlenBackwardArgs, kernel, VarlenBackwardSignature>::call;

// Calls through the dispatcher, from the top or (with keys) from below the caller's own key.
Tensor2 call_varlen(const VarlenArgs& args);
Tensor2 call_varlen(c10::DispatchKeySet keys, const VarlenArgs& args);
Tensor3 call_varlen_backward(const VarlenBackwardArgs& args);
Tensor3 call_varlen_backward(c10::DispatchKeySet keys, const VarlenBackwardArgs& args);
std::string call_explain_varlen(const VarlenArgs& args);

// ---------------------------------------------------------------------------------------------------- varlen_check.cpp
template <class Int>
struct VarlenShapes {
  using Vector = c10::SmallVector<Int, 5>;

  Int sequences, total_q, total_k, heads, kv_heads, head_dim, value_dim;

  Vector output() const { return {total_q, heads, value_dim}; }
  Vector lse() const { return {heads, total_q}; }
};

// Every check but those that have to read cu_seq_q, cu_seq_k, seqused_k and block_table.
template <class Int>
VarlenShapes<Int> check_varlen(const VarlenInputs& inputs, const VarlenOptionArgs& options, bool needs_seed = true);
template <class Int>
void check_varlen_backward(const VarlenBackwardArgs& args, const VarlenShapes<Int>& shapes);

// The numbers in them, on the CPU, for a problem of ops/varlen_dense.cpp.
void check_sequences(const Problem& packed);

// ---------------------------------------------------------------------------------------------------- varlen_sequences.cpp
// The same results from one scaledot::sdpa (or sdpa_backward) for each sequence, so differentiable to any order and in forward mode.
// Waits for the device, to know the lengths.
Tensor2 varlen_by_sequence(const VarlenArgs& args);
Tensor3 varlen_backward_by_sequence(const VarlenBackwardArgs& args);

}  // namespace scaledot
