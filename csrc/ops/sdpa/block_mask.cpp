#include "ops/sdpa/block_mask.h"

#include <ATen/ATen.h>

#include "core/block_mask.h"
#include "ops/common/checks.h"

namespace scaledot {
namespace {

constexpr int64_t kWord = 64;  // bits

// (..., rows, keys) -> (..., row blocks, key blocks, block_rows, block_keys), with false past the last row and key.
Tensor by_blocks(const Tensor& mask, int64_t rows, int64_t keys) {
  const int64_t down = ceil_div(mask.size(-2), rows), across = ceil_div(mask.size(-1), keys);
  const Tensor whole = at::constant_pad_nd(mask, {0, across * keys - mask.size(-1), 0, down * rows - mask.size(-2)});
  return whole.unflatten(-1, {across, keys}).unflatten(-3, {down, rows}).transpose(-3, -2);
}

// (..., keys) bool -> (..., words) int64
Tensor packed_bits(const Tensor& shown) {
  const int64_t words = ceil_div(shown.size(-1), kWord);
  const Tensor whole = at::constant_pad_nd(shown, {0, words * kWord - shown.size(-1)}).unflatten(-1, {words, kWord});
  const Tensor bit = at::arange(kWord, shown.options().dtype(at::kLong));
  return whole.to(at::kLong).bitwise_left_shift(bit).sum(-1);
}

}  // namespace

BlockMask BlockMask::from_dense(const Tensor& mask, int64_t block_rows, int64_t block_keys) {
  check_strided(mask, "mask");
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, "mask: got dtype ", dtype_name(mask.scalar_type()),
                   "; needs torch.bool, true = may attend");
  TORCH_CHECK_VALUE(mask.dim() >= 2, "mask: got shape ", shape_of(mask), "; needs (..., query_length, key_length)");
  TORCH_CHECK_VALUE(block_rows > 0, "block_rows: got ", block_rows, "; needs at least 1");
  TORCH_CHECK_VALUE(block_keys > 0, "block_keys: got ", block_keys, "; needs at least 1");
  const Tensor shown = by_blocks(mask, block_rows, block_keys);
  const Tensor exists = by_blocks(at::ones({mask.size(-2), mask.size(-1)}, mask.options()), block_rows, block_keys);
  const Tensor any = shown.flatten(-2).any(-1), all = (shown == exists).flatten(-2).all(-1);
  const Tensor partial = any.logical_and(all.logical_not());
  const Tensor numbers = partial.flatten().cumsum(0).view(partial.sizes()) - 1;
  const Tensor kinds = at::where(all, at::full({}, int64_t(kFullBlock), numbers.options()),
                                 at::full({}, int64_t(kEmptyBlock), numbers.options()));
  return {at::where(partial, numbers, kinds).to(at::kInt),
          packed_bits(shown.index({partial})),
          block_rows,
          block_keys,
          mask.size(-2),
          mask.size(-1)};
}

Tensor BlockMask::to_dense() const {
  return dense_block_mask(blocks, bits, {block_rows, block_keys, query_length, key_length});
}

Tensor dense_block_mask(const Tensor& blocks, const Tensor& bits, const std::vector<c10::SymInt>& shape) {
  const c10::SymInt &rows = shape[0], &keys = shape[1];
  const Tensor bit = at::arange(kWord, bits.options());
  const Tensor shown = bits.unsqueeze(-1).bitwise_right_shift(bit).bitwise_and(1).to(at::kBool).flatten(-2);
  // Block `number` is entry number + 2 of the table.
  const Tensor kinds = at::arange(2, bits.options()).to(at::kBool).view({2, 1, 1}).expand_symint({2, rows, keys});
  const Tensor table = at::cat({kinds, shown.slice_symint(-1, 0, keys)});
  const Tensor found = table.index({blocks.to(at::kLong) - int64_t(kEmptyBlock)});
  const Tensor whole = found.transpose(-3, -2).flatten(-2).flatten(-3, -2);
  return whole.slice_symint(-2, 0, shape[2]).slice_symint(-1, 0, shape[3]);
}

}  // namespace scaledot
