// Checks of the arguments that only the ops on dense tensors have. The other checks are in ops/common.
#pragma once

#include "ops/common/shapes.h"
#include "ops/sdpa/op.h"

namespace scaledot {

// The sizes of the returned weights: (..., heads, query_length, key_length), without heads if they are averaged, (0,)
// if they are not returned. Checks return_weights and average_weights.
template <class Int>
c10::SmallVector<Int, 5> returned_sizes(const SdpaArgs& args, const Shapes<Int>& shapes);

// The strides of the output: args.output_strides, or those of Shapes::output_strides.
template <class Int>
c10::SmallVector<Int, 5> output_strides(const SdpaArgs& args, const Shapes<Int>& shapes);

// The sizes and dtype of what a forward saves: of the softmax, of the output's low part, or (0,). Checks saved_keys and
// save_output_low.
template <class Int>
c10::SmallVector<Int, 5> saved_sizes(const SdpaRecordedArgs& args, const Shapes<Int>& shapes);
at::ScalarType saved_dtype(const SdpaRecordedArgs& args);

// Checks the tensors that only the backward has.
template <class Int>
void check_backward(const SdpaBackwardArgs& args, const Shapes<Int>& shapes);

// Checks the arguments of scaledot::sdpa_mask and returns the sizes of its results.
template <class Int>
struct MaskShapes {
  Int query_length, key_length;
  c10::SmallVector<Int, 5> bias;  // (..., heads, query_length, key_length); (0,) without alibi_slopes
};
template <class Int>
MaskShapes<Int> check_mask(const SdpaMaskArgs& args);

void check_dropout_mask(const DropoutMaskArgs& args);

}  // namespace scaledot
