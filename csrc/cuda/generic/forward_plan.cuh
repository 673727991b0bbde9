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
  // Only if splits > 1: the unnormalised output and the state of every (batch, KV head, tile, panel, split), kSide rows
  // of kPanel columns each.
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

// The work of one block over a query tile.
struct QueryTask {
  int64_t kv_group, tile;
  int panel, split;
};
SCALEDOT_FN QueryTask query_task(int64_t block, const StackedTiling& tiling, int64_t panels, int64_t splits) {
  const int64_t tiles = tiles_per_kv_group(tiling);
  return {block / (splits * panels * tiles), block / (splits * panels) % tiles, int(block / splits % panels),
          int(block % splits)};
}

}  // namespace
}  // namespace scaledot
