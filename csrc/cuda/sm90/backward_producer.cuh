// The producer of the backward: one thread that starts the copies of what the consumers read.
#pragma once

#include "cuda/sm90/backward_tasks.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

struct Sm90BackwardTensors {
  TmaTensor query, key, value, grad_output;
};

template <int kCols, class Storage>
SCALEDOT_DEVICE void load_panels(Storage* to, const TmaTensor& from, int rows, uint64_t* mbarrier, int row, int head,
                                 int batch) {
#pragma unroll
  for (int panel = 0; panel < kCols / kPanelCols; ++panel)
    tensor_load(to + panel * rows * kPanelCols, from.map, mbarrier, panel * kPanelCols, row, head * from.head_step,
                batch * from.batch_step);
}

// One thread per block: loads everything the consumers read.
template <class C>
SCALEDOT_DEVICE void produce_backward(const Sm90BackwardPlan& plan, const Sm90BackwardTensors& from,
                                      const Sm90BackwardTask& task, Sm90BackwardShared<C>& shared) {
  constexpr int kQueryBytes = C::kRows * C::kPaddedDim * 2, kGradBytes = C::kRows * C::kValueDim * 2;
  constexpr int kStatisticsBytes = int(sizeof(typename C::Statistics));
  constexpr int kPositionBytes = C::kGeneral ? C::kRows * int(sizeof(Sm90RowPosition)) : 0;
  const int first_key = shared_load(&task.first.key) + shared_load(&task.tile) * C::kKeys;
  const int first_row = shared_load(&task.first.query), kv_head = shared_load(&task.kv_head);
  const int batch = shared_load(&task.batch);
  mbarrier_arrive_expect(&shared.loaded, C::kKeys * (C::kPaddedDim + C::kValueDim) * 2);
  load_panels<C::kPaddedDim>(shared.key, from.key, C::kKeys, &shared.loaded, first_key, kv_head, batch);
  load_panels<C::kValueDim>(shared.value, from.value, C::kKeys, &shared.loaded, first_key, kv_head, batch);
  for_each_step(task, [&](const Sm90BackwardStep& step) {
    const Ring<C::kQueryStages> queries = {step.number};
    const Ring<C::kGradStages> grads = {step.number};
    const int row = first_row + step.row_tile * C::kRows;
    const int64_t tile = tile_number(task, step);

    uint64_t* full = &shared.query_full[queries.stage()];
    mbarrier_wait(&shared.query_empty[queries.stage()], queries.phase() ^ 1);
    mbarrier_arrive_expect(full, kQueryBytes + kStatisticsBytes + kPositionBytes);
    load_panels<C::kPaddedDim>(shared.query[queries.stage()], from.query, C::kRows, full, row, step.head, batch);
    bulk_load(&shared.statistics[queries.stage()], static_cast<const typename C::Statistics*>(plan.statistics) + tile,
              kStatisticsBytes, full);
    if constexpr (C::kGeneral)
      bulk_load(shared.positions[queries.stage()], plan.positions + tile * C::kRows, kPositionBytes, full);

    full = &shared.grad_full[grads.stage()];
    mbarrier_wait(&shared.grad_empty[grads.stage()], grads.phase() ^ 1);
    mbarrier_arrive_expect(full, kGradBytes);
    load_panels<C::kValueDim>(shared.grad_output[grads.stage()], from.grad_output, C::kRows, full, row, step.head,
                              batch);
  });
}

}  // namespace
}  // namespace scaledot
