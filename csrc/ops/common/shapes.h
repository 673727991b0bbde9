// The shapes of a call after broadcasting, and every check of shapes. Int is int64_t, or c10::SymInt for Meta kernels.
#pragma once

#include <c10/util/SmallVector.h>

#include "ops/sdpa/op.h"

namespace scaledot {

template <class Int>
struct Shapes {
  using Vector = c10::SmallVector<Int, 5>;

  Vector batch;
  Int heads = 1;
  Int kv_heads = 1;
  Int query_length = 0;
  Int key_length = 0;
  Int head_dim = 0;
  Int value_dim = 0;
  bool has_heads = false;  // false: query, key and value are 2-D, and so is the output

  Vector leading() const;         // (..., heads), empty for 2-D inputs
  Vector output() const;          // (..., heads, query_length, value_dim)
  Vector output_strides() const;  // of memory laid out as (..., query_length, heads, value_dim) from 4-D on
  Vector lse() const;             // (..., heads, query_length)
  Vector weights() const;         // (..., heads, query_length, key_length)
  Vector kernel_query() const;    // (..., heads, query_length, head_dim): grad_query before broadcasting is undone
  Vector kernel_key() const;      // (..., kv_heads, key_length, head_dim)
  Vector kernel_value() const;    // (..., kv_heads, key_length, value_dim)
};

// Checks the shapes of the inputs and returns the broadcast ones.
template <class Int>
Shapes<Int> infer_shapes(const SdpaInputs& inputs, const AttentionOptions& options);

// The sizes of the weights that are returned: (..., heads, query_length, key_length), without heads if they are
// averaged.
template <class Int>
c10::SmallVector<Int, 5> returned_sizes(const SdpaArgs& args, const Shapes<Int>& shapes);

// Where the weights begin in a third result that also has a low part of `count` elements: aligned as memory of their
// own would be.
template <class Int>
Int weights_offset(const Int& count) {
  constexpr int kElements = 32;
  return (count + (kElements - 1)) / kElements * kElements;
}

// The sizes of the third result: of the returned weights, or (0,); with saved_keys of kept weights, with
// save_output_low of the output or, if weights are returned too, of both in one dimension, the low part first. Checks
// return_weights, average_weights, saved_keys and save_output_low.
template <class Int>
c10::SmallVector<Int, 5> weights_sizes(const SdpaArgs& args, const Shapes<Int>& shapes);

// The sizes of kept weights: (..., heads, query_length, columns). Checks saved_keys.
template <class Int>
c10::SmallVector<Int, 5> saved_softmax_sizes(const SdpaInputs& in, const AttentionOptions& o,
                                             const Shapes<Int>& shapes);

// Check the option save_output_low, and the argument of a backward that goes with it.
void check_save_output_low(const Tensor& query, const AttentionOptions& options);
void check_output_low_given(const OptionalTensor& output_low, const AttentionOptions& options);

// Checks the last dimension of relative_bias.
void check_distance_count(const Tensor& relative_bias);

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

// Checks a result of the forward, or its gradient, that a backward was given. `tensor` may be absent.
template <class Int>
void check_result(const Tensor* tensor, const char* name, const c10::SmallVector<Int, 5>& shape, at::ScalarType type,
                  const Tensor& query);

c10::SmallVector<int64_t, 5> row_major_strides(at::IntArrayRef sizes);

// The sizes of a tensor as Int.
template <class Int>
c10::ArrayRef<Int> sizes_of(const Tensor& tensor) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

}  // namespace scaledot
