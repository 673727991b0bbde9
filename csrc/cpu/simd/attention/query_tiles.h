// How the query rows of a KV group are cut into tiles. KV groups are numbered batch * kv_heads + kv_head.
#pragma once

#include "core/mask.h"
#include "cpu/simd/pack.h"

namespace scaledot {
namespace {

// The query rows of a task: the rows `rows` of `heads` neighbouring query heads that share one KV head, stacked.
// (With grouped-query attention and few rows, most of a tile would otherwise be empty.)
struct QueryTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  Range rows;
};

inline int64_t count(Range r) { return r.end - r.begin; }
inline Range heads_of(const QueryTile& t) { return {t.first_head, t.first_head + t.heads}; }
inline int64_t tile_rows(const QueryTile& t) { return t.heads * count(t.rows); }
inline int64_t head_of(const QueryTile& t, int64_t r) {
  return t.heads == 1 ? t.first_head : t.first_head + r / count(t.rows);
}
inline int64_t row_of(const QueryTile& t, int64_t r) {
  return t.heads == 1 ? t.rows.begin + r : t.rows.begin + r % count(t.rows);
}

// The rows of a tensor that belong to a tile.
template <class Storage>
inline RowBlock<Storage> block(const Problem& p, const TensorView& view, const QueryTile& tile) {
  return block<Storage>(p, view, tile.batch, tile.first_head, tile.rows.begin, tile.rows.end - tile.rows.begin);
}

// Row i of the output, from a sum and its factor, and what rounding took off it if the problem saves that.
template <class Storage, class Sum>
SCALEDOT_INLINE void write_output_row(const Problem& p, int64_t batch, int64_t head, int64_t i, const Sum* from,
                                      Sum factor) {
  Storage* output = element_ptr<Storage>(p, p.output, batch, head) + i * p.output.row_stride;
  narrow_row(from, factor, p.value_dim, output);
  if (Storage* output_low = element_ptr<Storage>(p, p.output_low, batch, head))
    narrow_output_low(from, factor, p.value_dim, output, output_low + i * p.output_low.row_stride);
}

// The cut of one KV group. An even cut has tiles that differ by one micro-tile at most. A tapered cut has
// `row_tiles` tiles of `rows` rows, counted from the last row of a head, and then tiles of one micro-tile each. With a
// block mask the rows of each block are cut evenly, so that no tile has rows of a block that it need not compute.
struct QueryTiling {
  int64_t rows;         // of a head in a tile, at most
  int64_t heads;        // of a tile
  int64_t row_tiles;    // of a head
  int64_t micro_tiles;  // of a head: tiles of one micro-tile; 0 for an even cut
  int64_t head_tiles;   // of a KV group: groups of `heads` query heads
  int64_t block_rows;   // no tile has rows on both sides of a multiple of this; 0: no block mask
  int64_t block_tiles;  // in this many rows
};

inline int64_t micro_tiles_of(int64_t rows) { return max<int64_t>(ceil_div(rows, int64_t(kMicroRows)), 1); }

// `row_tiles` tiles a head, at most as many as micro-tiles. A tile has as many heads as fit into `most_rows` rows.
inline QueryTiling cut_evenly(const Problem& p, int64_t row_tiles, int64_t most_rows = kShortTileRows,
                              int64_t most_heads = kUnbounded) {
  const int64_t group = p.heads / p.kv_heads, length = max<int64_t>(p.query_length, 1);
  const int64_t rows = min(ceil_div(micro_tiles_of(length), row_tiles) * kMicroRows, length);
  const int64_t heads = min(min(group, most_heads), max<int64_t>(most_rows / rows, 1));
  return {rows, heads, row_tiles, 0, ceil_div(group, heads), 0, 0};
}

// Blocks of few rows are put together until they fill a tile. The last block may be shorter, and is cut by itself.
inline QueryTiling cut_by_blocks(const Problem& p) {
  const int64_t group = p.heads / p.kv_heads, length = max<int64_t>(p.query_length, 1);
  const int64_t block = min(p.block_rows * max<int64_t>(kShortTileRows / p.block_rows, 1), length),
                last = length % block;
  const auto tiles_of = [](int64_t rows) { return ceil_div(rows, int64_t(kShortTileRows)); };
  const auto most_rows = [&](int64_t rows) {
    return rows == 0 ? 0 : min(ceil_div(micro_tiles_of(rows), tiles_of(rows)) * kMicroRows, rows);
  };
  const int64_t rows = max(most_rows(block), most_rows(last)),
                heads = min(group, max<int64_t>(kShortTileRows / rows, 1));
  const int64_t row_tiles = length / block * tiles_of(block) + tiles_of(last);
  return {rows, heads, row_tiles, 0, ceil_div(group, heads), block, tiles_of(block)};
}

// Tile `index` of cut_by_blocks, counted from the first row.
inline Range rows_in_block(const Problem& p, const QueryTiling& t, int64_t index) {
  const int64_t block = index / t.block_tiles, begin = block * t.block_rows;
  const int64_t length = min(t.block_rows, p.query_length - begin), all = micro_tiles_of(length);
  const int64_t tiles = ceil_div(length, int64_t(kShortTileRows)), within = index - block * t.block_tiles;
  return {begin + all * within / tiles * kMicroRows, begin + min(all * (within + 1) / tiles * kMicroRows, length)};
}

// The fewest tiles of at most `most_rows` rows.
inline QueryTiling even_tiling(const Problem& p, int64_t most_rows = kShortTileRows) {
  if (has_blocks(p)) return cut_by_blocks(p);
  return cut_evenly(p, ceil_div(max<int64_t>(p.query_length, 1), most_rows), most_rows);
}

inline QueryTiling backward_tiling(const Problem& p) { return even_tiling(p, kBackwardTileRows); }

// The forward's tiles. The number of workers may decide, because the result of a row does not depend on its tile. A
// returned weight may: it is computed again if a key of the tile is not finite (ReturnedWeights).
inline QueryTiling forward_tiling(const Problem& p, int64_t workers) {
  if (has_blocks(p)) return even_tiling(p);
  const auto tiles = [&](const QueryTiling& t) { return p.batch * p.kv_heads * t.head_tiles * t.row_tiles; };
  const bool by_workers = !p.weights.data;
  const QueryTiling longest = even_tiling(p, kTileRows);
  if (by_workers && tiles(longest) >= kManyTiles * workers) return longest;
  QueryTiling t = even_tiling(p);
  const int64_t many = by_workers ? kManyTiles * workers : kManyTilesOfAnyCall;
  if (t.row_tiles <= kTaperFrom || tiles(t) >= many) return t;
  t.row_tiles -= ceil_div(t.row_tiles, kTaperShare);
  t.micro_tiles = ceil_div(p.query_length - t.row_tiles * t.rows, int64_t(kMicroRows));
  return t;
}

inline int64_t tiles_per_head(const QueryTiling& t) { return (t.row_tiles + t.micro_tiles) * t.head_tiles; }

// The even tiling that minimises the largest share per worker. The overhead of a tile is about the time of a
// micro-tile.
inline QueryTiling query_tiling_for_workers(const Problem& p, int64_t workers) {
  if (has_blocks(p)) return cut_by_blocks(p);
  const int64_t micro_tiles = micro_tiles_of(p.query_length);
  QueryTiling best = backward_tiling(p);
  int64_t least = kUnbounded;
  for (int64_t in_tile = min<int64_t>(kBackwardTileRows / kMicroRows, micro_tiles); in_tile > 0; --in_tile)
    for (int64_t heads = cut_evenly(p, ceil_div(micro_tiles, in_tile), kBackwardTileRows).heads; heads > 0; --heads) {
      QueryTiling t = cut_evenly(p, ceil_div(micro_tiles, in_tile), kBackwardTileRows, heads);
      // Tiles are claimed in rounds of one a worker. Smaller tiles fill the last round.
      const int64_t abreast = p.batch * p.kv_heads * t.head_tiles, rounds = ceil_div(abreast * t.row_tiles, workers);
      t = cut_evenly(p, min(rounds * workers / max<int64_t>(abreast, 1), micro_tiles), kBackwardTileRows, heads);
      const int64_t share = rounds * (round_up(t.rows * t.heads, int64_t(kMicroRows)) + kMicroRows);
      if (share < least) best = t, least = share;
    }
  return best;
}

// Tile `index` of KV group `kv_group`. Later rows come first, because under a causal mask they have the most keys.
inline QueryTile query_tile(const Problem& p, const QueryTiling& t, int64_t kv_group, int64_t index) {
  const int64_t kv_head = kv_group % p.kv_heads, group = p.heads / p.kv_heads, number = index / t.head_tiles;
  const int64_t head = index % t.head_tiles * t.heads;
  Range rows;
  if (t.block_rows > 0) {
    rows = rows_in_block(p, t, t.row_tiles - 1 - number);
  } else if (t.micro_tiles == 0) {
    const int64_t all = ceil_div(p.query_length, int64_t(kMicroRows)), from_first = t.row_tiles - 1 - number;
    rows = {all * from_first / t.row_tiles * kMicroRows,
            min(all * (from_first + 1) / t.row_tiles * kMicroRows, p.query_length)};
  } else if (number < t.row_tiles) {
    rows = {p.query_length - (number + 1) * t.rows, p.query_length - number * t.rows};
  } else {
    const int64_t end = p.query_length - t.row_tiles * t.rows - (number - t.row_tiles) * kMicroRows;
    rows = {max<int64_t>(end - kMicroRows, 0), end};
  }
  return {kv_group / p.kv_heads, kv_head, kv_head * group + head, min(t.heads, group - head), rows};
}

// ---------------------------------------------------------------------------------------------------- key tiles
inline Range key_tile(const Problem& p, int64_t tile) {
  return {tile * kTileKeys, min((tile + 1) * kTileKeys, p.key_length)};
}

// Calls body(keys) for each tile of keys that overlaps the range.
template <class Body>
void for_each_tile(const Problem& p, Range range, const Body& body) {
  for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) body(key_tile(p, t));
}

}  // namespace
}  // namespace scaledot
