// The only way from tensors to a Problem.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "core/problem.h"
#include "ops/common/shapes.h"

namespace scaledot {

// Key or value with kv_heads heads: repeated if the head counts of key and value differ and neither is 1, otherwise the
// tensor itself.
Tensor with_heads(const Tensor& tensor, int64_t kv_heads);
bool needs_heads(const Tensor& tensor, int64_t kv_heads);

// Whether Problems are row_invariant, for the whole process. Returns what was set before.
bool set_row_invariant(bool enabled);

// Fills a Problem from arguments that have passed the checks. Tensors are added one by one, each to its field; finish()
// merges the batch dimensions that are evenly spaced in all of them and checks that the rest fits.
class ProblemBuilder {
 public:
  // `shape_only`: tensors have no data (explain, meta tensors); every tensor with elements gets the same fake address.
  ProblemBuilder(const SdpaInputs& inputs, const AttentionOptions& options, const Shapes<int64_t>& shapes,
                 bool shape_only = false);

  // The score function of a pass; both must live as long as the problem.
  void add_score(const ScoreProgram* program) { problem_.score_program = program; }
  void add_seed(const OptionalTensor& seed);  // as Backend::seed returns it
  void add(TensorView Problem::*field, const Tensor& tensor);
  void add(TensorView Problem::*field, const OptionalTensor& tensor);
  void add_written(TensorView Problem::*field, const Tensor& tensor);  // of a caller: its memory may be copy-on-write
  // The field of what a forward saves for its backward: the softmax of the first `keys` keys, or without a number the
  // low part of the output.
  TensorView Problem::*saved_field(const std::optional<c10::SymInt>& keys);
  // A tensor yet to be allocated, if shape_only. `sizes` and `strides` must outlive finish().
  void add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

  // Without `packed`: an ordinary problem. relative_bias is left with the entries that some score may read.
  Problem finish(const Packed& packed = {}, const Pages& pages = {});

 private:
  struct Entry {
    TensorView* view;
    at::IntArrayRef sizes, strides;
    int trailing;  // how many of head, row, column its dimensions end with
    int64_t batch_stride(int from_last) const;
  };
  void add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, void* data);
  void add_blocks(const Tensor& blocks, const Tensor& bits, const AttentionOptions& options);

  const Shapes<int64_t>& shapes_;
  bool shape_only_;
  Problem problem_{};
  // These have a dtype and layout that kernels read. They must live as long as the builder.
  Tensor slopes_, relative_bias_, block_bits_;
  c10::SmallVector<Entry, 16> entries_;
};

}  // namespace scaledot
