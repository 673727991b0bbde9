// A block mask: which keys the rows may attend to, by blocks of rows and keys. Blocks are empty (skipped), full
// (computed without a mask) or partial (with one bit an element). core/block_mask.h is what the kernels read of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <vector>

namespace scaledot {

struct BlockMask {
  at::Tensor blocks;  // int32 (..., row blocks, key blocks): -2 empty, -1 full, n >= 0 partial, with the bits bits[n]
  at::Tensor bits;    // int64 (partial blocks, block_rows, words): bit k % 64 of word k / 64 is key k of the block
  int64_t block_rows, block_keys;
  int64_t query_length, key_length;

  // The block mask of a boolean mask (..., query_length, key_length), true = may attend. The dimensions before the last
  // two broadcast to (batch..., heads).
  C10_EXPORT static BlockMask from_dense(const at::Tensor& mask, int64_t block_rows = 128, int64_t block_keys = 128);
  C10_EXPORT at::Tensor to_dense() const;
};

// The boolean mask that the ops' arguments `blocks`, `block_bits` and `block_shape` describe.
at::Tensor dense_block_mask(const at::Tensor& blocks, const at::Tensor& bits, const std::vector<c10::SymInt>& shape);

}  // namespace scaledot
