// How the kernels for Hopper cut a problem up: tiles, warpgroups, registers, shared memory, and the order of the tiles.
//
// A block is one producer warpgroup, which starts copies, and two or three consumers, each of which computes 64 rows of a tile. Heads
// of 64, 128 and 256 dimensions are compiled; others are padded with zeros by the copy engine.
#pragma once

#include "core/dispatch.h"
#include "core/mask.h"

namespace scaledot {

constexpr int kSm90MaxDim = 256;
constexpr int kConsumerRows = 64;  // m of wgmma
constexpr int kPanelCols = 64;     // of a panel in shared memory: 128 bytes, what a swizzle spans
constexpr int kStages = 2;         // of keys, and of values

// Shared memory holds matrices as panels of 64 columns, each a box of the copy engine.
template <int kRows, int kCols>
struct alignas(1024) Panels {
  static constexpr int kPanelBytes = kRows * kPanelCols * 2;
  static constexpr int kBytes = kRows * kCols * 2;
  uint16_t data[kRows * kCols];
};

// Calls body(dim) with the number of columns that a problem's are padded to, dim.value.
template <int kValue>
struct Dim {
  static constexpr int value = kValue;
};
template <class Body>
auto with_padded_dim(const Problem& p, const Body& body) {
  const int64_t dim = max(p.head_dim, p.value_dim);
  if (dim <= 64) return body(Dim<64>{});
  if (dim <= 128) return body(Dim<128>{});
  return body(Dim<kSm90MaxDim>{});
}

// kGeneral: scores have terms of their own (mask, ALiBi, softcap, dropout, a scale that is not positive). Without, only positions mask
// them, and a score costs one multiply-add.
template <class Number_, int kDim_, bool kGeneral_>
struct Sm90Config {
  using Number = Number_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kConsumers = 2;
  static constexpr int kRows = kConsumers * kConsumerRows;
  static constexpr int kKeys = kGeneral && kDim > 64 ? 64 : kDim <= 128 ? 128 : 80;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  // One consumer computes scores while another has the tensor cores; with 256 dimensions their sums leave no room for that.
  static constexpr bool kTakesTurns = kDim <= 128;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // A block starts with the same number for all, and deals out no more than those.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
};

// Tiles in flight between the producer, which draws them, and the consumers.
constexpr int kTileSlots = 2;

template <class C>
struct Sm90ForwardShared {
  Panels<kConsumerRows, C::kDim> query[C::kConsumers];  // and, at the end of a tile, its output
  Panels<C::kKeys, C::kDim> key[kStages];
  Panels<C::kKeys, C::kDim> value[kStages];
  uint64_t query_full, query_empty;
  uint64_t key_full[kStages], key_empty[kStages];
  uint64_t value_full[kStages], value_empty[kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  int32_t tile[kTileSlots];  // -1: no more
};

// A place in a ring of stages that are used in turn, over and over: an mbarrier's phase changes with every round.
template <int kCount>
struct Ring {
  static_assert((kCount & (kCount - 1)) == 0);
  uint32_t used;

  SCALEDOT_HOST_DEVICE int stage() const { return int(used % kCount); }
  SCALEDOT_HOST_DEVICE int phase() const { return int(used / kCount % 2); }
};

// ---------------------------------------------------------------------------------------------------- tiles
// Tiles are numbered so that those that take longest come first, which under a causal mask are the last rows; and so that the blocks
// that work at one time share keys and values in the second-level cache: `section` (batch, head) planes at a time.
struct TileOrder {
  int planes, row_tiles, section;
};
struct Sm90Tile {
  int plane, row_tile;
};

SCALEDOT_FN Sm90Tile sm90_tile(const TileOrder& order, int index) {
  const int whole = order.section * order.row_tiles, first = index / whole * order.section;
  const int planes = min(order.section, order.planes - first), within = index % whole;
  return {first + within % planes, order.row_tiles - 1 - within / planes};
}

constexpr int64_t kMaxTiles = int64_t(1) << 30;
constexpr int64_t kCachedBytes = int64_t(24) << 20;  // of keys and values; Hopper has 50 MB

SCALEDOT_FN TileOrder tile_order(const Problem& p, int rows) {
  const int64_t group = p.heads / p.kv_heads, planes = p.batch * p.heads;
  const int64_t bytes = p.key_length * (p.head_dim + p.value_dim) * element_size(p.dtype);  // of a group of planes
  const int64_t section = max<int64_t>(kCachedBytes / max<int64_t>(bytes, 1), 1) * group;
  return {int(planes), int(ceil_div(p.query_length, rows)), int(min(section, planes))};
}

// ---------------------------------------------------------------------------------------------------- keys
// Of one tile of rows: its tiles of keys, and the keys that all of its rows attend to. Empty ranges: nothing.
struct TileKeys {
  int begin, end;            // tiles of keys
  int full_begin, full_end;  // keys
};

SCALEDOT_FN TileKeys tile_keys(const Problem& p, Range rows, int keys) {
  const Range first = row_keys(p, rows.begin), last = row_keys(p, rows.end - 1);
  if (first.begin >= last.end) return {0, 0, 0, 0};
  return {int(first.begin / keys), int(ceil_div(last.end, keys)), int(last.begin), int(max<int64_t>(first.end, 0))};
}
// Whether some score of the tile is masked by position, or belongs to no key.
SCALEDOT_FN bool tile_has_masked(const TileKeys& t, int first_key, int keys) {
  return first_key < t.full_begin || first_key + keys > t.full_end;
}

}  // namespace scaledot
