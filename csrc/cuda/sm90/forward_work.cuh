// What the producer and the consumers of the forward both know: the plan, the barriers, and what a tile of rows needs.
#pragma once

#include "cuda/sm90/scores.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

struct Sm90ForwardPlan {
  Source query, key, value, output;
  Scalars scalars;
  TileOrder order;
  int tiles;
  int* next_tile;           // behind the first ones, of which each block has one
  const uint8_t* finite;    // of the values, by plane and tile of keys; nullptr: no score is masked
  RowState<float>* states;  // of every row, for the weights; nullptr if they are not asked for
};

// Named barriers: consumer k's turn is barrier kTurn + k; its threads meet at kMeet + k.
constexpr int kTurn = 1, kMeet = 4;

template <class C>
SCALEDOT_DEVICE void make_barriers(Sm90ForwardShared<C>& shared) {
  if (thread_index() == 0) {
    constexpr int kWarps = C::kConsumers * 4;
    mbarrier_init(&shared.query_full, 1);
    mbarrier_init(&shared.query_empty, C::kConsumers);
    for (int k = 0; k < kStages; ++k) {
      mbarrier_init(&shared.key_full[k], 1);
      mbarrier_init(&shared.key_empty[k], kWarps);
      mbarrier_init(&shared.value_full[k], 1);
      mbarrier_init(&shared.value_empty[k], kWarps);
    }
    for (int k = 0; k < kTileSlots; ++k) {
      mbarrier_init(&shared.tile_full[k], 1);
      mbarrier_init(&shared.tile_empty[k], kWarps);
    }
    mbarrier_init_fence();
  }
  barrier();
}

// What both sides derive from a tile's number.
struct Sm90Work {
  int plane, first_row;
  TileKeys keys;
};
template <class C>
SCALEDOT_DEVICE Sm90Work sm90_work(const Problem& p, const TileOrder& order, int tile) {
  const Sm90Tile at = sm90_tile(order, tile);
  const int first = at.row_tile * C::kRows;
  return {at.plane, first, tile_keys(p, {first, min<int64_t>(first + C::kRows, p.query_length)}, C::kKeys)};
}

}  // namespace
}  // namespace scaledot
