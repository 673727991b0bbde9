// Checks of the arguments that only packed sequences have. The other checks are in ops/common/checks.h.
#pragma once

#include <c10/util/SmallVector.h>

#include "core/problem.h"
#include "ops/varlen/op.h"

namespace scaledot {

template <class Int>
struct VarlenShapes {
  using Vector = c10::SmallVector<Int, 5>;

  Int sequences, total_q, total_k, heads, kv_heads, head_dim, value_dim;

  Vector output() const { return {total_q, heads, value_dim}; }
  Vector lse() const { return {heads, total_q}; }
};

// Makes every check except those that read cu_seq_q, cu_seq_k, seqused_k and block_table.
template <class Int>
VarlenShapes<Int> check_varlen(const VarlenArgs& args, bool needs_seed = true);
void check_varlen_recorded(const VarlenRecordedArgs& args);  // the arguments that only it has
template <class Int>
void check_varlen_backward(const VarlenBackwardArgs& args, const VarlenShapes<Int>& shapes);

// The checks that read them, on the CPU.
void check_sequences(const Problem& packed);

}  // namespace scaledot
