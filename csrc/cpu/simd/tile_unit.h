// The product of Bf16Pairs on the tile unit of AMX (Intel's Optimization Reference Manual, chapter "Intel AMX").
//
//   The unit has eight tiles of kUnitSide rows of 64 bytes: 16 x 16 sums, or 16 rows of 16 Bf16Pairs. One tdpbf16ps is
//     sums[i][j] += sum_k a[i][k].first * b[k][j].first + a[i][k].second * b[k][j].second      k = 0 ... 15
//   where a is 16 rows of A, as pack_rows() stores them, and b is 16 rows of half a panel.
//   A block of C is 32 x 32 sums in tiles 0 to 3; tiles 4 and 5 hold rows of A, tiles 6 and 7 columns of B. Each load
//   is then used by two instructions.
// All tiles always have their full size, so that the unit is configured once a task. Columns and depth are padded by
// packing. Rows of C that do not fill a tile are computed in a local buffer.
// Sums begin with C and take each step of the depth in order, so a row's result does not depend on its neighbours.
#pragma once

#include "cpu/simd/bf16_pairs.h"
#include "cpu/simd/task_state.h"
#include "cpu/simd/transpose.h"

namespace scaledot {
namespace {

static_assert(kHasTileUnit && kPanel<Bf16Pair> == 2 * kUnitSide && kTileRows % (2 * kUnitSide) == 0);
static_assert(kUnitRows == kUnitSide && kUnitRowBytes == kUnitSide * sizeof(Bf16Pair));

// The state of tasks that use the tile unit.
struct TileUnit : FlushSubnormals {
  void begin(const Problem& p) {
    FlushSubnormals::begin(p);
    begin_tiles();
  }
  void end() const {
    end_tiles();
    FlushSubnormals::end();
  }
};

// ---------------------------------------------------------------------------------------------------- products
// 16 rows of C, or memory in their place.
struct SumRows {
  float* first;
  int64_t stride;
};

// A block of kRowTiles x kColumnTiles tiles of C. Blocks of A for a depth of kBlockDepth are `next_block` apart.
template <int kRowTiles, int kColumnTiles>
SCALEDOT_NOINLINE void multiply_block(int64_t depth, const Bf16Pair* a, int64_t next_block, const Bf16Pair* panel,
                                      const SumRows (&c)[2], bool accumulate) {
  constexpr int64_t kRowBytes = kRowStride<Bf16Pair> * sizeof(Bf16Pair),
                    kPanelBytes = kPanel<Bf16Pair> * sizeof(Bf16Pair);
  constexpr int64_t kNextRows = kUnitSide * kRowStride<Bf16Pair>;
  const int64_t upper_bytes = c[0].stride * int64_t(sizeof(float)), lower_bytes = c[1].stride * int64_t(sizeof(float));
  // gcc's _tile_loadd does not say that it reads memory: stores before it must not move past it.
  __asm__ volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, c[0].first, upper_bytes);
    if constexpr (kColumnTiles == 2) _tile_loadd(1, c[0].first + kUnitSide, upper_bytes);
    if constexpr (kRowTiles == 2) _tile_loadd(2, c[1].first, lower_bytes);
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_loadd(3, c[1].first + kUnitSide, lower_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kColumnTiles == 2) _tile_zero(1);
    if constexpr (kRowTiles == 2) _tile_zero(2);
    if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kUnitSide, panel += kUnitSide * kPanel<Bf16Pair>) {
    const Bf16Pair* rows = a + k / kBlockDepth<Bf16Pair> * next_block + k % kBlockDepth<Bf16Pair>;
    _tile_loadd(4, rows, kRowBytes);
    _tile_loadd(6, panel, kPanelBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumnTiles == 2) {
      _tile_loadd(7, panel + kUnitSide, kPanelBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, rows + kNextRows, kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumnTiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0].first, upper_bytes);
  if constexpr (kColumnTiles == 2) _tile_stored(1, c[0].first + kUnitSide, upper_bytes);
  if constexpr (kRowTiles == 2) _tile_stored(2, c[1].first, lower_bytes);
  if constexpr (kRowTiles == 2 && kColumnTiles == 2) _tile_stored(3, c[1].first + kUnitSide, lower_bytes);
}

inline void multiply_block(int row_tiles, int column_tiles, int64_t depth, const Bf16Pair* a, int64_t next_block,
                           const Bf16Pair* panel, const SumRows (&c)[2], bool accumulate) {
  if (row_tiles == 2)
    column_tiles == 2 ? multiply_block<2, 2>(depth, a, next_block, panel, c, accumulate)
                      : multiply_block<2, 1>(depth, a, next_block, panel, c, accumulate);
  else
    column_tiles == 2 ? multiply_block<1, 2>(depth, a, next_block, panel, c, accumulate)
                      : multiply_block<1, 1>(depth, a, next_block, panel, c, accumulate);
}

// Multiplies through `spare` if rows of C do not fill the last tile, or products are scaled before they are added.
// `rows`: the rows of C, at most two tiles.
SCALEDOT_NOINLINE void multiply_block_via_spare(int64_t rows, int column_tiles, int64_t depth, const Bf16Pair* a,
                                                int64_t next_block, const Bf16Pair* panel, float* c, int64_t c_stride,
                                                float factor, bool accumulate) {
  alignas(kCacheLine) float spare[2 * kUnitSide * kPanel<Bf16Pair>];
  const bool scaled = factor != 1;
  const int64_t from = scaled ? 0 : rows / kUnitSide * kUnitSide, cols = column_tiles * kUnitSide;
  SumRows to[2];
  for (int half = 0; half < 2; ++half) {
    const int64_t first = half * kUnitSide;
    to[half] = first < from ? SumRows{c + first * c_stride, c_stride}
                            : SumRows{spare + first * kPanel<Bf16Pair>, kPanel<Bf16Pair>};
  }
  for (int64_t i = from; i < rows && accumulate && !scaled; ++i)
    for (int64_t j = 0; j < cols; j += kLanes<float>)
      store(spare + i * kPanel<Bf16Pair> + j, load(c + i * c_stride + j));
  multiply_block(int(ceil_div(rows, int64_t(kUnitSide))), column_tiles, depth, a, next_block, panel, to,
                 accumulate && !scaled);
  for (int64_t i = from; i < rows; ++i)
    for (int64_t j = 0; j < cols; j += kLanes<float>) {
      Vec<float> x = load(spare + i * kPanel<Bf16Pair> + j);
      if (scaled) x = x * Vec<float>(factor);
      if (scaled && accumulate) x = load(c + i * c_stride + j) + x;
      store(c + i * c_stride + j, x);
    }
}

// At most 2 * kUnitSide rows of C.
inline void multiply_rows(int64_t rows, int64_t cols, int64_t depth, const Bf16Pair* a, int64_t next_block,
                          const Panels<Bf16Pair>& b, int64_t first_depth, float* c, int64_t c_stride, float factor,
                          bool accumulate) {
  const bool direct = rows % kUnitSide == 0 && factor == 1;
  for (int64_t j = 0; j < cols; j += kPanel<Bf16Pair>) {
    const Bf16Pair* panel = b.data + j / kPanel<Bf16Pair> * b.stride + first_depth * kPanel<Bf16Pair>;
    const int column_tiles = cols - j > kUnitSide ? 2 : 1;
    if (!direct)
      multiply_block_via_spare(rows, column_tiles, depth, a, next_block, panel, c + j, c_stride, factor, accumulate);
    else
      multiply_block(int(rows / kUnitSide), column_tiles, depth, a, next_block, panel,
                     {{c + j, c_stride}, {c + j + kUnitSide * c_stride, c_stride}}, accumulate);
  }
}

// A transposed left factor as rows: `rows` columns of `depth` Bf16Pairs, kColumnStride apart, at most 2 * kUnitSide by
// kBlockDepth.
SCALEDOT_NOINLINE void columns_to_rows(int64_t rows, int64_t depth, const Bf16Pair* columns, Bf16Pair* to) {
  static_assert(kUnitSide == kLanes<float>);
  for (int64_t i = 0; i < rows; i += kUnitSide)
    for (int64_t k = 0; k < depth; k += kUnitSide) {
      Vec<Bf16Pair> square[kUnitSide];
#pragma GCC unroll 16
      for (int s = 0; s < kUnitSide; ++s) square[s] = load(columns + (k + s) * kColumnStride<Bf16Pair> + i);
      transpose<float>(square);
#pragma GCC unroll 16
      for (int s = 0; s < kUnitSide; ++s) store(to + (i + s) * kRowStride<Bf16Pair> + k, square[s]);
    }
}

template <>
struct Products<Bf16Pair> {
  template <Layout kLayout>
  static void multiply(int64_t rows, int64_t cols, int64_t depth, const Bf16Pair* a, const Panels<Bf16Pair>& b,
                       float* c, int64_t c_stride, bool accumulate, float factor) {
    constexpr int64_t kBlockRows = 2 * kUnitSide;
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      const int64_t now = min(rows - i, kBlockRows);
      float* const to = c + i * c_stride;
      if constexpr (kLayout == Layout::rows) {
        multiply_rows(now, cols, depth, a + i * kRowStride<Bf16Pair>, kTileRows * kRowStride<Bf16Pair>, b, 0, to,
                      c_stride, factor, accumulate);
      } else {
        alignas(kCacheLine) Bf16Pair turned[kBlockRows * kRowStride<Bf16Pair>];
        for (int64_t k = 0; k == 0 || k < depth; k += kBlockDepth<Bf16Pair>) {
          const int64_t deep = min<int64_t>(depth - k, kBlockDepth<Bf16Pair>);
          columns_to_rows(now, deep, a + k * kColumnStride<Bf16Pair> + i, turned);
          multiply_rows(now, cols, deep, turned, 0, b, k, to, c_stride, factor, accumulate || k > 0);
        }
      }
    }
  }

  // In the order of tdpbf16ps: a step sums first and second elements separately.
  template <int64_t kNextDepth>
  SCALEDOT_INLINE static void multiply_live(int64_t depth, const Bf16Pair* row, const Bf16Pair* column, float& to,
                                            float factor, bool accumulate) {
    using Traits = OperandTraits<Bf16Pair>;
    float sum = accumulate && factor == 1 ? to : 0;
    for (int64_t k = 0; k < depth; k += kUnitSide) {
      float parts[2] = {0, 0};
      for (int64_t s = k; s < k + kUnitSide; ++s)
        for (int part = 0; part < 2; ++part) {
          const float term = Traits::element(row[s * kNextDepth], part);
          if (!is_skip(term))
            parts[part] = __builtin_fmaf(term, Traits::element(column[s * kPanel<Bf16Pair>], part), parts[part]);
        }
      sum += parts[0] + parts[1];
    }
    to = factor == 1 ? sum : accumulate ? to + factor * sum : factor * sum;
  }
};

}  // namespace
}  // namespace scaledot
