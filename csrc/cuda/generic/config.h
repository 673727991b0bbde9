// How the generic kernels divide a problem: tiles, panels, threads and shared memory.
//
// A tile is kRows query rows by kKeys keys, usually kSide each. A block holds kPanel columns of query, key, value and
// grad_output in shared memory at a time (a panel), so any head_dim and value_dim will do. A block computes one panel
// of its result: with several panels, scores are computed again for each.
#pragma once

#include "core/dispatch.h"
#include "core/mask.h"
#include "cuda/tile_sizes.h"

namespace scaledot {

// kPacked: for packed sequences (packed.cuh). These are separate kernels, so that the others pay nothing for it.
// kRelativeBias: the kernel can add relative_bias. With wide panels and packed sequences it would spill registers.
template <class Storage_, int kPanel_, bool kPacked_ = false, bool kRelativeBias_ = true>
struct GenericConfig {
  using Storage = Storage_;
  using T = typename Compute<Storage>::type;
  using Merged = GenericConfig;  // of the kernel that merges split keys
  static constexpr bool kTensorCores = sizeof(Storage) == 2;
  static constexpr int kPanel = kPanel_;
  static constexpr bool kPacked = kPacked_;
  static constexpr bool kQuantised = false;
  static constexpr bool kRelativeBias = kRelativeBias_;
  static constexpr bool kDecode = false;
  static constexpr int kBlocks = 1;            // of the forward that share a multiprocessor, at least
  static constexpr bool kWholePanels = false;  // products read all columns of a panel
  static constexpr int kSide = generic_tile_side(int(sizeof(Storage)), kPanel);
  static constexpr int kRows = kSide, kKeys = kSide;
  static constexpr int kRowWarps = kSide / kMmaRows;
  // 16 bytes of padding a row put eight neighbouring rows, which ldmatrix reads together, into different banks.
  static constexpr int kPad = 16 / int(sizeof(Storage));
  static constexpr int kPitch = kPanel + kPad;      // elements from one row of a panel to the next
  static constexpr int kScorePitch = kSide + kPad;  // and of a tile of scores
};

// For quantised keys and values, which only packed sequences have.
template <class Storage, int kPanel, bool kRelativeBias>
struct QuantisedConfig : GenericConfig<Storage, kPanel, true, kRelativeBias> {
  using Merged = QuantisedConfig;
  static constexpr bool kQuantised = true;
};

// For decode, the forward of few rows: a block is a single warp, and each block has its own part of the keys.
template <class Base>
struct Decode : Base {
  static constexpr bool kDecode = true;
  static constexpr int kBlocks =
      decode_blocks(Base::kQuantised ? 1 : int(sizeof(typename Base::Storage)), Base::kPanel);
  static constexpr bool kWholePanels = Base::kQuantised;
  static constexpr int kSide = 0;  // a tile is not square
  static constexpr int kRows = kMmaRows, kKeys = kDecodeKeys, kRowWarps = 1;
  static constexpr int kScorePitch = kKeys + Base::kPad;
};

// For the kernels that only compute scores.
template <class Storage, bool kPacked = false>
using ScoresConfig = GenericConfig<Storage, generic_scores_panel(int(sizeof(Storage))), kPacked>;

template <class C, int kColumnWarps>
constexpr int kThreads = kColumnWarps * 32 * C::kRowWarps;

template <class C>
struct alignas(16) GenericForwardShared {
  typename C::Storage query[C::kRows * C::kPitch];
  typename C::Storage key[C::kKeys * C::kPitch];
  typename C::Storage value[C::kKeys * C::kPitch];
  typename C::Storage weights[C::kRows * C::kScorePitch];
};

template <class C>
struct alignas(16) GenericScoresShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
};

template <class C>
struct alignas(16) GenericBackwardShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
  typename C::Storage value[C::kSide * C::kPitch];
  typename C::Storage grad_output[C::kSide * C::kPitch];
  typename C::Storage scores[C::kSide * C::kScorePitch];  // Pd or dX
};

template <class C>
struct alignas(16) GenericMaskShared {
  typename C::Storage query[C::kSide * C::kPitch];
  typename C::Storage key[C::kSide * C::kPitch];
  typename C::Storage value[C::kSide * C::kPitch];
  typename C::Storage grad_output[C::kSide * C::kPitch];
  typename C::T sums[C::kSide * C::kSide];
};

template <class C>
struct alignas(16) GenericRelativeShared : GenericMaskShared<C> {
  typename C::T diagonals[2 * C::kSide];
};

// ---------------------------------------------------------------------------------------------------- tiles
// How the query rows of one KV group are divided into tiles. With few rows, neighbouring query heads,
// which share their keys, are stacked in one tile.
struct StackedTiling {
  int64_t rows;        // of a head in a tile
  int64_t heads;       // in a tile
  int64_t row_tiles;   // of a head
  int64_t head_tiles;  // of a KV group
};

SCALEDOT_FN StackedTiling query_tiling(const Problem& p, int side, bool stack_heads) {
  const int64_t group = p.heads / p.kv_heads, rows = max<int64_t>(min<int64_t>(p.query_length, side), 1);
  const int64_t heads = stack_heads ? min<int64_t>(group, side / rows) : 1;
  return {rows, heads, max<int64_t>(ceil_div(p.query_length, rows), 1), ceil_div(group, heads)};
}
SCALEDOT_FN int64_t tiles_per_kv_group(const StackedTiling& t) { return t.row_tiles * t.head_tiles; }

// Whether the rows of a KV group are few enough for Decode.
SCALEDOT_FN bool is_decode(const Problem& p) { return p.heads / p.kv_heads * p.query_length <= kMaxDecodeRows; }

// A query tile: the same rows of `heads` neighbouring query heads, one head after the other.
struct StackedTile {
  int batch, kv_head, first_head, heads;
  Range rows;
};

// The work of a forward's block.
template <class T>
struct ForwardTile {
  StackedTile tile;
  Range key_tiles;
  Range all_attend;  // the keys that all of the rows attend to by position
  T scale;           // of the scores
};

SCALEDOT_FN int64_t count(Range r) { return r.end - r.begin; }
SCALEDOT_FN Range heads_of(const StackedTile& t) { return {t.first_head, t.first_head + t.heads}; }
SCALEDOT_FN int tile_rows(const StackedTile& t) { return int(t.heads * count(t.rows)); }

// Tile `index` of KV group `kv_group` = batch * kv_heads + kv_head. Later rows come first, because
// under a causal mask they attend to the most keys.
SCALEDOT_FN StackedTile query_tile(const Problem& p, const StackedTiling& t, int64_t kv_group, int64_t index) {
  const int64_t kv_head = kv_group % p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t row = (t.row_tiles - 1 - index / t.head_tiles) * t.rows, head = index % t.head_tiles * t.heads;
  return {int(kv_group / p.kv_heads),
          int(kv_head),
          int(kv_head * group + head),
          int(min(t.heads, group - head)),
          {row, min(row + t.rows, p.query_length)}};
}

SCALEDOT_FN Range key_tile(const Problem& p, int64_t tile, int side) {
  return {tile * side, min((tile + 1) * side, p.key_length)};
}

// The numbers of the tiles that contain these keys.
SCALEDOT_FN Range key_tiles_of(Range keys, int side) {
  return keys.begin < keys.end ? Range{keys.begin / side, ceil_div(keys.end, side)} : Range{0, 0};
}

// The kind of a tile by positions and blocks. Packed sequences have no block mask.
template <class C>
SCALEDOT_FN TileKind kind_of_tile(const Problem& p, const StackedTile& tile, Range keys) {
  const TileKind kind = tile_kind(p, tile.rows, keys);
  if (C::kPacked || !has_blocks(p) || kind == TileKind::skip) return kind;
  const TileKind blocks = block_tile_kind(p, tile.batch, heads_of(tile), tile.rows, keys);
  return blocks == TileKind::full ? kind : blocks;
}

// Whether the block mask skips a tile that positions do not skip.
template <class C>
SCALEDOT_FN bool blocks_skip(const Problem& p, const StackedTile& tile, Range keys) {
  return !C::kPacked && has_blocks(p) && kind_of_tile<C>(p, tile, keys) == TileKind::skip;
}

// The first key tile from number t on that the block mask does not skip; `end` if there is none below it.
template <class C>
SCALEDOT_FN int64_t next_key_tile(const Problem& p, const StackedTile& tile, int64_t t, int64_t end) {
  while (t < end && blocks_skip<C>(p, tile, key_tile(p, t, C::kKeys))) ++t;
  return t;
}

// Whether a panel holds all columns. Packed sequences with relative_bias take any: see kRelativeBias.
SCALEDOT_FN bool panel_fits(const Problem& p, int panel) {
  return max(p.head_dim, p.value_dim) <= panel || (is_packed(p) && p.relative_bias.data);
}

SCALEDOT_FN int panels_of(int64_t cols, int panel) { return int(ceil_div(cols, panel)); }
// The columns of a panel that products read: rounded up to whole k-steps of mma.m16n8k16.
SCALEDOT_FN int panel_width(int64_t cols, int64_t index, int panel) {
  return int(min<int64_t>(round_up(cols - index * panel, 16), panel));
}

// The gradient of attn_mask is dS. If the mask is broadcast it is a sum of dS, which a separate pass computes.
SCALEDOT_FN bool sums_mask(const Problem& p) { return p.grad_mask.data && grad_mask_is_broadcast(p); }

}  // namespace scaledot
