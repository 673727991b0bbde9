// The only way from tensors to a Problem, and every check of an op's arguments.
//
// check_* look at one property each and throw with a message that names the argument, what it got and what it needs.
// They work on SymInt sizes as well, so that the Meta kernels accept and refuse exactly what the CPU kernels do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "core/problem.h"
#include "ops/schema.h"

namespace scaledot {

// The sizes of a call after broadcasting. Int is int64_t or c10::SymInt.
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

// Checks layouts, dtypes, devices and options. `needs_seed`: dropout_seed must be there if dropout_p > 0.
void check_arguments(const SdpaInputs& inputs, const OptionArgs& options, bool needs_seed = true);

// Checks shapes and returns the broadcast ones.
template <class Int>
Shapes<Int> infer_shapes(const SdpaInputs& inputs, bool enable_gqa);

// The sizes of the weights that are returned: (..., heads, query_length, key_length), without heads if they are averaged, (0,) if they
// are not asked for.
template <class Int>
c10::SmallVector<Int, 5> weights_sizes(const SdpaArgs& args, const Shapes<Int>& shapes);

// Checks the tensors that only the backward has.
template <class Int>
void check_backward(const BackwardArgs& args, const Shapes<Int>& shapes);

// Checks the arguments of scaledot::sdpa_mask and returns the sizes of what it makes.
template <class Int>
struct MaskShapes {
  Int query_length, key_length;
  c10::SmallVector<Int, 5> bias;  // (..., heads, query_length, key_length); (0,) without alibi_slopes
};
template <class Int>
MaskShapes<Int> check_mask(const MaskArgs& args);

void check_dropout_mask(const DropoutMaskArgs& args);

void check_positions(const OptionArgs& options);       // causal_alignment, windows, pattern, part
void check_differentiable(const OptionArgs& options);  // that the formula can stand for the kernels
void check_strided(const Tensor& tensor, const char* name);
void check_dropout(double dropout_p);
void check_seed(const Tensor& seed, c10::Device other);

// The mask by position alone. The options have passed check_positions.
PositionMask position_mask(const OptionArgs& options, int64_t query_length, int64_t key_length);

// The part of the options that sdpa_mask has, the others at their defaults.
OptionArgs position_options(const MaskArgs& args);

c10::SmallVector<int64_t, 5> contiguous_strides(at::IntArrayRef sizes);

DType dtype_of(at::ScalarType type);  // DType::none for a type that kernels do not know
bool is_kernel_float(at::ScalarType type);
std::string dtype_name(at::ScalarType type);  // as Python says it: float32
inline at::ScalarType lse_dtype(at::ScalarType input) { return input == at::kDouble ? at::kDouble : at::kFloat; }
inline const Tensor* present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}

// What infer_shapes decided for key and value when their head counts differ and neither is 1: each head is repeated until
// there are kv_heads of them. Otherwise the tensor itself.
Tensor with_heads(const Tensor& tensor, int64_t kv_heads);
bool needs_heads(const Tensor& tensor, int64_t kv_heads);

// Fills a Problem. Tensors are added one by one, each to the field it belongs to; finish() then merges batch dimensions
// that lie evenly in all of them and checks that what remains fits.
class ProblemBuilder {
 public:
  // `pretend`: tensors have no data (explain, meta tensors); every non-empty one gets the same fake address.
  ProblemBuilder(const SdpaInputs& inputs, const OptionArgs& options, const Shapes<int64_t>& shapes,
                 bool pretend = false);

  void add(TensorView Problem::*field, const Tensor& tensor);
  void add(TensorView Problem::*field, const OptionalTensor& tensor);
  // A tensor yet to be allocated; for pretending only. `sizes` and `strides` must outlive finish().
  void add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

  Problem finish();

 private:
  struct Entry {
    TensorView* view;
    at::IntArrayRef sizes, strides;
    int trailing;  // how many of head, row, column its dimensions end with
    int64_t batch_stride(int from_last) const;
  };
  void add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, void* data);

  const Shapes<int64_t>& shapes_;
  bool pretend_;
  Problem problem_{};
  // Inputs in the form that kernels read, if they had another; they live as long as the builder.
  Tensor slopes_;
  Tensor seed_;
  c10::SmallVector<Entry, 16> entries_;
};

}  // namespace scaledot
