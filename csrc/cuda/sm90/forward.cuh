// The forward pass on Hopper. The formulas are those of generic/forward.cuh; here is who does what when.
//
//   producer     draws tiles of rows; for each copies Q, and K and V tile by tile into two stages each
//   consumers    64 rows each:   S = Q K_0^T,  softmax
//                                for j = 1 ..:  S = Q K_j^T and O += P V_(j-1) on the tensor cores,
//                                               softmax of S while O is still being computed,  O = O exp(m - m')
//                                O += P V_last,  output = O / (l (1 - dropout_p)),  lse = m + log l
// Consumers take turns (kTakesTurns): while one issues its products, another computes its softmax.
// Shah et al., "FlashAttention-3", 2024.
#pragma once

#include "core/arena.h"
#include "cuda/kernel.h"
#include "cuda/ptx/launch.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/finite.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

struct Sm90ForwardPlan {
  TensorMap query, key, value, output;
  int query_head, query_batch, key_head, key_batch, value_head, value_batch, output_head, output_batch;
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
  return {at.plane, first, tile_keys(p, {first, smaller<int64_t>(first + C::kRows, p.query_length)}, C::kKeys)};
}

// ---------------------------------------------------------------------------------------------------- producer
// One thread.
template <class C>
SCALEDOT_DEVICE void produce(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  constexpr int kPanels = C::kDim / kPanelCols;
  Ring<kStages> keys = {0}, values = {0};
  Ring<kTileSlots> slots = {0};
  Ring<1> queries = {0};
  const int group = int(p.heads / p.kv_heads);
  for (int tile = int(block_index());; tile = int(block_count()) + atomic_add(plan.next_tile, 1)) {
    mbarrier_wait(&shared.tile_empty[slots.stage()], slots.phase() ^ 1);
    shared_store(&shared.tile[slots.stage()], tile < plan.tiles ? tile : -1);
    mbarrier_arrive(&shared.tile_full[slots.stage()]);
    ++slots.used;
    if (tile >= plan.tiles) break;

    const Sm90Work work = sm90_work<C>(p, plan.order, tile);
    const int batch = work.plane / int(p.heads), head = work.plane % int(p.heads), kv_head = head / group;
    const auto load = [&](Panels<C::kKeys, C::kDim>* stages, uint64_t* full, uint64_t* empty, Ring<kStages>& ring,
                          const TensorMap& map, int t, int at_head, int at_batch) {
      mbarrier_wait(&empty[ring.stage()], ring.phase() ^ 1);
      mbarrier_arrive_expect(&full[ring.stage()], stages->kBytes);
      char* to = reinterpret_cast<char*>(stages[ring.stage()].data);
#pragma unroll
      for (int k = 0; k < kPanels; ++k)
        tensor_load(to + k * stages->kPanelBytes, map, &full[ring.stage()], k * kPanelCols, t * C::kKeys, at_head,
                    at_batch);
      ++ring.used;
    };
    const auto load_keys = [&](int t) {
      load(shared.key, shared.key_full, shared.key_empty, keys, plan.key, t, kv_head * plan.key_head,
           batch * plan.key_batch);
    };
    const auto load_values = [&](int t) {
      load(shared.value, shared.value_full, shared.value_empty, values, plan.value, t, kv_head * plan.value_head,
           batch * plan.value_batch);
    };

    const bool has_keys = work.keys.begin < work.keys.end;
    if (has_keys) load_keys(work.keys.begin);
    // The queries' place holds the last tile's output until it has been stored.
    mbarrier_wait(&shared.query_empty, queries.phase() ^ 1);
    ++queries.used;
    mbarrier_arrive_expect(&shared.query_full, C::kConsumers * shared.query->kBytes);
#pragma unroll 1
    for (int c = 0; c < C::kConsumers; ++c)
#pragma unroll
      for (int k = 0; k < kPanels; ++k)
        tensor_load(reinterpret_cast<char*>(shared.query[c].data) + k * shared.query->kPanelBytes, plan.query,
                    &shared.query_full, k * kPanelCols, work.first_row + c * kConsumerRows, head * plan.query_head,
                    batch * plan.query_batch);
#pragma unroll 1
    for (int t = work.keys.begin + 1; t < work.keys.end; ++t) {
      load_keys(t);
      load_values(t - 1);
    }
    if (has_keys) load_values(work.keys.end - 1);
  }
}

// ---------------------------------------------------------------------------------------------------- consumers
// S = Q K^T, started.
template <class C>
SCALEDOT_DEVICE void start_scores(const Panels<kConsumerRows, C::kDim>& query, const Panels<C::kKeys, C::kDim>& key,
                                  float (&s)[C::kKeys / 2]) {
  const uint64_t a = operand_k(query.data), b = operand_k(key.data);
#pragma unroll
  for (int k = 0; k < C::kDim / 16; ++k) {
    const int panel = k * 16 / kPanelCols, within = k * 16 % kPanelCols * 2;
    wgmma<C::kKeys, Major::k, Major::k>(s, operand_at(a, panel * query.kPanelBytes + within),
                                        operand_at(b, panel * key.kPanelBytes + within), k > 0,
                                        Type<typename C::Number>{});
  }
}
// O += P V, started.
template <class C>
SCALEDOT_DEVICE void start_output(const uint32_t (&weights)[C::kKeys / 16][4], const Panels<C::kKeys, C::kDim>& value,
                                  float (&out)[C::kDim / 2]) {
  const uint64_t b = operand_mn(value.data, value.kPanelBytes);
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
    wgmma<C::kDim, Major::mn>(out, weights[k], operand_at(b, k * 16 * kPanelCols * 2), true,
                              Type<typename C::Number>{});
}

// Rows that are there: the output by way of shared memory, where the queries were, then lse.
template <class C>
SCALEDOT_DEVICE void store_rows(const Problem& p, const Sm90ForwardPlan& plan, const ThreadRows<C>& rows,
                                const OnlineRows<C>& online, Panels<kConsumerRows, C::kDim>& panels,
                                float (&out)[C::kDim / 2]) {
  const Place place = place_of_thread();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowState<float> state = whole_row(plan.scalars, online, half);
    factor[half] = normaliser(state) * plan.scalars.kept;
    const int i = rows.first + 8 * half, plane = rows.plane;
    if (i >= p.query_length || place.col != 0) continue;
    if (p.lse.data)
      global_store(at<float>(p, p.lse, plane / int(p.heads), plane % int(p.heads)) + i * p.lse.row_stride,
                   logsumexp(state));
    if (plan.states) global_store(plan.states + plane * p.query_length + i, state);
  }
  // Lane l names row l % 8 of the 8 x 8 matrix l / 8; of 16 rows and 16 columns matrices are taken down first.
  const int thread = recomputed(thread_index() % kWarpgroupThreads), lane = thread % kWarpSize;
  const int row = thread / kWarpSize * 16 + lane % 16;
  char* data = reinterpret_cast<char*>(panels.data) + row * kSwizzleCols * 2;
  const int exchanged = swizzled_byte(row % 8, lane / 16 * 16) - row % 8 * kSwizzleCols * 2;
#pragma unroll
  for (int n = 0; n < C::kDim / 8; n += 2) {
    uint32_t r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
      r[m] = narrow_pair(out[4 * n + 2 * m] * factor[m % 2], out[4 * n + 2 * m + 1] * factor[m % 2],
                         Type<typename C::Number>{});
    stmatrix_x4(data + n / 8 * panels.kPanelBytes + (exchanged ^ (n % 8 * 16)), r);
  }
}

template <class C>
SCALEDOT_DEVICE void consume(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  // How many tiles of rows, modulo 4, and from bit 2 on how many of keys were taken: a register less. Values are one tile behind.
  static_assert(kTileSlots == 2);
  uint32_t taken = 0;
  const auto keys = [&] { return Ring<kStages>{taken >> 2}; };
  const auto values = [&] { return Ring<kStages>{(taken >> 2) - 1}; };
  const auto consumer = [] { return recomputed(thread_index() / kWarpgroupThreads) - 1; };
  const auto arrive = [](uint64_t& b) {  // one arrival a warp
    if (recomputed(lane_index()) == 0) mbarrier_arrive(&b);
  };
  const auto take_turn = [&] {
    if constexpr (C::kTakesTurns) named_barrier_wait(kTurn + consumer(), 256);
  };
  const auto end_turn = [&] {
    if constexpr (C::kTakesTurns) named_barrier_arrive(kTurn + (consumer() + 1) % C::kConsumers, 256);
  };
  if (consumer() == C::kConsumers - 1) end_turn();  // the first one's turn is first

  for (;;) {
    const Ring<kTileSlots> slots = {taken & 3};
    const Ring<1> queries = {taken & 3};
    taken = (taken & ~3u) | ((taken + 1) & 3);
    mbarrier_wait(&shared.tile_full[slots.stage()], slots.phase());
    const int tile = warp_uniform(shared_load(&shared.tile[slots.stage()]));
    warp_barrier();
    arrive(shared.tile_empty[slots.stage()]);
    if (tile < 0) return;

    const Sm90Work work = sm90_work<C>(p, plan.order, tile);
    const ThreadRows<C> rows = thread_rows<C>(p, work.plane, work.first_row + consumer() * kConsumerRows);
    auto& query = shared.query[consumer()];
    OnlineRows<C> online = no_rows<C>();
    float s[C::kKeys / 2], out[C::kDim / 2];
    uint32_t weights[C::kKeys / 16][4];
    float rescale[2];
#pragma unroll
    for (int e = 0; e < C::kDim / 2; ++e) out[e] = 0;

    // Scores to weights, in s.
    const auto soften = [&](int t) {
      const int first_key = t * C::kKeys;
      finish_scores<C>(p, plan.scalars, rows, first_key, has_masked(work.keys, rows, first_key), s);
      exponentiate<C>(online, plan.scalars.exponent, s, rescale);
      if constexpr (C::kGeneral)
        if (p.dropout_p > 0) drop<C>(p, rows, first_key, s);
    };
    // Whether the tile has masked scores (or a general kernel's may have) and values that are not finite.
    const auto is_odd = [&](int t) {
      if (!plan.finite || (!C::kGeneral && !tile_has_masked(work.keys, t * C::kKeys, C::kKeys))) return false;
      const int kv_plane = work.plane / int(p.heads / p.kv_heads);
      return global_load(plan.finite + kv_plane * ceil_div(p.key_length, C::kKeys) + t) == 0;
    };
    // The tensor cores multiply odd tiles as all others, so that their instructions depend on nothing; the sums are then put back.
    volatile float before[C::kDim / 2];  // in memory, not in registers
    const auto keep_output = [&](bool odd) {
      if (!odd) return;
#pragma unroll
      for (int e = 0; e < C::kDim / 2; ++e) before[e] = out[e];
    };
    // What is left of O += P V once the tensor cores are done.
    const auto finish_output = [&](int t, bool odd) {
      wgmma_wait<0>();
      wgmma_hold(out);
      if (odd) {
#pragma unroll
        for (int e = 0; e < C::kDim / 2; ++e) out[e] = before[e];
        multiply_live<C>(p, rows, t * C::kKeys, weights, shared.value[values().stage()], out);
        warp_barrier();
      }
      arrive(shared.value_empty[values().stage()]);
    };

    mbarrier_wait(&shared.query_full, queries.phase());
    if (work.keys.begin < work.keys.end) {
      mbarrier_wait(&shared.key_full[keys().stage()], keys().phase());
      wgmma_fence();
      start_scores<C>(query, shared.key[keys().stage()], s);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(s);
      arrive(shared.key_empty[keys().stage()]);
      taken += 4;
      soften(work.keys.begin);
      narrow_weights<C>(s, weights);

#pragma unroll 1
      for (int t = work.keys.begin + 1; t < work.keys.end; ++t) {
        const bool odd = is_odd(t - 1);
        keep_output(odd);
        mbarrier_wait(&shared.key_full[keys().stage()], keys().phase());
        take_turn();
        wgmma_hold(weights);
        wgmma_hold(out);
        wgmma_fence();
        start_scores<C>(query, shared.key[keys().stage()], s);
        wgmma_commit();
        mbarrier_wait(&shared.value_full[values().stage()], values().phase());
        wgmma_fence();
        start_output<C>(weights, shared.value[values().stage()], out);
        wgmma_commit();
        end_turn();
        wgmma_wait<1>();
        wgmma_hold(s);
        arrive(shared.key_empty[keys().stage()]);
        soften(t);
        finish_output(t - 1, odd);
        taken += 4;
#pragma unroll
        for (int e = 0; e < C::kDim / 2; ++e) out[e] *= rescale[e / 2 % 2];
        narrow_weights<C>(s, weights);
      }

      const bool odd = is_odd(work.keys.end - 1);
      keep_output(odd);
      mbarrier_wait(&shared.value_full[values().stage()], values().phase());
      wgmma_hold(weights);
      wgmma_hold(out);
      wgmma_fence();
      start_output<C>(weights, shared.value[values().stage()], out);
      wgmma_commit();
      finish_output(work.keys.end - 1, odd);
    }

    store_rows<C>(p, plan, rows, online, query, out);
    fence_async();
    named_barrier_wait(kMeet + consumer(), 128);
    if (recomputed(thread_index()) % 128 == 0) {
      const int first_row = rows.first;  // of this thread, and of the consumer
      if (first_row < p.query_length) {
#pragma unroll
        for (int k = 0; k < C::kDim / kPanelCols; ++k)
          if (k * kPanelCols < p.value_dim)
            tensor_store(plan.output, reinterpret_cast<const char*>(query.data) + k * query.kPanelBytes, k * kPanelCols,
                         first_row, work.plane % int(p.heads) * plan.output_head,
                         work.plane / int(p.heads) * plan.output_batch);
        bulk_commit();
        bulk_wait_read<0>();
      }
      mbarrier_arrive(&shared.query_empty);
    }
  }
}

template <class C>
SCALEDOT_KERNEL(C::kThreads)
sm90_forward_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90ForwardPlan plan) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<Sm90ForwardShared<C>*>(shared_memory());
  make_barriers<C>(shared);
  if (warpgroup_index() == 0) {
    give_registers<C::kProducerRegisters>();
    if (thread_index() == 0) produce<C>(p, plan, shared);
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(p, plan, shared);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- host
// The plan without tensor maps, and the workspace that it takes.
template <class C>
Sm90ForwardPlan plan_sm90_forward(const Problem& p, Arena& arena) {
  Sm90ForwardPlan plan = {};
  plan.scalars = scalars_of<C>(p);
  plan.order = tile_order(p, C::kRows);
  plan.tiles = plan.order.planes * plan.order.row_tiles;
  plan.next_tile = take<int>(arena, 1);
  const bool by_position = tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
  if (by_position || p.attn_mask.data || p.alibi_slopes.data)
    plan.finite = take<uint8_t>(arena, p.batch * p.kv_heads * ceil_div(p.key_length, C::kKeys));
  if (p.weights.data) plan.states = take<RowState<float>>(arena, p.batch * p.heads * p.query_length);
  return plan;
}

inline const char* encode(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows, TensorMap& map, int& head_step, int& batch_step) {
  const TensorPlan plan = tensor_plan(p, view, heads, rows, cols, box_rows);
  head_step = plan.head_step, batch_step = plan.batch_step;
  return encode_tensor_map(map, plan.shape);
}

template <class C>
const char* run_sm90_forward(const Problem& p, const DeviceExecutor& executor,
                             const char* (*weights)(const Problem&, const RowState<float>*, DeviceStream)) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  Sm90ForwardPlan plan = plan_sm90_forward<C>(p, arena);
  if (plan.tiles == 0) return nullptr;
  const char* error = encode(p, p.query, p.heads, p.query_length, p.head_dim, kConsumerRows, plan.query,
                             plan.query_head, plan.query_batch);
  if (!error)
    error = encode(p, p.key, p.kv_heads, p.key_length, p.head_dim, C::kKeys, plan.key, plan.key_head, plan.key_batch);
  if (!error)
    error = encode(p, p.value, p.kv_heads, p.key_length, p.value_dim, C::kKeys, plan.value, plan.value_head,
                   plan.value_batch);
  if (!error)
    error = encode(p, p.output, p.heads, p.query_length, p.value_dim, kConsumerRows, plan.output, plan.output_head,
                   plan.output_batch);
  if (!error) error = clear_bytes(plan.next_tile, sizeof(int), executor.stream);
  if (!error && plan.finite)
    error = launch(finite_kernel<typename C::Number>, p.batch * p.kv_heads * ceil_div(p.key_length, C::kKeys),
                   kFiniteThreads, 0, executor.stream, p, C::kKeys, const_cast<uint8_t*>(plan.finite));
  if (!error)
    error = launch(sm90_forward_kernel<C>, smaller<int64_t>(plan.tiles, device_traits().multiprocessors), C::kThreads,
                   sizeof(Sm90ForwardShared<C>), executor.stream, p, plan);
  if (!error && p.weights.data) error = weights(p, plan.states, executor.stream);
  return error;
}

}  // namespace
}  // namespace scaledot
