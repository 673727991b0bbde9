// Quantised keys and values in the forward: three warps of the producer's warpgroup widen the tiles that copies bring,
// in the order of the copies, to the pipeline stages that the consumers read.
#pragma once

#include "core/dispatch.h"
#include "cuda/generic/widen.cuh"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

// From panels of kRows rows of 64 bytes to a tile. `warp`: the number of this one among the kWidenWarps that take part.
//
// A warp takes 8 rows at a time, a thread 16 bytes of a row. The swizzle repeats every 8 rows, and panels follow each
// other without a gap, so a thread's places differ by a constant. The stores of 8 threads go to different banks.
template <class Storage, int kRows, int kCols, class Stored>
SCALEDOT_DEVICE void widen_tile(const char* stored, SwizzledTile<kRows, kCols>& to, int warp, Type<Stored> type) {
  constexpr int kChunk = 16, kChunks = kPanelCols / kChunk;  // bytes of a chunk, chunks of a row
  constexpr int kGroupBytes = kSwizzleRows * kPanelCols, kGroups = to.kPanels * kRows / kSwizzleRows;
  static_assert(kRows % kSwizzleRows == 0 && kSwizzleRows * kChunks == kWarpSize);
  const int row = lane_index() / kChunks, col = lane_index() % kChunks * kChunk;
  const char* from = stored + warp * kGroupBytes + lane_index() * kChunk;
  char* const rows = reinterpret_cast<char*>(to.data) + warp * 2 * kGroupBytes;
  char* first = rows + swizzled_byte(row, 2 * col);
  char* last = rows + swizzled_byte(row, 2 * (col + kChunk / 2));
#pragma unroll 2
  for (int group = warp; group < kGroups; group += kWidenWarps) {
    const auto bytes = shared_load(reinterpret_cast<const AlignedVector<uint32_t, 4>*>(from));
    widen_eight(bytes.x[0], bytes.x[1], reinterpret_cast<Storage*>(first), type);
    widen_eight(bytes.x[2], bytes.x[3], reinterpret_cast<Storage*>(last), type);
    constexpr int kStep = kWidenWarps * kGroupBytes;
    from += kStep, first += 2 * kStep, last += 2 * kStep;
  }
}

template <class C>
SCALEDOT_DEVICE void widen_forward(Sm90ForwardShared<C>& shared) {
  const int warp = warp_uniform(warp_index()) - kFirstWidenWarp;
  Ring<C::kStages> keys = {0}, values = {0};
  Ring<C::kStoredStages> stored = {0};
  const auto widen = [&](auto* stages, uint64_t* full, uint64_t* empty, Ring<C::kStages>& ring, DType dtype) {
    mbarrier_wait(&shared.stored.full[stored.stage()], stored.phase());
    mbarrier_wait(&empty[ring.stage()], ring.phase() ^ 1);
    with_quantised_storage(dtype, [&](auto type) {
      widen_tile<typename C::Storage>(shared.stored.data[stored.stage()], stages[ring.stage()], warp, type);
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
        shared, slots.used, true, sm90_forward_task<C>(p, slot.tile).keys,
        [&](int) { widen(shared.key, shared.key_full, shared.key_empty, keys, p.key.dtype); }, [] {}, [] {},
        [&](int) { widen(shared.value, shared.value_full, shared.value_empty, values, p.value.dtype); });
    warp_barrier();
    if (lane_index() == 0) mbarrier_arrive(&shared.tile_empty[slots.stage()]);
  }
}

}  // namespace
}  // namespace scaledot
