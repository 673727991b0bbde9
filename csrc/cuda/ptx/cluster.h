// Clusters: blocks that run at the same time and use each other's shared memory (PTX ISA, "Cluster of Cooperative
// Thread Arrays"). The rank of a block is its number in its cluster.
//
// A block uses another one's memory only between two barriers of the cluster: after the first one, the other block has
// initialised its mbarriers; until the second one, it has not ended.
#pragma once

#include "cuda/ptx/tma.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return int(rank);
}

// Barrier of all threads of the cluster. Threads of a warp may come one after the other. At the end of a block, too, it
// is a release: arrivals at mbarriers of other blocks must have come there before those blocks end.
SCALEDOT_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// Arrives at the mbarrier that is at the same place in the block of that rank. Says that this thread no longer reads a
// stage, and no more: it does not make the thread's writes visible there. That would need .release.cluster, which waits
// for all of the thread's accesses to memory (MEMBAR.GPU).
SCALEDOT_DEVICE void mbarrier_arrive_at(uint64_t* b, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(b)),
      "r"(rank)
      : "memory");
}

// tensor_load to the same place in several blocks, bit k of `blocks` for rank k. Each one's mbarrier at the place of
// `mbarrier` gets the bytes that came to that block.
SCALEDOT_DEVICE void tensor_load_to_all(void* to_shared, const TensorMap& map, uint64_t* mbarrier, int c0, int c1,
                                        int c2, int c3, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(shared_address(to_shared)),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

#else

SCALEDOT_DEVICE int cluster_rank() { return sim::cluster_rank(); }
SCALEDOT_DEVICE void cluster_barrier() { sim::cluster_barrier("cluster_barrier"); }
SCALEDOT_DEVICE void mbarrier_arrive_at(uint64_t* b, int rank) {
  sim::mbarrier_arrive_at("mbarrier_arrive_at", b, rank);
}
SCALEDOT_DEVICE void tensor_load_to_all(void* to_shared, const TensorMap& map, uint64_t* mbarrier, int c0, int c1,
                                        int c2, int c3, uint16_t blocks) {
  sim::tensor_load_to_all("tensor_load_to_all", to_shared, map, mbarrier, {c0, c1, c2, c3}, blocks);
}

#endif

}  // namespace scaledot
