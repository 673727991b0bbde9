// The producer of the forward: one thread that draws query tiles and starts the copies of what the consumers read. For
// packed sequences a warp starts the copies, because keys may be in many pages. Another thread draws the tiles: it has
// to make their problems too. If K and V are quantised, no warp is left for that. Then the warp that copies draws
// a tile after it has started the copies of the last one, while the consumers still work on those.
#pragma once

#include "cuda/sm90/forward_packed.cuh"
#include "cuda/sm90/forward_widen.cuh"

namespace scaledot {
namespace {

// Positions in the pipelines of K, V and Q.
template <class C>
struct Sm90ForwardLoads {
  Ring<C::kStages> keys, values;
  Ring<C::kQueryStages> queries;
  Ring<C::kStoredStages> stored;  // of K and V in turn, if they are quantised

  // Starts all copies of a query tile. `first`: where the rows of its sequence begin. Calls last() after the last keys,
  // as the stage of the last values is still in use then.
  template <class Last>
  SCALEDOT_MEMBER void load(const Problem& p, const Sm90ForwardPlan& plan, const Sm90ForwardTask& task,
                            const Sm90FirstRows& first, Sm90ForwardShared<C>& shared, const Last& last) {
    const int group = int(p.heads / p.kv_heads);
    const int batch = task.batch_head / int(p.heads), head = task.batch_head % int(p.heads), kv_head = head / group;
    const bool leads = !C::kPacked || lane_index() == 0;
    constexpr int kPartRows = C::kKeys / C::kCluster;
    // Key tile t, to `to`.
    const auto copy = [&](auto tile, char* to, uint64_t* full, const TmaTensor& from, int t) {
      using Tile = decltype(tile);
      if (leads) mbarrier_arrive_expect(full, Tile::kBytes);
      if (C::kPacked && is_paged(p)) {
        warp_barrier();
        load_pages<Tile, C::kKeys>(p, from, plan.key_rows, t * C::kKeys, kv_head, to, full);
      } else if constexpr (C::kCluster > 1) {
        // A part of the tile, to all blocks.
        const int row = cluster_rank() * kPartRows;
#pragma unroll
        for (int k = 0; k < Tile::kPanels; ++k)
          tensor_load_to_all(to + k * Tile::kPanelBytes + row * Tile::kRowBytes, from.map, full,
                             k * Tile::kRowBytes / 2, t * C::kKeys + row, kv_head * from.head_step,
                             batch * from.batch_step, (1 << C::kCluster) - 1);
      } else if (leads) {
#pragma unroll
        for (int k = 0; k < Tile::kPanels; ++k)
          tensor_load(to + k * Tile::kPanelBytes, from.map, full, k * Tile::kRowBytes / 2, first.key + t * C::kKeys,
                      kv_head * from.head_step, batch * from.batch_step);
      }
    };
    const auto load = [&](auto tile, auto* stages, uint64_t* full, uint64_t* empty, Ring<C::kStages>& ring,
                          const TmaTensor& from, int t) {
      if constexpr (C::kQuantised) {
        const int stage = stored.stage();
        mbarrier_wait(&shared.stored.empty[stage], stored.phase() ^ 1);
        copy(tile, shared.stored.data[stage], &shared.stored.full[stage], from, t);
        ++stored.used;
      } else {
        mbarrier_wait(&empty[ring.stage()], ring.phase() ^ 1);
        copy(tile, reinterpret_cast<char*>(stages[ring.stage()].data), &full[ring.stage()], from, t);
        ++ring.used;
      }
    };
    const auto load_keys = [&](int t) {
      load(Sm90CopiedTile<C, C::kDim>{}, shared.key, shared.key_full, shared.key_empty, keys, plan.key, t);
    };
    const auto load_values = [&](int t) {
      load(Sm90CopiedTile<C, C::kValueDim>{}, shared.value, shared.value_full, shared.value_empty, values, plan.value,
           t);
    };
    const auto load_queries = [&] {
      // Two stages: this one holds an earlier tile's output until that has been stored.
      mbarrier_wait(C::kQueryStages > 1 ? &shared.output_empty : &shared.query_empty,
                    Ring<1>{queries.used}.phase() ^ 1);
      auto& stage = shared.query[queries.stage()];
      uint64_t* full = &shared.query_full[queries.stage()];
      ++queries.used;
      if (!leads) return;
      mbarrier_arrive_expect(full, C::kConsumers * stage->kBytes);
#pragma unroll 1
      for (int c = 0; c < C::kConsumers; ++c)
#pragma unroll
        for (int k = 0; k < stage->kPanels; ++k)
          tensor_load(reinterpret_cast<char*>(stage[c].data) + k * stage->kPanelBytes, plan.query.map, full,
                      k * kPanelCols, first.query + task.first_row + c * kWgmmaRows, head * plan.query.head_step,
                      batch * plan.query.batch_step);
    };

    for_each_key_tile(
        shared, queries.used, !C::kQuantised, task.keys, [&](int t) { load_keys(t); }, load_queries, last,
        [&](int t) { load_values(t); });
  }
};

// Draws query tiles, of `tiles` or of those to repair. One thread per block. In clusters all tiles take the same time.
// So each cluster has its share from the start, and no block has to tell the other what it drew.
template <class C>
struct Sm90TileDraws {
  const Sm90ForwardPlan& plan;
  Sm90ForwardShared<C>& shared;
  int draws;
  int drawn, offset;  // the draw is their sum, which is not computed before it is needed: `drawn` may take a while
  Ring<kTileSlots> slots;

  // Passes the query tile that is drawn on to the other warps, and returns it; -1 if there is none. Calls
  // fill(tile, slot) first.
  template <class Fill>
  SCALEDOT_MEMBER int pass_on(const Fill& fill) {
    mbarrier_wait(&shared.tile_empty[slots.stage()], slots.phase() ^ 1);
    const int draw = offset + drawn;
    const int tile = draw >= draws ? -1 : plan.repairs ? global_load(plan.nan.tiles + draw) : draw;
    if (tile >= 0) fill(tile, slots.stage());
    shared_store(&shared.tile[slots.stage()], tile);
    mbarrier_arrive(&shared.tile_full[slots.stage()]);
    ++slots.used;
    return tile;
  }
  // Draws the next one.
  SCALEDOT_MEMBER void advance() {
    if constexpr (C::kCluster > 1)
      offset += int(block_count()) / C::kCluster;
    else
      offset = int(block_count()), drawn = atomic_count(plan.next_tile);
  }
};
template <class C>
SCALEDOT_DEVICE Sm90TileDraws<C> begin_draws(const Sm90ForwardPlan& plan, int tiles, Sm90ForwardShared<C>& shared) {
  return {plan, shared, plan.repairs ? global_load(plan.nan.count) : tiles, int(block_index()) / C::kCluster, 0, {0}};
}

// Draws a tile of packed sequences and makes its problem.
template <class C>
SCALEDOT_DEVICE int draw_packed_tile(const Problem& p, Sm90TileDraws<C>& draws) {
  return draws.pass_on(
      [&](int tile, int slot) { fill_packed_slot<C>(p, draws.plan, tile, draws.shared.packed.slots[slot]); });
}
template <class C>
SCALEDOT_DEVICE void draw_packed_tiles(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  Sm90TileDraws<C> draws = begin_draws<C>(plan, global_load(plan.starts + p.batch), shared);
  while (draw_packed_tile(p, draws) >= 0) draws.advance();
}

template <class C>
SCALEDOT_DEVICE void produce_forward(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  Sm90ForwardLoads<C> loads = {};
  if constexpr (C::kPacked) {
    Sm90TileDraws<C> draws = begin_draws<C>(plan, global_load(plan.starts + p.batch), shared);
    for (Ring<kTileSlots> slots = {0};; ++slots.used) {
      if (C::kQuantised && lane_index() == 0) {
        draw_packed_tile(p, draws);
        draws.advance();
      }
      warp_barrier();
      mbarrier_wait(&shared.tile_full[slots.stage()], slots.phase());
      if (shared_load(&shared.tile[slots.stage()]) < 0) break;
      const Sm90PackedSlot& slot = shared.packed.slots[slots.stage()];
      loads.load(slot.problem, plan, sm90_forward_task<C>(slot.problem, slot.tile), slot.first, shared, [] {});
      warp_barrier();
      if (lane_index() == 0) mbarrier_arrive(&shared.tile_empty[slots.stage()]);
    }
  } else {
    Sm90TileDraws<C> draws = begin_draws<C>(plan, plan.tiles, shared);
    for (;;) {
      const int tile = draws.pass_on([](int, int) {});
      if (tile < 0) break;
      // The next tile is drawn where the thread would wait for the consumers anyway, because a draw takes
      // a microsecond. At the tile's start it would be too early: the block with the longest tile would draw first.
      loads.load(p, plan, sm90_forward_task<C>(p, sm90_tile_index(plan.order, tile)), {0, 0}, shared,
                 [&] { draws.advance(); });
    }
  }
}

}  // namespace
}  // namespace scaledot
