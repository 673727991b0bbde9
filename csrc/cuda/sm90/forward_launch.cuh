// The host side of the forward for sm_90, for one storage type: configuration, plan and workspace, and the launches.
#pragma once

#include "core/arena.h"
#include "core/softmax.h"
#include "cuda/generic/generic.h"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/sm90.h"

namespace scaledot {
namespace {

// At full rate a block of 128 rows reads 32 bytes of keys and values a cycle, whatever head_dim is: a key of d columns
// has 4 d bytes, and its products with 128 rows take d / 8 cycles. 132 blocks together would read 7 TB/s. That is more
// than the second-level cache gives (about 5.5 TB/s: Chips and Cheese, "Nvidia's H100", 2023). Two blocks that share
// keys and values read half of it. With 192 rows, as up to 64 columns, a block reads 21 bytes a cycle.
constexpr int kClusterSize = 2;
template <class C>
constexpr bool kClusters = C::kConsumers == 2;

inline bool masks_by_position(const Problem& p) {
  return tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
}

// Calls body with the configuration for the problem.
template <class Storage, class Body>
auto with_sm90_forward_config(const Problem& p, const Body& body) {
  return with_padded_dims(p, [&](auto dim, auto value_dim) {
    constexpr int kDim = dim.value, kValueDim = value_dim.value;
    if (is_quantised(p)) return body(Sm90ForwardConfig<Storage, kDim, kValueDim, false, true, true>{});
    if (is_packed(p)) return body(Sm90ForwardConfig<Storage, kDim, kValueDim, false, true>{});
    if (needs_general_forward(p)) return body(Sm90ForwardConfig<Storage, kDim, kValueDim, true>{});
    using Plain = Sm90ForwardConfig<Storage, kDim, kValueDim, false>;
    if constexpr (kClusters<Plain>) {
      const bool pairs = ceil_div(p.query_length, Plain::kRows) % kClusterSize == 0;
      if (pairs && !masks_by_position(p))
        return body(Sm90ForwardConfig<Storage, kDim, kValueDim, false, false, false, kClusterSize>{});
    }
    return body(Plain{});
  });
}

constexpr int kDraws = 2;  // launches that draw query tiles, each with a counter: the forward and its repairs

// The plan without its tensors, and the workspace that it takes.
template <class C>
Sm90ForwardPlan plan_sm90_forward(const Problem& p, Arena& arena) {
  Sm90ForwardPlan plan = {};
  plan.scalars = scalars_of<C>(p);
  plan.order = sm90_tile_order(p, C::kCluster * C::kRows);
  plan.tiles = plan.order.batch_heads * plan.order.row_tiles;
  plan.key_rows = key_box_rows(p, C::kKeys / C::kCluster);
  if constexpr (C::kPacked) {
    plan.order.section = min(plan.order.section, int(p.heads));  // of one sequence
    plan.tiles = int(p.heads * most_packed_tiles(p, p.packed.total_q, p.query_length, C::kRows));
    plan.starts = take<int>(arena, p.batch + 1);
  }
  // The last tile of a packed sequence may have keys of the next one, which are masked.
  const bool masks = C::kPacked || masks_by_position(p) || p.attn_mask.data || p.alibi_slopes.data;
  plan.next_tile = take<int>(arena, kDraws + (masks ? 1 + plan.tiles : 0));
  if (masks) plan.nan = {plan.next_tile + kDraws, take<int>(arena, plan.tiles), plan.next_tile + kDraws + 1};
  if (p.weights.data) plan.states = take<RowState<float>>(arena, p.batch * p.heads * p.query_length);
  return plan;
}

template <class Storage>
struct Sm90Forward {
  static int64_t workspace(const Problem& p) {
    return with_sm90_forward_config<Storage>(p, [&](auto config) {
      Arena arena = {nullptr, 0};
      plan_sm90_forward<decltype(config)>(p, arena);
      return arena.used;
    });
  }

  static const char* run(const Problem& p, const DeviceExecutor& executor) {
    return with_sm90_forward_config<Storage>(p, [&](auto config) { return launch_all<decltype(config)>(p, executor); });
  }

  template <class C>
  static const char* launch_all(const Problem& p, const DeviceExecutor& executor) {
    Arena arena = {static_cast<char*>(executor.workspace), 0};
    Sm90ForwardPlan plan = plan_sm90_forward<C>(p, arena);
    const Problem all = with_all_rows(p);
    if (plan.tiles == 0 || all.query_length == 0) return nullptr;
    const char* error = make_tma_tensor(all, p.query, p.heads, all.query_length, p.head_dim, kWgmmaRows, plan.query);
    const Problem keys = with_all_keys(p);
    const auto make_keys = [&](const TensorView& view, int64_t cols, TmaTensor& made) {
      return make_tma_tensor(keys, view, p.kv_heads, keys.key_length, cols, plan.key_rows, made);
    };
    if (!error) error = make_keys(keys.key, p.head_dim, plan.key);
    if (!error) error = make_keys(keys.value, p.value_dim, plan.value);
    if (!error) error = make_tma_tensor(all, p.output, p.heads, all.query_length, p.value_dim, kWgmmaRows, plan.output);
    // The counters and, if there are any, the marks, which follow them. Clusters count nothing.
    const int64_t cleared = kDraws + (plan.nan.count ? 1 + plan.tiles : 0);
    if (!error && C::kCluster == 1)
      error = clear_bytes(plan.next_tile, cleared * int64_t(sizeof(int)), executor.stream);
    if constexpr (C::kPacked)
      if (!error)
        error = launch(sm90_count_tiles_kernel, 1, kCountThreads, sizeof(Sm90CountShared), executor.stream, p, C::kRows,
                       plan.tiles, plan.starts);
    const int64_t fit = device_traits().multiprocessors / C::kCluster;
    const auto run = [&] {
      return launch_clusters(sm90_forward_kernel<C>, C::kCluster * min<int64_t>(plan.tiles, fit), C::kCluster,
                             C::kThreads, sizeof(Sm90ForwardShared<C>), executor.stream, p, plan);
    };
    if (!error) error = run();
    if (!error && plan.nan.count) {
      plan.repairs = true, ++plan.next_tile;
      error = run();
    }
    if (!error && p.weights.data) error = generic_kernels(p.dtype).weights(p, plan.states, executor.stream);
    return error;
  }

  static constexpr Sm90Kernels kernels = {workspace, run};
};

}  // namespace
}  // namespace scaledot
