// Packing: from tensors in memory (any strides, any storage type) to the blocks that gemm.h multiplies, and back.
// Packed blocks hold operands, are contiguous, and are padded with zeros to whole vectors, so that no kernel has a
// tail.
#pragma once

#include "core/dispatch.h"
#include "core/mask.h"
#include "core/varlen.h"
#include "cpu/simd/gemm.h"
#include "cpu/simd/transpose.h"

namespace scaledot {
namespace {

// Calls body(Type<Storage>{}) with the storage type of the problem's tensors. Everything between loading and storing a
// tile is compiled once for all storage types that have the same operands Operand.
template <class Operand, class Body>
SCALEDOT_INLINE void with_storage_of(DType dtype, const Body& body) {
  if constexpr (kHasBf16Pairs<Operand> || sizeof(Operand) == sizeof(double))
    body(Type<typename OperandTraits<Operand>::Element>{});
  else
    switch (dtype) {
      case DType::bfloat16: body(Type<BFloat16>{}); break;
      case DType::float16: body(Type<Float16>{}); break;
      default: body(Type<float>{}); break;
    }
}

// Rows of a tensor, from one head or stacked from several: row r is row r % rows_per_head of head r / rows_per_head.
template <class Storage>
struct RowBlock {
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
inline RowBlock<Storage> block(const Problem& p, const TensorView& view, int64_t batch, int64_t head, int64_t row,
                               int64_t rows_per_head = kUnbounded) {
  const Storage* start = element_ptr<const Storage>(p, view, batch, head);
  return {start ? start + row * view.row_stride : nullptr, view.row_stride, view.col_stride, rows_per_head,
          view.head_stride};
}

// Pointers to the rows of a tile's keys or values. Paged rows: one table lookup per row, read in place.
template <class Storage, int64_t kMaxRows = kTileKeys>
struct KeyRowPointers {
  int64_t col_stride;
  const Storage* rows[kMaxRows];

  const Storage* row(int64_t r) const { return rows[r]; }
};

// The rows [keys.begin, keys.end), at most kMaxRows of them. `view` is p.key or p.value.
template <class Storage, int64_t kMaxRows = kTileKeys>
inline KeyRowPointers<Storage, kMaxRows> key_rows(const Problem& p, const TensorView& view, int64_t batch, int64_t head,
                                                  Range keys) {
  const Storage* start = element_ptr<const Storage>(p, view, batch, head);
  KeyRowPointers<Storage, kMaxRows> result;
  result.col_stride = view.col_stride;
  if (is_paged(p)) {
    const int64_t page_stride = &view == &p.key ? p.pages.key_stride : p.pages.value_stride;
    for (int64_t k = keys.begin; k < keys.end; ++k)
      result.rows[k - keys.begin] = start + paged_row(p.pages, page_stride, view.row_stride, k);
  } else {
    for (int64_t k = keys.begin; k < keys.end; ++k) result.rows[k - keys.begin] = start + k * view.row_stride;
  }
  return result;
}

template <class T>
inline int64_t padded(int64_t cols) {
  return round_up(cols, 2 * kLanes<T>);
}

// A quantised row as bfloat16, which has all these numbers.
template <class Storage>
SCALEDOT_NOINLINE void widen_row(const Storage* from, int64_t col_stride, int64_t cols, BFloat16* to) {
  int64_t d = 0;
  if (col_stride == 1)
    for (; d + kLanes<float> <= cols; d += kLanes<float>) upper_store(to + d, widen_load(from + d));
  for (; d < cols; ++d) narrow(widen(from[d * col_stride]), to[d]);
}

// Prefetches row r of `rows` rows, if it exists. Always inlined: gcc 12 drops calls of a function that only prefetches.
template <class Rows>
SCALEDOT_INLINE void prefetch_row(const Rows& from, int64_t r, int64_t rows, int64_t cols) {
  if (r >= rows || from.col_stride != 1) return;
  const auto* row = from.row(r);
  for (int64_t d = 0; d < cols; d += kCacheLine / int64_t(sizeof(*row))) __builtin_prefetch(row + d);
}

// The rows of a tile's quantised keys or values, widened into `to`: kTileKeys rows of padded<float>(cols) elements.
inline KeyRowPointers<BFloat16> widened_rows(const Problem& p, const TensorView& view, int64_t batch, int64_t head,
                                             Range keys, int64_t cols, BFloat16* to) {
  KeyRowPointers<BFloat16> result;
  result.col_stride = 1;
  with_quantised_storage(view.dtype, [&]<class Storage>(Type<Storage>) {
    const KeyRowPointers<Storage> rows = key_rows<Storage>(p, view, batch, head, keys);
    const int64_t count = keys.end - keys.begin;
    for (int64_t r = 0; r < count; ++r) {
      prefetch_row(rows, r + kPackAhead, count, cols);
      result.rows[r] = to + r * padded<float>(cols);
      widen_row(rows.row(r), rows.col_stride, cols, to + r * padded<float>(cols));
    }
  });
  return result;
}

// Whether all elements passed to add() were finite.
template <class T>
struct Finite {
  using Words = Native<typename Lanes<T>::word>;
  // All x - x, or-ed: 0 for finite x, NaN otherwise. An or has a third of the latency of a sum.
  Words bits = Words{};

  SCALEDOT_INLINE void add(Vec<T> x) { bits |= Words((x - x).v); }
  SCALEDOT_INLINE bool all() const { return sum_of(Vec<T>(Native<T>(bits))) == T(0); }
};
template <>
struct Finite<BFloat16> {
  using Bits = Native<uint16_t>;
  static constexpr uint16_t kInfinity = 0x7f80;
  Bits special = Bits{};  // -1 in lanes that had an exponent of all ones

  SCALEDOT_INLINE void add(Bits x) { special |= Bits((x & kInfinity) == (Bits{} + kInfinity)); }
  SCALEDOT_INLINE bool all() const {
    uint16_t any = 0;
    for (int k = 0; k < kVectorBytes / 2; ++k) any |= special[k];
    return any == 0;
  }
};

// One row, widened, into a contiguous array of padded(cols) elements.
template <class T, class Storage>
SCALEDOT_INLINE void load_row(const Storage* from, int64_t col_stride, int64_t cols, T* to, Finite<T>& finite) {
  int64_t d = 0;
  const auto take = [&](Vec<T> x) {
    store(to + d, x);
    finite.add(x);
    d += kLanes<T>;
  };
  if (col_stride == 1) {
    while (d + kLanes<T> <= cols) take(widen_load(from + d));
    if (d < cols) take(widen_first<T>(from + d, cols - d));
    if (d < padded<T>(cols)) store(to + d, Vec<T>(T(0)));
    return;
  }
  for (; d < cols; ++d) to[d] = widen(from[d * col_stride]);
  for (; d < padded<T>(cols); ++d) to[d] = T(0);
  for (d = 0; d < cols; d += kLanes<T>) finite.add(load(to + d));
}

// Loads a row of operands that are bfloat16.
inline void load_row(const BFloat16* from, int64_t col_stride, int64_t cols, BFloat16* to, Finite<BFloat16>& finite) {
  using Bits = Finite<BFloat16>::Bits;
  constexpr int kCount = kVectorBytes / int(sizeof(BFloat16));  // padded<float>(cols) is a multiple of this
  int64_t d = 0;
  const auto loose = [](BFloat16* at) { return reinterpret_cast<Loose<uint16_t, kCount>*>(at); };
  const auto take = [&](Bits bits) {
    *loose(to + d) = bits;
    finite.add(bits);
    d += kCount;
  };
  if (col_stride == 1) {
    while (d + kCount <= cols) take(*reinterpret_cast<const Loose<uint16_t, kCount>*>(from + d));
    if (d < cols) take(first_elements<Bits>(from + d, cols - d));
    return;
  }
  for (; d < cols; ++d) to[d] = from[d * col_stride];
  for (; d % kCount != 0; ++d) to[d].bits = 0;
  for (d = 0; d < cols; d += kCount) finite.add(*loose(to + d));
}

template <class T>
inline void clear_row(T* row, int64_t width) {
  for (int64_t d = 0; d < width; ++d) row[d] = {};
}

// to += from. `width`: whole vectors.
template <class T>
inline void add_row(const T* from, int64_t width, T* to) {
  for (int64_t d = 0; d < width; d += kLanes<T>) store(to + d, load(to + d) + load(from + d));
}

// Packs A: rows of operands (Layout::rows).
template <class Operand, class Storage>
void pack_rows(const RowBlock<Storage>& from, int64_t rows, int64_t cols, Operand* to) {
  Finite<ElementOf<Operand>> unused;
  for (int64_t r = 0; r < rows; ++r) {
    const Storage* row = from.row(r);
    Operand* out = to + r * kRowStride<Operand>;
    for (int64_t d = 0; d < cols; d += kTileKeys, out += kTileRows * kRowStride<Operand>)
      load_row(row + d * from.col_stride, from.col_stride, min<int64_t>(cols - d, kTileKeys),
               reinterpret_cast<ElementOf<Operand>*>(out), unused);
  }
}

// Packs B = the block: depth = rows (for Bf16Pairs, pairs of rows), columns = cols.
// `row` is scratch for kElements rows of padded(cols) elements.
template <class Operand, class Rows>
void pack_panels(const Rows& from, int64_t rows, int64_t cols, ElementOf<Operand>* row, Panels<Operand>& to) {
  Finite<ElementOf<Operand>> finite;
  const int64_t width = padded<SumOf<Operand>>(cols);
  for (int64_t k = 0; k < depth_of<Operand>(rows); ++k) {
    Operand* out = to.data + k * kPanel<Operand>;
    for (int part = 0; part < kElements<Operand>; ++part)
      prefetch_row(from, k * kElements<Operand> + part + kPackAhead, rows, cols);
    if constexpr (kElements<Operand> == 1) {  // a row of a panel is part of a row of the block
      const auto* in = from.row(k);
      int64_t d = 0;
      if (from.col_stride == 1)
        for (; d + kPanel<Operand> <= cols; d += kPanel<Operand>, out += to.stride)
#pragma GCC unroll 2
          for (int v = 0; v < kPanel<Operand>; v += kLanes<Operand>) {
            const Vec<Operand> x = widen_load(in + d + v);
            store(out + v, x);
            finite.add(x);
          }
      for (; d < cols; d += kPanel<Operand>, out += to.stride)
        load_row(in + d * from.col_stride, from.col_stride, min<int64_t>(cols - d, kPanel<Operand>), out, finite);
    } else {
      static_assert(kElements<Operand> == 2);
      using Bits = typename Finite<ElementOf<Operand>>::Bits;
      const int64_t r = 2 * k;
      const ElementOf<Operand>* first = row;
      int64_t second = width;  // from `first`
      if (r + 1 < rows && from.col_stride == 1 && cols == width) {
        first = from.row(r);
        second = from.row(r + 1) - first;
        for (int64_t d = 0; d < cols; d += kVectorBytes / 2)
          finite.add(Bits(*reinterpret_cast<const Loose<uint16_t, kVectorBytes / 2>*>(first + d))),
              finite.add(Bits(*reinterpret_cast<const Loose<uint16_t, kVectorBytes / 2>*>(first + second + d)));
      } else {
        for (int part = 0; part < 2; ++part)
          if (r + part < rows)
            load_row(from.row(r + part), from.col_stride, cols, row + part * width, finite);
          else
            clear_row(row + part * width, width);
      }
      for (int64_t d = 0; d < cols; d += kLanes<SumOf<Operand>>)
        store(out + d / kPanel<Operand> * to.stride + d % kPanel<Operand>,
              OperandTraits<Operand>::across_rows(first + d, second));
    }
  }
  to.finite = finite.all();
}

// kLanes operands from the contiguous elements at `from`.
template <class Operand, class Storage>
SCALEDOT_INLINE Vec<Operand> load_operands(const Storage* from, Finite<ElementOf<Operand>>& finite) {
  if constexpr (kElements<Operand> == 1) {
    const Vec<Operand> x = widen_load(from);
    finite.add(x);
    return x;
  } else {
    const Vec<Operand> x = OperandTraits<Operand>::along_row(from, 0);
    finite.add(__builtin_bit_cast(typename Finite<ElementOf<Operand>>::Bits, x.v));
    return x;
  }
}

// Packs B = the block's transpose: depth = cols, columns = rows, padded with zero columns to a whole vector. Full
// squares of contiguous elements are transposed straight from the tensor. Others go through `square_rows`, scratch for
// kLanes rows of padded(cols) elements.
template <class Operand, class Rows>
void pack_panels_transposed(const Rows& from, int64_t rows, int64_t cols, ElementOf<Operand>* square_rows,
                            Panels<Operand>& to) {
  constexpr int kSize = kLanes<SumOf<Operand>>;
  const int64_t width = padded<SumOf<Operand>>(cols), depth = depth_of<Operand>(cols);
  Finite<ElementOf<Operand>> finite;
  for (int64_t i = 0; i < rows; i += kSize) {
    const int64_t here = min<int64_t>(rows - i, kSize);
    for (int64_t r = 0; r < here; ++r) prefetch_row(from, i + r + kPackAhead, rows, cols);
    Operand* column = to.data + i / kPanel<Operand> * to.stride + i % kPanel<Operand>;
    Vec<Operand> square[kSize];
    int64_t k = 0;
    if (here == kSize && from.col_stride == 1) {
      decltype(from.row(0)) row[kSize];
      for (int r = 0; r < kSize; ++r) row[r] = from.row(i + r);
      for (; (k + kSize) * kElements<Operand> <= cols; k += kSize) {
#pragma GCC unroll 16
        for (int r = 0; r < kSize; ++r) square[r] = load_operands<Operand>(row[r] + k * kElements<Operand>, finite);
        transpose<SumOf<Operand>>(square);
#pragma GCC unroll 16
        for (int s = 0; s < kSize; ++s) store(column + (k + s) * kPanel<Operand>, square[s]);
      }
    }
    if (k == depth) continue;
    const int64_t first = k * kElements<Operand>;
    for (int64_t r = 0; r < here; ++r)
      load_row(from.row(i + r) + first * from.col_stride, from.col_stride, cols - first, square_rows + r * width,
               finite);
    clear_row(square_rows + here * width, (kSize - here) * width);
    for (int64_t rest = 0; k < depth; k += kSize, rest += kSize) {
#pragma GCC unroll 16
      for (int r = 0; r < kSize; ++r) square[r] = OperandTraits<Operand>::along_row(square_rows + r * width, rest);
      transpose<SumOf<Operand>>(square);
      const int64_t now = min<int64_t>(depth - k, kSize);
      for (int64_t s = 0; s < now; ++s) store(column + (k + s) * kPanel<Operand>, square[s]);
    }
  }
  to.finite = finite.all();
}

// One contiguous row of results, times `factor`, narrowed into the tensor. `cols` need not be a multiple of a vector.
// Adding 0 makes every 0 positive: the sign of a sum that is 0 depends on how many zeros were added to it, and with
// that on the tile of the row.
template <class T, class Storage>
SCALEDOT_INLINE void narrow_row(const T* from, T factor, int64_t cols, Storage* to) {
  const Vec<T> f(factor), zero(T(0));
  int64_t d = 0;
  for (; d + kLanes<T> <= cols; d += kLanes<T>) narrow_store(to + d, fma(load(from + d), f, zero));
  for (; d < cols; ++d) narrow(from[d] * factor + T(0), to[d]);
}

// Writes what narrow_row(from, factor, cols, rounded) took off the row, narrowed too. 0 where it is not finite.
template <class T, class Storage>
SCALEDOT_INLINE void narrow_output_low(const T* from, T factor, int64_t cols, const Storage* rounded, Storage* to) {
  const Vec<T> f(factor), zero(T(0));
  int64_t d = 0;
  for (; d + kLanes<T> <= cols; d += kLanes<T>) {
    const Vec<T> difference = fma(load(from + d), f, zero - widen_load(rounded + d));
    narrow_store(to + d, select(difference - difference == zero, difference, zero));
  }
  for (; d < cols; ++d) to[d] = output_low_of(from[d] * factor, rounded[d]);
}

// Whether stream_row can and should write a result of `rows` x `cols` elements in each of `heads` heads: it has to be
// large (kStreamBytes) and aligned.
template <class T>
bool worth_streaming(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols) {
  if (sizeof(T) != sizeof(float) || view.dtype != DType::float32 || view.col_stride != 1) return false;
  if (heads * rows * cols * int64_t(sizeof(float)) < kStreamBytes) return false;
  int64_t strides = view.head_stride | view.row_stride;
  for (int d = 0; d < p.batch_dims; ++d) strides |= view.batch_stride[d];
  return reinterpret_cast<uintptr_t>(view.data) % kVectorBytes == 0 && strides % kLanes<float> == 0;
}

// Does narrow_row with non-temporal stores, to element `start` of a view that is worth_streaming. `start` is a multiple
// of a vector.
template <class T>
SCALEDOT_INLINE void stream_row(const T* from, T factor, int64_t cols, const TensorView& view, int64_t start) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const Vec<T> f(factor);
    float* to = static_cast<float*>(view.data) + start;
    int64_t d = 0;
    for (; d + kLanes<T> <= cols; d += kLanes<T>) stream(to + d, load(from + d) * f);
    for (; d < cols; ++d) to[d] = from[d] * factor;
  }
}

}  // namespace
}  // namespace scaledot
