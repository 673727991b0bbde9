// The one matrix product: 16 rows of C += A B by one warp, operands in shared memory, sums in registers.
//
//   ALayout::rows        a[i, k] is at a[i * pitch + k]
//   ALayout::transposed  a[i, k] is at a[k * pitch + i]
//   BLayout::by_column   b[k, j] is at b[j * pitch + k], as K in Q K^T
//   BLayout::by_row      b[k, j] is at b[k * pitch + j], as V in P V
//
// For every storage type a lane holds the accumulators of mma.m16n8k16: with g = lane / 4 and t = lane % 4,
//   c[n][0], c[n][1], c[n][2], c[n][3] = C[g, 8n + 2t], C[g, 8n + 2t + 1], C[g + 8, 8n + 2t], C[g + 8, 8n + 2t + 1]
#pragma once

#include "cuda/generic/panel.cuh"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"

namespace scaledot {
namespace {

enum class ALayout { rows, transposed };
enum class BLayout { by_column, by_row };

template <class Storage>
struct SharedMatrix {
  const Storage* data;
  int pitch;
};

// The address that a lane passes to ldmatrix_x4, so that the loaded registers are in mma_m16n8k16's order: the first of
// eight neighbouring elements, for the first 16 elements of the depth and the first 16 rows of a or columns of b.
struct MatrixRow {
  int row, col;
};
SCALEDOT_FN MatrixRow a_matrix_row(ALayout layout, int lane) {
  const int low = lane % 8, bit3 = lane / 8 % 2, bit4 = lane / 16;
  return layout == ALayout::rows ? MatrixRow{bit3 * 8 + low, bit4 * 8} : MatrixRow{bit4 * 8 + low, bit3 * 8};
}
SCALEDOT_FN MatrixRow b_matrix_row(BLayout layout, int lane) {
  const int low = lane % 8, bit3 = lane / 8 % 2, bit4 = lane / 16;
  return layout == BLayout::by_column ? MatrixRow{bit4 * 8 + low, bit3 * 8} : MatrixRow{bit3 * 8 + low, bit4 * 8};
}

template <int kTiles, class T>
SCALEDOT_DEVICE void clear(T (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = T(0);
}

// For 16-bit types, on the tensor cores. kUnroll: with many columns one step has enough independent products for the
// tensor cores to overlap, and the operands of several steps would take too many registers.
template <ALayout kA, BLayout kB, int kUnroll, class Storage, int kTiles>
SCALEDOT_DEVICE void multiply_mma(float (&c)[kTiles][4], SharedMatrix<Storage> a, SharedMatrix<Storage> b, int depth,
                                  int tiles) {
  static_assert(kTiles % 2 == 0);
  const MatrixRow of_a = a_matrix_row(kA, lane_index()), of_b = b_matrix_row(kB, lane_index());
  const Storage* a_row = a.data + of_a.row * a.pitch + of_a.col;
  const Storage* b_row = b.data + of_b.row * b.pitch + of_b.col;
#pragma unroll kUnroll
  for (int k = 0; k < depth; k += 16) {
    uint32_t x[4];
    if constexpr (kA == ALayout::rows)
      ldmatrix_x4(x, a_row + k);
    else
      ldmatrix_x4_trans(x, a_row + k * a.pitch);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      if (n >= tiles) break;
      uint32_t y[4];
      if constexpr (kB == BLayout::by_column)
        ldmatrix_x4(y, b_row + n * 8 * b.pitch + k);
      else
        ldmatrix_x4_trans(y, b_row + k * b.pitch + n * 8);
      mma_m16n8k16(c[n], x, y[0], y[1], Type<Storage>{});
      mma_m16n8k16(c[n + 1], x, y[2], y[3], Type<Storage>{});
    }
  }
}

// Two neighbouring tiles of sums, from tile k on, as operand a of mma.m16n8k16.
template <class Storage, int kTiles>
SCALEDOT_DEVICE void operand_of(const float (&c)[kTiles][4], int k, uint32_t (&a)[4], Type<Storage> type) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = narrow_pair(c[k + r / 2][r % 2 * 2], c[k + r / 2][r % 2 * 2 + 1], type);
}

// C += A B for A in the registers of a warp, as a product left it in c. All of B's rows are there.
template <class Storage, int kDepthTiles, int kTiles>
SCALEDOT_DEVICE void multiply_registers(float (&c)[kTiles][4], const float (&a)[kDepthTiles][4],
                                        SharedMatrix<Storage> b, int tiles) {
  static_assert(kDepthTiles % 2 == 0 && kTiles % 2 == 0);
  const MatrixRow of_b = b_matrix_row(BLayout::by_row, lane_index());
  const Storage* b_row = b.data + of_b.row * b.pitch + of_b.col;
#pragma unroll
  for (int k = 0; k < kDepthTiles; k += 2) {
    constexpr Type<Storage> type = {};
    uint32_t x[4];
    operand_of(a, k, x, type);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      if (n >= tiles) break;
      uint32_t y[4];
      ldmatrix_x4_trans(y, b_row + k * 8 * b.pitch + n * 8);
      mma_m16n8k16(c[n], x, y[0], y[1], type);
      mma_m16n8k16(c[n + 1], x, y[2], y[3], type);
    }
  }
}

// For float32 and float64, by fused multiply-add, 16 bytes of depth at a time.
template <ALayout kA, BLayout kB, class T, int kTiles>
SCALEDOT_DEVICE void multiply_fma(T (&c)[kTiles][4], SharedMatrix<T> a, SharedMatrix<T> b, int depth, int tiles) {
  constexpr int kStep = 16 / int(sizeof(T));
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll 1
  for (int k = 0; k < depth; k += kStep) {
    AlignedVector<T, kStep> x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kA == ALayout::rows) {
        x[i] = shared_load(reinterpret_cast<const AlignedVector<T, kStep>*>(a.data + (g + 8 * i) * a.pitch + k));
      } else {
#pragma unroll
        for (int s = 0; s < kStep; ++s) x[i].x[s] = shared_load(a.data + (k + s) * a.pitch + g + 8 * i);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n >= tiles) break;
      T y[kStep][2];
      if constexpr (kB == BLayout::by_column) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const auto column =
              shared_load(reinterpret_cast<const AlignedVector<T, kStep>*>(b.data + (8 * n + 2 * t + j) * b.pitch + k));
#pragma unroll
          for (int s = 0; s < kStep; ++s) y[s][j] = column.x[s];
        }
      } else {
#pragma unroll
        for (int s = 0; s < kStep; ++s) {
          const auto pair =
              shared_load(reinterpret_cast<const AlignedVector<T, 2>*>(b.data + (k + s) * b.pitch + 8 * n + 2 * t));
          y[s][0] = pair.x[0], y[s][1] = pair.x[1];
        }
      }
#pragma unroll
      for (int s = 0; s < kStep; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] += x[e / 2].x[s] * y[s][e % 2];
    }
  }
}

// A weight or score gradient of -0 belongs to a masked key and must not contribute to a sum, not even if it meets NaN.
// Unmasked ones are never -0.
template <class Storage>
SCALEDOT_DEVICE bool is_skip(Storage x) {
  if constexpr (sizeof(Storage) == 2)
    return x.bits == 0x8000u;
  else if constexpr (sizeof(Storage) == 4)
    return bits_of_float(x) == 0x80000000u;
  else
    return __builtin_bit_cast(uint64_t, x) == uint64_t(1) << 63;
}

// Computes the product element by element, without masked terms: for the rare tile in which masked weights meet NaN or
// inf.
template <ALayout kA, class T, class Storage, int kTiles>
SCALEDOT_DEVICE void multiply_unmasked(T (&c)[kTiles][4], SharedMatrix<Storage> a, SharedMatrix<Storage> b, int depth,
                                       int tiles) {
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll 1
  for (int k = 0; k < depth; ++k) {
    Storage x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      x[i] = shared_load(kA == ALayout::rows ? a.data + (g + 8 * i) * a.pitch + k : a.data + k * a.pitch + g + 8 * i);
    const bool skip[2] = {is_skip(x[0]), is_skip(x[1])};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n >= tiles) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const T y = T(widen(shared_load(b.data + k * b.pitch + 8 * n + 2 * t + j)));
        if (!skip[0]) c[n][j] += T(widen(x[0])) * y;
        if (!skip[1]) c[n][2 + j] += T(widen(x[1])) * y;
      }
    }
  }
}

// C += A B over `depth` (a multiple of 16) of A's columns, for the first `tiles` (even) groups of 8 columns of B.
template <ALayout kA, BLayout kB, int kUnroll = 1, class T, class Storage, int kTiles>
SCALEDOT_DEVICE void multiply(T (&c)[kTiles][4], SharedMatrix<Storage> a, SharedMatrix<Storage> b, int depth,
                              int tiles) {
  if constexpr (sizeof(Storage) == 2)
    multiply_mma<kA, kB, kUnroll>(c, a, b, depth, tiles);
  else
    multiply_fma<kA, kB>(c, a, b, depth, tiles);
}

// Multiplies where b may hold non-finite elements (`finite` false) and a may hold masked ones.
template <ALayout kA, class T, class Storage, int kTiles>
SCALEDOT_DEVICE void multiply_weights(bool finite, T (&c)[kTiles][4], SharedMatrix<Storage> a, SharedMatrix<Storage> b,
                                      int depth, int tiles) {
  if (finite)
    multiply<kA, BLayout::by_row>(c, a, b, depth, tiles);
  else
    multiply_unmasked<kA>(c, a, b, depth, tiles);
}

}  // namespace
}  // namespace scaledot
