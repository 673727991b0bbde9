// Code that the kernels of the forward share: the plan of a call, and which part of it a block computes.
#pragma once

#include "core/softmax.h"
#include "cuda/generic/packed.cuh"

namespace scaledot {
namespace {

template <class T>
struct GenericForwardPlan {
  StackedTiling tiling;
  int64_t panels;       // of the output's columns: a block computes one
  int64_t splits;       // of the keys
  int64_t split_tiles;  // key tiles of a split
  RowState<T>* states;  // of every row, for the weights kernel; nullptr if weights are not wanted
  // Only if splits > 1: the state of every (batch, KV head, split, tile, panel), tile_rows rows each, and for rows that
  // are not empty the unnormalised output, kPanel columns a row.
  int64_t tile_rows;
  int64_t merge_slices;  // blocks that divide the rows of a tile and panel, to merge them
  T* partials;
  RowState<T>* partial_states;
};

// The factor from the sum of weights times values to the output: keep_scale / l, for quantised values times their
// scale. keep_scale = 1 / (1 - dropout_p).
template <class C, class T>
SCALEDOT_DEVICE T output_factor_of(const Problem& p, const StackedTile& tile, RowState<T> row, T keep_scale) {
  if constexpr (C::kQuantised)
    return output_factor(row, keep_scale * T(cache_scale(p, p.v_scale, tile.batch, tile.kv_head)));
  else
    return normaliser(row) * keep_scale;
}

// The work of one block over a query tile. Neighbouring blocks have the same keys.
struct QueryTask {
  int64_t kv_group, tile;
  int panel, split;
};
SCALEDOT_FN QueryTask query_task(int64_t block, const StackedTiling& tiling, int64_t panels, int64_t splits) {
  const int64_t tiles = tiles_per_kv_group(tiling), in_split = panels * tiles;
  return {block / (in_split * splits), block / panels % tiles, int(block % panels), int(block / in_split % splits)};
}

}  // namespace
}  // namespace scaledot
