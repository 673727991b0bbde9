// Quantised keys and values in the forward: two warps of the producer's warpgroup widen the tiles that copies bring, in
// the order of the copies, to the pipeline stages that the consumers read.
#pragma once

#include "core/dispatch.h"
#include "cuda/generic/widen.cuh"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

// From panels of kRows rows of 64 bytes to a tile. Called by kWidenWarps warps; `thread` counts their threads.
template <class Storage, int kRows, int kCols, class Stored>
SCALEDOT_DEVICE void widen_tile(const char* stored, SwizzledTile<kRows, kCols>& to, int thread, Type<Stored> type) {
  constexpr int kChunk = 16, kChunks = kPanelCols / kChunk;  // bytes of a chunk, chunks of a row
#pragma unroll 1
  for (int c = thread; c < kRows * kCols / kChunk; c += kWidenWarps * kWarpSize) {
    const int panel = c / (kRows * kChunks), row = c / kChunks % kRows, col = c % kChunks * kChunk;
    const auto bytes = shared_load(reinterpret_cast<const AlignedVector<uint32_t, 4>*>(stored + c * kChunk));
    char* const rows = reinterpret_cast<char*>(to.data) + panel * to.kPanelBytes;
#pragma unroll
    for (int k = 0; k < 4; k += 2)
      widen_eight(bytes.x[k], bytes.x[k + 1], reinterpret_cast<Storage*>(rows + swizzled_byte(row, 2 * (col + 4 * k))),
                  type);
  }
}

template <class C>
SCALEDOT_DEVICE void widen_forward(Sm90ForwardShared<C>& shared) {
  const int thread = thread_index() % (kWidenWarps * kWarpSize);
  Ring<C::kStages> keys = {0}, values = {0};
  Ring<C::kStoredStages> stored = {0};
  const auto widen = [&](auto* stages, uint64_t* full, uint64_t* empty, Ring<C::kStages>& ring, DType dtype) {
    mbarrier_wait(&shared.stored.full[stored.stage()], stored.phase());
    mbarrier_wait(&empty[ring.stage()], ring.phase() ^ 1);
    with_quantised_storage(dtype, [&](auto type) {
      widen_tile<typename C::Storage>(shared.stored.data[stored.stage()], stages[ring.stage()], thread, type);
    });
    fence_async();  // the tensor cores read the tile
    mbarrier_arrive(&full[ring.stage()]);
    warp_barrier();
    if (lane_index() == 0) mbarrier_arrive(&shared.stored.empty[stored.stage()]);
    ++ring.used, ++stored.used;
  };
  for (Ring<kTileSlots> slots = {0};; ++slots.used) {
    mbarrier_wait(&shared.tile_full[slots.stage()], slots.phase());
    if (shared_load(&shared.tile[slots.stage()]) < 0) break;
    const Sm90PackedSlot& slot = shared.packed.slots[slots.stage()];
    const Problem& p = slot.problem;
    for_each_key_tile(
        sm90_forward_task<C>(p, slot.tile).keys,
        [&](int) { widen(shared.key, shared.key_full, shared.key_empty, keys, p.key.dtype); }, [] {},
        [&](int) { widen(shared.value, shared.value_full, shared.value_empty, values, p.value.dtype); });
    warp_barrier();
    if (lane_index() == 0) mbarrier_arrive(&shared.tile_empty[slots.stage()]);
  }
}

}  // namespace
}  // namespace scaledot
