// The shapes of a call after broadcasting, and every check of shapes. Int is int64_t, or c10::SymInt for Meta kernels.
#pragma once

#include <c10/util/SmallVector.h>

#include "ops/common/arguments.h"

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
  Int columns = 0;         // of weights: key_length, or that of a list of key_indices
  bool has_heads = false;  // false: query, key and value are 2-D, and so is the output

  Vector leading() const;         // (..., heads), empty for 2-D inputs
  Vector output() const;          // (..., heads, query_length, value_dim)
  Vector output_strides() const;  // of memory laid out as (..., query_length, heads, value_dim) from 4-D on
  Vector lse() const;             // (..., heads, query_length)
  Vector weights() const;         // (..., heads, query_length, columns)
  Vector kernel_query() const;    // (..., heads, query_length, head_dim): grad_query before broadcasting is undone
  Vector kernel_key() const;      // (..., kv_heads, key_length, head_dim)
  Vector kernel_value() const;    // (..., kv_heads, key_length, value_dim)
};

// Checks the shapes of the inputs and returns the broadcast ones.
template <class Int>
Shapes<Int> infer_shapes(const SdpaInputs& inputs, const AttentionOptions& options);

// Parts of it, for ops with other arguments.
void check_dims(const Tensor& tensor, const char* name);  // at least (length, head_dim)
void check_distance_count(const Tensor& relative_bias);   // its last dimension

// Checks a result of the forward, or its gradient, that a backward was given. `tensor` may be absent.
template <class Int>
void check_result(const Tensor* tensor, const char* name, const c10::SmallVector<Int, 5>& shape, at::ScalarType type,
                  const Tensor& query);

c10::SmallVector<int64_t, 5> row_major_strides(at::IntArrayRef sizes);

template <class Int>
Int as_int(const c10::SymInt& number) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return number.expect_int();
  } else {
    return number;
  }
}

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
