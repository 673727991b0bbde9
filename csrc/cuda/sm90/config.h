// Code that the forward and the backward for sm_90 (Hopper) share: padded head dimensions, tiles in shared memory, and
// rings of pipeline stages. The sizes come from tile_sizes.h.
#pragma once

#include "core/dispatch.h"
#include "core/mask.h"
#include "cuda/tile_sizes.h"

namespace scaledot {

// A matrix in shared memory, as panels of 64 columns. Each panel is a box of the copy engine, swizzled by 128 bytes.
template <int kRows, int kCols>
struct alignas(1024) SwizzledTile {
  static constexpr int kPanelBytes = kRows * kPanelCols * 2;
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kBytes = kRows * kCols * 2;
  uint16_t data[kRows * kCols];
};

// Calls body(dim, value_dim): the numbers of columns that head_dim and value_dim are padded to.
template <int kValue>
struct Dim {
  static constexpr int value = kValue;
};
template <class Body>
auto with_padded_dims(const Problem& p, const Body& body) {
  const int64_t dim = max(p.head_dim, p.value_dim);
  if (dim <= 64) return body(Dim<64>{}, Dim<64>{});
  if (dim <= 128) return body(Dim<128>{}, Dim<128>{});
  if (dim <= 192 && p.value_dim <= 128) return body(Dim<192>{}, Dim<128>{});
  return body(Dim<kSm90MaxDim>{}, Dim<kSm90MaxDim>{});
}

// setmaxnreg: the registers that the warpgroups ask for must not exceed those that they started with.
constexpr bool fits_registers(int threads, int consumers, int producer_registers, int consumer_registers) {
  return producer_registers + consumers * consumer_registers <= 65536 / threads / 8 * 8 * (consumers + 1);
}

// An upper bound on the tiles of `tile_rows` rows of packed sequences, which have `rows` rows in total and at most
// `longest` each.
SCALEDOT_FN int64_t most_packed_tiles(const Problem& p, int64_t rows, int64_t longest, int tile_rows) {
  return min(p.batch * ceil_div(longest, tile_rows), ceil_div(rows, tile_rows) + p.batch);
}

// Where the rows of a packed sequence begin among those of all sequences; otherwise 0.
struct Sm90FirstRows {
  int query, key;
};

// A position in a ring of kCount pipeline stages: `used` stages were used before. Every round flips the parity of the
// mbarriers' phase.
template <int kCount>
struct Ring {
  static_assert((kCount & (kCount - 1)) == 0);
  uint32_t used;

  SCALEDOT_HOST_DEVICE int stage() const { return int(used % kCount); }
  SCALEDOT_HOST_DEVICE int phase() const { return int(used / kCount % 2); }
};

}  // namespace scaledot
