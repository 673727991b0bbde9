// The order of the forward's query tiles, and the key tiles that each of them needs.
#pragma once

#include "cuda/sm90/config.h"

namespace scaledot {

// Tiles that take longest come first: under a causal mask, those of the last rows. The tiles of `section` (batch, head)
// pairs are numbered together, so that blocks that run at the same time share keys and values in the second-level
// cache.
struct Sm90TileOrder {
  int batch_heads, row_tiles, section;
};
struct Sm90TileIndex {
  int batch_head;  // batch * heads + head
  int row_tile;
};

SCALEDOT_FN Sm90TileIndex sm90_tile_index(const Sm90TileOrder& order, int index) {
  const int whole = order.section * order.row_tiles, first = index / whole * order.section;
  const int pairs = min(order.section, order.batch_heads - first), within = index % whole;
  return {first + within % pairs, order.row_tiles - 1 - within / pairs};
}

// The inverse.
SCALEDOT_FN int sm90_tile_number(const Sm90TileOrder& order, const Sm90TileIndex& at) {
  const int first = at.batch_head / order.section * order.section;
  const int pairs = min(order.section, order.batch_heads - first);
  return first * order.row_tiles + (order.row_tiles - 1 - at.row_tile) * pairs + at.batch_head - first;
}

constexpr int64_t kMaxTiles = int64_t(1) << 30;
constexpr int64_t kCachedBytes = int64_t(24) << 20;  // of keys and values; Hopper's second-level cache has 50 MB

SCALEDOT_FN Sm90TileOrder sm90_tile_order(const Problem& p, int rows) {
  const int64_t group = p.heads / p.kv_heads, batch_heads = p.batch * p.heads;
  const int64_t bytes = p.key_length * (p.head_dim + p.value_dim) * element_size(p.dtype);  // of a KV head
  const int64_t section = max<int64_t>(kCachedBytes / max<int64_t>(bytes, 1), 1) * group;
  return {int(batch_heads), int(ceil_div(p.query_length, rows)), int(min(section, batch_heads))};
}

// For one query tile: the tiles of keys that at least one row may attend to, and the keys that all rows may attend to.
// Ranges without keys are empty.
struct Sm90KeyTiles {
  int begin, end;            // tiles of keys
  int full_begin, full_end;  // keys
};

SCALEDOT_FN Sm90KeyTiles sm90_key_tiles(const Problem& p, Range rows, int keys) {
  const Range first = row_keys(p, rows.begin), last = row_keys(p, rows.end - 1);
  if (first.begin >= last.end) return {0, 0, 0, 0};
  return {int(first.begin / keys), int(ceil_div(last.end, keys)), int(last.begin), int(max<int64_t>(first.end, 0))};
}
// Whether some score of the key tile is masked by position or past the last key.
SCALEDOT_FN bool tile_has_masked(const Sm90KeyTiles& t, int first_key, int keys) {
  return first_key < t.full_begin || first_key + keys > t.full_end;
}

}  // namespace scaledot
