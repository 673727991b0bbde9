// Code that the producer and the consumers of the forward share: the plan of a call, the barriers, and the task of a
// block.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/forward_scores.cuh"
#include "cuda/sm90/forward_tiles.h"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

// The query tiles whose output has NaN, in any order. Without memory if nothing is masked.
struct Sm90NanTiles {
  int *count, *tiles;
  int* marks;  // of each query tile: not 0 if it is one of them
};

struct Sm90ForwardPlan {
  TmaTensor query, key, value, output;
  ScoreScalars scalars;
  Sm90TileOrder order;
  int tiles;       // or, in clusters, groups of kCluster tiles of the same keys, which `order` counts too
  int key_rows;    // that one copy moves, of keys and of values
  int* next_tile;  // counts the query tiles drawn after the first one of each block
  Sm90NanTiles nan;
  bool repairs;             // whether this launch computes only the tiles of `nan`, and leaves masked terms out
  int* starts;              // of packed sequences: by sequence, how many query tiles there are before it; then all
  RowState<float>* states;  // of every row, for the weights kernel; nullptr if weights are not wanted
};

// Named barriers; consumer k uses the barrier's number + k. A consumer waits at kPingPongBarrier for the tensor cores.
// Its threads meet at kConsumerBarrier. At kOutputBarrier it waits for the other one, before its output overwrites what
// both read.
constexpr int kPingPongBarrier = 1, kConsumerBarrier = 4, kOutputBarrier = 7;

template <class C>
SCALEDOT_DEVICE void init_forward_barriers(Sm90ForwardShared<C>& shared) {
  if (thread_index() == 0) {
    constexpr int kWarps = C::kConsumers * 4;
    for (int k = 0; k < C::kQueryStages; ++k) mbarrier_init(&shared.query_full[k], 1);
    mbarrier_init(&shared.query_empty, kWarps);
    mbarrier_init(&shared.output_empty, C::kConsumers * (C::kQueryStages == 1 ? C::kCluster : 1));
    constexpr int kWriters = C::kQuantised ? kWidenWarps * kWarpSize : 1;
    for (int k = 0; k < C::kStages; ++k) {
      mbarrier_init(&shared.key_full[k], kWriters);
      mbarrier_init(&shared.key_empty[k], C::kCluster * kWarps);
      mbarrier_init(&shared.value_full[k], kWriters);
      mbarrier_init(&shared.value_empty[k], C::kCluster * kWarps);
    }
    for (int k = 0; k < kTileSlots; ++k) {
      mbarrier_init(&shared.tile_full[k], 1);
      // With packed sequences the producer arrives too, and so do the warps that widen.
      mbarrier_init(&shared.tile_empty[k], kWarps + C::kPacked + (C::kQuantised ? kWidenWarps : 0));
    }
    if constexpr (C::kQuantised)
      for (int k = 0; k < C::kStoredStages; ++k) {
        mbarrier_init(&shared.stored.full[k], 1);
        mbarrier_init(&shared.stored.empty[k], kWidenWarps);
      }
    mbarrier_init_fence();
  }
  if constexpr (C::kCluster > 1)
    cluster_barrier();
  else
    barrier();
}

// The block's rank in its cluster.
template <class C>
SCALEDOT_DEVICE int forward_rank() {
  if constexpr (C::kCluster > 1)
    return cluster_rank();
  else
    return 0;
}

struct Sm90ForwardTask {
  int batch_head, first_row;
  Sm90KeyTiles keys;
};
template <class C>
SCALEDOT_DEVICE Sm90ForwardTask sm90_forward_task(const Problem& p, const Sm90TileIndex& at) {
  const int first = (at.row_tile * C::kCluster + forward_rank<C>()) * C::kRows;
  return {at.batch_head, first, sm90_key_tiles(p, {first, min<int64_t>(first + C::kRows, p.query_length)}, C::kKeys)};
}

// The order in which the key tiles of a query tile are filled: values are needed one tile later than keys. `then`
// follows the first keys, and `last` the last ones. Both are called if there are no keys, too. `number`: that of the
// query tile among the block's. `waits`: whether the caller fills the stages, where with one stage of queries the last
// output may still be. It does not leave through those of the first keys and values. So these do not wait for it.
template <class C, class Keys, class Then, class Last, class Values>
SCALEDOT_DEVICE void for_each_key_tile(Sm90ForwardShared<C>& shared, uint32_t number, bool waits,
                                       const Sm90KeyTiles& tiles, const Keys& keys, const Then& then, const Last& last,
                                       const Values& values) {
#pragma unroll 1
  for (int t = tiles.begin; t <= tiles.end; ++t) {
    if (t < tiles.end)
      keys(t);
    else
      last();
    if (t == tiles.begin) {
      then();
      if constexpr (C::kQueryStages == 1) {
        if (t < tiles.end) values(t);
        if (waits) mbarrier_wait(&shared.output_empty, Ring<1>{number}.phase());
      }
    } else if (C::kQueryStages > 1 || t > tiles.begin + 1) {
      values(t - 1);
    }
  }
}

}  // namespace
}  // namespace scaledot
