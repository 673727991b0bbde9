// From tensors in memory (any strides, any storage type) to the blocks that gemm.h multiplies: converted to operands,
// contiguous, padded with zeros to whole vectors, so that no kernel has a tail.
#pragma once

#include "cpu/simd/gemm.h"
#include "cpu/simd/transpose.h"

namespace scaledot {
namespace {

// A block of a tensor's rows, of one head or of several heads stacked: row r is row r % rows_per_head of head r / rows_per_head.
template <class Storage>
struct Block {
  const Storage* data;
  int64_t row_stride;
  int64_t col_stride;
  int64_t rows_per_head;
  int64_t head_stride;

  const Storage* row(int64_t r) const {
    if (r < rows_per_head) return data + r * row_stride;
    return data + r / rows_per_head * head_stride + r % rows_per_head * row_stride;
  }
};

template <class Storage>
inline Block<Storage> block(const Problem& p, const TensorView& view, int64_t batch, int64_t head, int64_t row,
                            int64_t rows_per_head = kUnbounded) {
  const Storage* start = at<const Storage>(p, view, batch, head);
  return {start ? start + row * view.row_stride : nullptr, view.row_stride, view.col_stride, rows_per_head,
          view.head_stride};
}

template <class T>
inline int64_t padded(int64_t cols) {
  return round_up(cols, 2 * kLanes<T>);
}

// One row, widened, into a contiguous array of padded(cols) numbers; true if all of it is finite.
template <class T, class Storage>
SCALEDOT_INLINE bool load_row(const Storage* from, int64_t col_stride, int64_t cols, T* to) {
  int64_t d = 0;
  Vec<T> zero(T(0));  // x - x is 0 for finite x, NaN otherwise
  if (col_stride == 1)
    for (; d + kLanes<T> <= cols; d += kLanes<T>) {
      const Vec<T> x = widen_load(from + d);
      store(to + d, x);
      zero = zero + (x - x);
    }
  const int64_t rest = d;
  for (; d < cols; ++d) to[d] = widen(from[d * col_stride]);
  for (; d % (2 * kLanes<T>) != 0; ++d) to[d] = T(0);
  for (d = rest; d < cols; d += kLanes<T>) zero = zero + (load(to + d) - load(to + d));
  return sum_of(zero) == T(0);
}

// The same where the operands are bfloat16 themselves.
inline bool load_row(const BFloat16* from, int64_t col_stride, int64_t cols, BFloat16* to) {
  constexpr uint16_t kInfinity = 0x7f80;
  uint16_t special = 0;
  for (int64_t d = 0; d < cols; ++d) {
    const uint16_t bits = from[d * col_stride].bits;
    to[d].bits = bits;
    special |= uint16_t((bits & kInfinity) == kInfinity);
  }
  for (int64_t d = cols; d < padded<float>(cols); ++d) to[d].bits = 0;
  return special == 0;
}

template <class Number>
inline void clear_row(Number* row, int64_t width) {
  for (int64_t d = 0; d < width; ++d) row[d] = {};
}

// A: rows of operands (Layout::rows). `row`: padded(cols) numbers.
template <class E, class Storage>
bool pack_rows(const Block<Storage>& from, int64_t rows, int64_t cols, NumberOf<E>* row, E* to) {
  constexpr int kStep = kLanes<SumOf<E>>;
  bool finite = true;
  for (int64_t r = 0; r < rows; ++r) {
    finite &= load_row(from.row(r), from.col_stride, cols, row);
    E* out = to + r * kRowStride<E>;
    for (int64_t k = 0; k < steps_of<E>(cols); k += kStep)
      store(out + k / kRowSteps<E> * kTileRows * kRowStride<E> + k % kRowSteps<E>, Operand<E>::along_row(row, k));
  }
  return finite;
}

// B = the block itself: steps = rows (of Pairs: pairs of rows), columns = cols. `row`: kNumbers rows of padded(cols) numbers.
template <class E, class Storage>
void pack_panels(const Block<Storage>& from, int64_t rows, int64_t cols, NumberOf<E>* row, Panels<E>& to) {
  constexpr int kStep = kLanes<SumOf<E>>;
  to.finite = true;
  const int64_t width = padded<SumOf<E>>(cols);
  for (int64_t k = 0; k < steps_of<E>(rows); ++k) {
    for (int part = 0; part < kNumbers<E>; ++part) {
      const int64_t r = k * kNumbers<E> + part;
      if (r < rows)
        to.finite &= load_row(from.row(r), from.col_stride, cols, row + part * width);
      else
        clear_row(row + part * width, width);
    }
    for (int64_t d = 0; d < cols; d += kStep)
      store(to.data + d / kPanel<E> * to.stride + k * kPanel<E> + d % kPanel<E>,
            Operand<E>::across_rows(row + d, width));
  }
}

// B = the block's transpose: steps = cols, columns = rows, padded with zero columns to a whole vector. `square_rows`: kLanes rows
// of padded(cols) numbers.
template <class E, class Storage>
void pack_panels_transposed(const Block<Storage>& from, int64_t rows, int64_t cols, NumberOf<E>* square_rows,
                            Panels<E>& to) {
  constexpr int kSize = kLanes<SumOf<E>>;
  const int64_t width = padded<SumOf<E>>(cols), steps = steps_of<E>(cols);
  to.finite = true;
  for (int64_t i = 0; i < rows; i += kSize) {
    const int64_t here = smaller<int64_t>(rows - i, kSize);
    for (int64_t r = 0; r < here; ++r)
      to.finite &= load_row(from.row(i + r), from.col_stride, cols, square_rows + r * width);
    clear_row(square_rows + here * width, (kSize - here) * width);
    E* column = to.data + i / kPanel<E> * to.stride + i % kPanel<E>;
    for (int64_t k = 0; k < steps; k += kSize) {
      Vec<E> square[kSize];
#pragma GCC unroll 16
      for (int r = 0; r < kSize; ++r) square[r] = Operand<E>::along_row(square_rows + r * width, k);
      transpose<SumOf<E>>(square);
      const int64_t now = smaller<int64_t>(steps - k, kSize);
      for (int64_t s = 0; s < now; ++s) store(column + (k + s) * kPanel<E>, square[s]);
    }
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
