// The producer of the forward: one thread that draws query tiles and starts the copies of what the consumers read.
#pragma once

#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

// One thread per block.
template <class C>
SCALEDOT_DEVICE void produce_forward(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  Ring<C::kStages> keys = {0}, values = {0};
  Ring<kTileSlots> slots = {0};
  Ring<1> queries = {0};
  const int group = int(p.heads / p.kv_heads);
  for (int tile = int(block_index());; tile = int(block_count()) + atomic_add(plan.next_tile, 1)) {
    mbarrier_wait(&shared.tile_empty[slots.stage()], slots.phase() ^ 1);
    shared_store(&shared.tile[slots.stage()], tile < plan.tiles ? tile : -1);
    mbarrier_arrive(&shared.tile_full[slots.stage()]);
    ++slots.used;
    if (tile >= plan.tiles) break;

    const Sm90ForwardTask task = sm90_forward_task<C>(p, plan.order, tile);
    const int batch = task.batch_head / int(p.heads), head = task.batch_head % int(p.heads), kv_head = head / group;
    const auto load = [&](auto* stages, uint64_t* full, uint64_t* empty, Ring<C::kStages>& ring, const TmaTensor& from,
                          int t) {
      mbarrier_wait(&empty[ring.stage()], ring.phase() ^ 1);
      mbarrier_arrive_expect(&full[ring.stage()], stages->kBytes);
      char* to = reinterpret_cast<char*>(stages[ring.stage()].data);
#pragma unroll
      for (int k = 0; k < stages->kPanels; ++k)
        tensor_load(to + k * stages->kPanelBytes, from.map, &full[ring.stage()], k * kPanelCols, t * C::kKeys,
                    kv_head * from.head_step, batch * from.batch_step);
      ++ring.used;
    };
    const auto load_keys = [&](int t) { load(shared.key, shared.key_full, shared.key_empty, keys, plan.key, t); };
    const auto load_values = [&](int t) {
      load(shared.value, shared.value_full, shared.value_empty, values, plan.value, t);
    };

    const bool has_keys = task.keys.begin < task.keys.end;
    if (has_keys) load_keys(task.keys.begin);
    // The queries' buffer holds the last tile's output until that has been stored.
    mbarrier_wait(&shared.query_empty, queries.phase() ^ 1);
    ++queries.used;
    mbarrier_arrive_expect(&shared.query_full, C::kConsumers * shared.query->kBytes);
#pragma unroll 1
    for (int c = 0; c < C::kConsumers; ++c)
#pragma unroll
      for (int k = 0; k < shared.query->kPanels; ++k)
        tensor_load(reinterpret_cast<char*>(shared.query[c].data) + k * shared.query->kPanelBytes, plan.query.map,
                    &shared.query_full, k * kPanelCols, task.first_row + c * kWgmmaRows, head * plan.query.head_step,
                    batch * plan.query.batch_step);
        // Values are needed one tile later than keys.
#pragma unroll 1
    for (int t = task.keys.begin + 1; t < task.keys.end; ++t) {
      load_keys(t);
      load_values(t - 1);
    }
    if (has_keys) load_values(task.keys.end - 1);
  }
}

}  // namespace
}  // namespace scaledot
