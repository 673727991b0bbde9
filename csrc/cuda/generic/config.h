// How the generic kernels cut a problem up: tile sizes, threads, and what lies in shared memory.
//
// A tile is kSide query rows by kSide keys. Of query, key, value and grad_output a block keeps kPanel columns of those rows in
// shared memory, a panel; more columns than that are taken panel by panel, so any head_dim and value_dim will do. A block makes
// one panel of its result: where there are several, scores are computed again for each.
#pragma once

#include "core/dispatch.h"
#include "core/mask.h"

namespace scaledot {

template <class Storage_, int kPanel_, bool kPacked_ = false>
struct Config {
  using Storage = Storage_;
  using T = typename Compute<Storage>::type;
  static constexpr bool kTensorCores = sizeof(Storage) == 2;
  static constexpr int kPanel = kPanel_;
  static constexpr bool kPacked =
      kPacked_;  // the problem is packed (packed.cuh): kernels of their own, others pay nothing for it
  static constexpr int kSide = int(sizeof(Storage)) * kPanel <= 256 ? 64 : 32;
  static constexpr int kRowWarps = kSide / 16;  // a warp computes 16 rows of a product, the m of mma.m16n8k16
  // Rows are 16 bytes longer than they need to be: eight rows of ldmatrix then lie in different banks.
  static constexpr int kPad = 16 / int(sizeof(Storage));
  static constexpr int kPitch = kPanel + kPad;      // of panels
  static constexpr int kScorePitch = kSide + kPad;  // of tiles of scores
};

// Warps that share a row of a tile: the forward has one, so that a row's maximum stays in a warp; the backward needs no such
// thing, and has two, so that its many sums fit into registers.
constexpr int kForwardColumnWarps = 1, kBackwardColumnWarps = 2;

template <class C, int kColumnWarps>
constexpr int kThreads = C::kRowWarps* kColumnWarps * 32;

template <class C>
struct alignas(16) ForwardShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
  typename C::Storage value[C::kSide * C::kPitch];
  typename C::Storage weights[C::kSide * C::kScorePitch];
};

template <class C>
struct alignas(16) ScoresShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
};

template <class C>
struct alignas(16) BackwardShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
  typename C::Storage value[C::kSide * C::kPitch];
  typename C::Storage grad_output[C::kSide * C::kPitch];
  typename C::Storage scores[C::kSide * C::kScorePitch];  // Pd or dX
};

template <class C>
struct alignas(16) MaskShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
  typename C::Storage value[C::kSide * C::kPitch];
  typename C::Storage grad_output[C::kSide * C::kPitch];
  typename C::T sums[C::kSide * C::kSide];
};

constexpr int64_t kWantedBlocks = 256;   // fewer than this do not fill a GPU: then keys are split, if they are many
constexpr int64_t kLeastSplitTiles = 8;  // tiles of keys that a split has at least

// How the rows of one (batch, kv_head) plane are cut into tiles. Few rows of neighbouring query heads, which share their keys, are
// stacked in one tile.
struct Tiling {
  int64_t rows;        // of a head in a tile
  int64_t heads;       // in a tile
  int64_t row_tiles;   // of a head
  int64_t head_tiles;  // of a plane
};

SCALEDOT_FN Tiling tile_rows_of(const Problem& p, int side, bool stack_heads) {
  const int64_t group = p.heads / p.kv_heads, rows = max<int64_t>(min<int64_t>(p.query_length, side), 1);
  const int64_t heads = stack_heads ? min<int64_t>(group, side / rows) : 1;
  return {rows, heads, max<int64_t>(ceil_div(p.query_length, rows), 1), ceil_div(group, heads)};
}
SCALEDOT_FN int64_t tiles_per_plane(const Tiling& t) { return t.row_tiles * t.head_tiles; }

// The same rows of `heads` neighbouring query heads, one head's after the other's.
struct RowTile {
  int batch, kv_head, first_head, heads;
  Range rows;
};

SCALEDOT_FN int64_t count(Range r) { return r.end - r.begin; }
SCALEDOT_FN int tile_rows(const RowTile& t) { return int(t.heads * count(t.rows)); }

// Tile `index` of a plane; later rows first, because under a causal mask they have the most keys.
SCALEDOT_FN RowTile row_tile(const Problem& p, const Tiling& t, int64_t plane, int64_t index) {
  const int64_t kv_head = plane % p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t row = (t.row_tiles - 1 - index / t.head_tiles) * t.rows, head = index % t.head_tiles * t.heads;
  return {int(plane / p.kv_heads),
          int(kv_head),
          int(kv_head * group + head),
          int(min(t.heads, group - head)),
          {row, min(row + t.rows, p.query_length)}};
}

SCALEDOT_FN Range key_tile(const Problem& p, int64_t tile, int side) {
  return {tile * side, min((tile + 1) * side, p.key_length)};
}

// Numbers of the tiles that hold these keys.
SCALEDOT_FN Range key_tiles_of(Range keys, int side) {
  return keys.begin < keys.end ? Range{keys.begin / side, ceil_div(keys.end, side)} : Range{0, 0};
}

// Whether every element of grad_mask belongs to one (batch, head, row, key) only.
SCALEDOT_FN bool owns_mask(const Problem& p) {
  const TensorView& m = p.grad_mask;
  bool owns =
      (m.head_stride || p.heads == 1) && (m.row_stride || p.query_length == 1) && (m.col_stride || p.key_length == 1);
  for (int d = 0; d < p.batch_dims; ++d) owns &= m.batch_stride[d] || p.batch_sizes[d] == 1;
  return owns;
}

// The gradient of attn_mask is dS; of one that is broadcast it is sums of them, which are made in a pass of their own.
SCALEDOT_FN bool sums_mask(const Problem& p) { return p.grad_mask.data && !owns_mask(p); }

SCALEDOT_FN int panels_of(int64_t cols, int panel) { return int(ceil_div(cols, panel)); }
// Columns of a panel, as many as products take: whole k-steps of mma.m16n8k16.
SCALEDOT_FN int panel_width(int64_t cols, int64_t index, int panel) {
  return int(min<int64_t>(round_up(cols - index * panel, 16), panel));
}

}  // namespace scaledot
