// From tensors in memory (any strides, any storage type) to the blocks that gemm.h multiplies: widened, contiguous,
// padded with zeros to whole vectors, so that no kernel has a tail.
#pragma once

#include "cpu/simd/gemm.h"

namespace scaledot {
namespace {

// A block of a tensor's rows: element (i, d) at data[i * row_stride + d * col_stride].
template <class Storage>
struct Block {
  const Storage* data;
  int64_t row_stride;
  int64_t col_stride;
};

template <class Storage>
inline Block<Storage> block(const Problem& p, const TensorView& view, int64_t batch, int64_t head, int64_t row) {
  const Storage* start = at<const Storage>(p, view, batch, head);
  return {start ? start + row * view.row_stride : nullptr, view.row_stride, view.col_stride};
}

// One row, widened, into a contiguous array whose length is a multiple of a vector; true if all of it is finite.
template <class T, class Storage>
SCALEDOT_INLINE bool widen_row(const Storage* from, int64_t col_stride, int64_t cols, T* to) {
  const int64_t padded = round_up(cols, kLanes<T>);
  int64_t d = 0;
  if (col_stride == 1)
    for (; d + kLanes<T> <= cols; d += kLanes<T>) store(to + d, widen_load(from + d));
  for (; d < cols; ++d) to[d] = widen(from[d * col_stride]);
  for (; d < padded; ++d) to[d] = T(0);
  Vec<T> zero(T(0));  // x - x is 0 for finite x, NaN otherwise
  for (d = 0; d < padded; d += kLanes<T>) {
    const Vec<T> x = load(to + d);
    zero = zero + (x - x);
  }
  return sum_of(zero) == T(0);
}

// B = the block itself: depth = rows, columns = cols.
template <class T, class Storage>
void pack_panels(Block<Storage> from, int64_t rows, int64_t cols, T* row, Panels<T>& to) {
  to.finite = true;
  for (int64_t i = 0; i < rows; ++i) {
    to.finite &= widen_row(from.data + i * from.row_stride, from.col_stride, cols, row);
    for (int64_t d = 0; d < cols; d += kLanes<T>)
      store(to.data + d / kPanel<T> * to.stride + i * kPanel<T> + d % kPanel<T>, load(row + d));
  }
}

// B = the block's transpose: depth = cols, columns = rows, padded with zero columns to a whole vector.
template <class T, class Storage>
void pack_panels_transposed(Block<Storage> from, int64_t rows, int64_t cols, T* row, Panels<T>& to) {
  to.finite = true;
  const int64_t padded = round_up(rows, kLanes<T>);
  for (int64_t i = 0; i < padded; ++i) {
    T* column = to.data + i / kPanel<T> * to.stride + i % kPanel<T>;
    if (i < rows) {
      to.finite &= widen_row(from.data + i * from.row_stride, from.col_stride, cols, row);
      for (int64_t d = 0; d < cols; ++d) column[d * kPanel<T>] = row[d];
    } else {
      for (int64_t d = 0; d < cols; ++d) column[d * kPanel<T>] = T(0);
    }
  }
}

// A in strips: the block's rows, `first` rows into a tile of `rows` rows.
template <class T, class Storage>
void pack_strips(Block<Storage> from, int64_t first, int64_t count, int64_t rows, int64_t cols, T* row, T* strips) {
  int64_t start = 0, strip = strip_rows(rows);
  for (int64_t i = first; i < first + count; ++i) {
    while (i >= start + strip) {
      start += strip;
      strip = strip_rows(rows - start);
    }
    widen_row(from.data + (i - first) * from.row_stride, from.col_stride, cols, row);
    T* to = strips + start * cols + (i - start);
    for (int64_t d = 0; d < cols; ++d) to[d * strip] = row[d];
  }
}

// One contiguous row of results, times `factor`, narrowed into the tensor; `cols` need not be a multiple of a vector.
template <class T, class Storage>
SCALEDOT_INLINE void narrow_row(const T* from, T factor, int64_t cols, Storage* to) {
  const Vec<T> f(factor);
  int64_t d = 0;
  for (; d + kLanes<T> <= cols; d += kLanes<T>) narrow_store(to + d, load(from + d) * f);
  for (; d < cols; ++d) narrow(from[d] * factor, to[d]);
}

}  // namespace
}  // namespace scaledot
