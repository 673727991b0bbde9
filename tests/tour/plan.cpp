// Prints the plan that docs/tour.md shows: tasks, tiles and key ranges of one causal call. test_tour.py compiles it.
#include <cstdio>

#include "cpu/simd/isa/default.h"
//
#include "cpu/simd/attention/backward.h"
#include "cpu/simd/attention/forward.h"

using namespace scaledot;

int main() {
  float number = 0;  // the plan does not read elements
  Problem p = {};
  p.batch_dims = 1;
  p.batch_sizes[0] = p.batch = 1;
  p.heads = p.kv_heads = 2;
  p.query_length = p.key_length = 130;
  p.head_dim = p.value_dim = 64;
  p.dtype = DType::float32;
  p.scale = 0.125;
  p.position.window_left = kUnbounded;  // window_right is 0: is_causal
  p.query.data = p.key.data = p.value.data = p.output.data = p.lse.data = &number;

  Arena arena = {nullptr, 0};
  const ForwardPlan<float> plan = plan_forward<float>(p, 2, arena);
  const Forward<float> pass(p, plan);
  const int64_t kv_groups = p.batch * p.kv_heads;
  std::printf("forward: %d KV groups x %d query tiles, %d key tiles\n", int(kv_groups), int(pass.query_tiles()),
              int(plan.head.tiles));
  std::printf("group_tasks %d, slots %d, chunks %d\n", plan.group_tasks, int(plan.slots), int(plan.chunks));
  for (int64_t task = 0; task < kv_groups * pass.query_tiles(); ++task) {
    const auto [kv_group, index] = pass.task(task, kv_groups);
    const QueryTile tile = query_tile(p, plan.tiling, kv_group, index);
    std::printf("task %d: KV group %d, rows [%d, %d), keys", int(task), int(kv_group), int(tile.rows.begin),
                int(tile.rows.end));
    for (int64_t t = 0; t < plan.head.tiles; ++t) {
      const Range keys = seen_keys(p, tile, key_tile(p, t));
      if (excluded(p, tile, keys))
        std::printf(", skip");
      else
        std::printf("%s [%d, %d) %s", t > 0 ? "," : "", int(keys.begin), int(keys.end),
                    tile_kind(p, tile.rows, keys) == TileKind::full ? "full" : "partial");
    }
    std::printf("\n");
  }

  const BackwardPlan<float> back = plan_backward<float>(p, 2, arena);
  std::printf("backward: %d splits along %s, %d query tiles, separate_grad_query %d, whole_rows %d\n", int(back.splits),
              back.along == SplitAlong::keys ? "keys" : "rows", int(back.query_tiles), back.separate_grad_query,
              back.whole_rows);
}
