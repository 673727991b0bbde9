// The generic kernels for one storage type: picks the configuration for a problem and calls the launchers.
#pragma once

#include "cuda/generic/backward_launch.cuh"
#include "cuda/generic/forward_launch.cuh"
#include "cuda/generic/generic.h"

namespace scaledot {
namespace {

// Calls body with the configuration of the first panel that fits, or of the last panel. kNarrowest: this is the first.
template <class Storage, bool kNarrowest, int kPanel, int... kWider, class Body>
auto with_config(const Problem& p, const Body& body) {
  if constexpr (sizeof...(kWider) > 0) {
    if (!panel_fits(p, kPanel)) return with_config<Storage, false, kWider...>(p, body);
  }
  return is_packed(p) ? body(GenericConfig<Storage, kPanel, true, kNarrowest>{})
                      : body(GenericConfig<Storage, kPanel>{});
}

template <class Storage, int... kPanels>
struct Generic {
  static int64_t workspace(const Problem& p, Pass pass) {
    return with_config<Storage, true, kPanels...>(p, [&](auto config) {
      using C = decltype(config);
      Arena arena = {nullptr, 0};
      if (pass == Pass::forward)
        with_decode<C>(p, [&](auto forward) { plan_forward<decltype(forward)>(p, arena); });
      else
        plan_backward<C>(p, arena);
      return arena.used;
    });
  }
  static int64_t blocks(const Problem& p, Pass pass) {
    return with_config<Storage, true, kPanels...>(p, [&](auto config) {
      using C = decltype(config);
      const int rows = pass == Pass::forward ? with_decode<C>(p, [](auto forward) { return forward.kRows; }) : C::kSide;
      const int64_t row_tiles = p.batch * p.kv_heads * tiles_per_kv_group(query_tiling(p, rows, true));
      const int64_t key_tiles = ceil_div(p.key_length, C::kSide);
      const int64_t panels = max<int64_t>(panels_of(max(p.head_dim, p.value_dim), C::kPanel), 1);
      const int64_t by_tile = p.weights.data || p.grad_mask.data ? row_tiles * key_tiles : 0;
      const int64_t by_row = row_tiles * panels, by_key = p.batch * p.kv_heads * key_tiles * panels;
      const int64_t by_head = p.grad_relative_bias.data ? p.batch * p.heads : 0;
      return max(max(by_tile, by_head), max(by_row, pass == Pass::backward ? by_key : 0)) +
             max(kDecodeBlocks, kMergeBlocks);
    });
  }
  static const char* forward(const Problem& p, const DeviceExecutor& executor) {
    return with_config<Storage, true, kPanels...>(
        p, [&](auto config) { return run_forward_of<decltype(config)>(p, executor); });
  }
  static const char* backward(const Problem& p, const DeviceExecutor& executor) {
    return with_config<Storage, true, kPanels...>(
        p, [&](auto config) { return run_backward<decltype(config)>(p, executor); });
  }
  static const char* weights(const Problem& p, RowState<float>* states, DeviceStream stream) {
    if constexpr (kSums32)
      return run_weights<Storage>(p, states, stream);
    else
      return kOther;
  }
  static constexpr bool kSums32 = sizeof(typename Compute<Storage>::type) == sizeof(float);
  static constexpr const char* kOther = "the rows of float64 are not in float32";
  static constexpr GenericKernels kernels = {workspace, blocks, forward, backward, weights};
};

}  // namespace
}  // namespace scaledot
