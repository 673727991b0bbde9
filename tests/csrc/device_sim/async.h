// The units that work beside the threads of a block on sm_90. Internal to this folder.
#pragma once

#include <deque>

#include "device_sim/block.h"

namespace scaledot::sim {

// PTX ISA, "mbarrier": a phase ends when all arrivals and all announced bytes have come.
struct Mbarrier {
  uint64_t* address;
  int arrivals;  // of a phase
  int missing;
  int64_t bytes;  // announced and not yet copied
  uint64_t phase;
  Clock arrived, completed;
  std::vector<int> waiting;
};

// A copy into shared memory. It arrives as late as possible: when a thread waits for its mbarrier.
struct Load {
  const char* call;
  int mbarrier;
  char* to;
  TensorMap map;  // map.data == nullptr: copies `bytes` contiguous bytes from `from`
  int32_t at[4];
  const char* from;
  int bytes;
};

struct NamedBarrier {
  int expected, arrived;
  const char* call;
  Clock knows;
  std::vector<int> waiting;
};

// One warp's copies out of shared memory.
struct BulkStores {
  int thread;                // the thread that issues them; -1: none so far
  Time last;                 // of the last read of the open group; 0: none
  std::deque<Time> pending;  // the last reads of the groups that were not waited for
};

// Sums that the tensor cores of a warpgroup compute. Until a warp waits for them, its threads' registers hold poison.
struct Accumulator {
  float* lane[kWarpgroupThreads];
  int n;
  std::vector<float> sums;  // 64 x n
  uint64_t group;
  unsigned waited;  // the warps that have waited for them, one bit each
};
struct RegisterOperand {
  const uint32_t* lane[kWarpgroupThreads];
  uint32_t value[kWarpgroupThreads][4];
  uint64_t group;
  unsigned waited;
};
struct TensorCores {
  bool fenced;
  uint64_t group;  // the open one
  std::vector<Accumulator> accumulators;
  std::vector<RegisterOperand> operands;
  // By warp: the last read of shared memory by each group that the warp has not waited for.
  std::deque<std::pair<uint64_t, Time>> reads[kWarpgroupWarps];
  int registers;  // set_max_registers; 0: not called
};

constexpr int kNamedBarriers = 16;

struct AsyncUnits {
  std::vector<Mbarrier> mbarriers;
  std::vector<Load> loads;
  std::vector<NamedBarrier> named;        // kNamedBarriers a block
  std::vector<BulkStores> stores;         // one a warp
  std::vector<TensorCores> tensor_cores;  // one a warpgroup
};

// Fails if a thread wrote the bytes and did not call fence_async since, or if that call is not ordered before `actor`.
void check_fenced(const char* call, const void* from, size_t bytes, const Actor& actor);

// The same for a copy that writes to the bytes: also threads that have only read them need a fence_async after that.
void check_overwritten(const char* call, const void* to, size_t bytes, const Actor& actor);

// A read of shared memory by the unit `actor`.
void read_async(const char* call, const void* from, size_t bytes, const Actor& actor);

// Called by a thread that ends.
void check_tensor_cores_end(const TensorCores& cores);

}  // namespace scaledot::sim
