// The output in memory of the caller: the ops sdpa_out and varlen_out, and the checks of their `out`.
//
// They write to an argument, so they are ops of their own: a plain call stays one that compilers may move and save.
// Nothing of them has a gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "ops/common/autograd_node.h"

namespace scaledot {

// Checks whether `out` can be the output, of `shape`, except for the memory of other tensors.
template <class Int>
void check_out(const Tensor& out, const c10::SmallVector<Int, 5>& shape, const Tensor& query);

// Throws if a byte may belong to both tensors. `argument`: that of `tensor`.
void check_out_apart(const Tensor& out, const Tensor& tensor, const char* argument);

// Every check of `out`, for tensors with data.
template <class Inputs>
void check_out_memory(const Tensor& out, const c10::SmallVector<int64_t, 5>& shape, const Inputs& inputs) {
  check_out<int64_t>(out, shape, inputs.query);
  for_each_input(inputs, [&](const auto& row) {
    if (const Tensor* tensor = present(row.tensor)) check_out_apart(out, *tensor, row.argument);
  });
}

// Throws if a gradient is recorded, or a tensor has a tangent.
void check_out_needs_no_grad(const Tensor& tensor, const char* argument);
template <class Inputs>
void check_out_needs_no_grad(const Tensor& out, const Inputs& inputs) {
  check_out_needs_no_grad(out, "out");
  for_each_input(inputs, [&](const auto& row) {
    if (const Tensor* tensor = present(row.tensor)) check_out_needs_no_grad(*tensor, row.argument);
  });
}

// The Autograd kernel.
template <class Op>
typename Op::Result out_autograd(c10::DispatchKeySet keys, const typename Op::Args& args) {
  check_not_nested(args.inputs.query, args.inputs.key, args.inputs.value);
  check_out_needs_no_grad(args.out, args.inputs);
  const at::AutoDispatchBelowAutograd below;
  return redispatch<Op>(keys & c10::after_autograd_keyset, args);
}

// The kernel below autograd. A node that saved `out` finds out that it changed; a tensor made in inference mode may
// only change there.
template <class Op>
typename Op::Result out_in_place(c10::DispatchKeySet keys, const typename Op::Args& args) {
  args.out.unsafeGetTensorImpl()->bump_version();
  const at::AutoDispatchBelowADInplaceOrView below;
  return redispatch<Op>(keys & c10::after_ADInplaceOrView_keyset, args);
}

}  // namespace scaledot
