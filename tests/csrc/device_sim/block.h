// The running block or cluster of blocks: its threads, which are fibers, and how they wait for each other. Internal to
// this folder.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device_sim/device_sim.h"
#include "device_sim/fiber_stack.h"
#include "device_sim/shared_state.h"

namespace scaledot::sim {

enum class State { runnable, waiting, done };

struct Copy {
  char* to;
  char data[16];
};

struct Thread {
  ucontext_t start;
  jmp_buf resume;
  FiberStack stack;
  bool started;
  State state;
  const char* waits_in;
  Time now, all, all_of_warp;  // as in Actor
  Clock knows;
  std::vector<Time> fences;       // the times of its fence_async calls
  std::vector<Copy> copies;       // cp_async: issued and not yet waited for
  size_t last_group, open_group;  // where the last group that was committed begins in `copies`, and the next one
  size_t aligned_calls;
};

// An .aligned instruction that some lanes of a warp have come to.
struct AlignedCall {
  const char* call;
  Place place;
  int lanes;
};
// A warp's calls that not all lanes have come to, in order, and the number of calls before them.
struct AlignedCalls {
  std::deque<AlignedCall> open;
  size_t done;
};

// The threads of a warp or warpgroup that have arrived at a collective call.
struct Meeting {
  const char* call;
  int arrived;
  void* operands[kWarpgroupThreads];
};

struct AsyncUnits;  // async.h

// The barrier of a block, or of a cluster.
struct ThreadBarrier {
  int arrived;
  bool predicate, result;
  const char* call;
  Clock knows;
};

// A cluster of blocks; most have one. Its threads and its shared memory are those of all blocks, one after the other.
struct Block {
  int64_t index;  // of the cluster
  int64_t count;  // of blocks in the grid
  int blocks;     // in the cluster
  int threads, block_threads;
  size_t window, block_bytes;  // bytes of shared memory from one block to the next, and of each
  const std::function<void()>* kernel;
  SharedState* shared;
  std::vector<Thread> thread;
  std::vector<Meeting> warp, warpgroup;
  std::vector<AlignedCalls> aligned;  // of each warp
  Time time;
  std::vector<ThreadBarrier> barrier;  // of each block; then of the cluster
  std::vector<Clock> remote;           // of each block: the last use of its memory by each agent of another block
  int current;
  jmp_buf scheduler;
  FiberStack stack;  // of the thread that runs the scheduler
  std::exception_ptr failure;
  AsyncUnits* units;
};

extern Block* block;

inline Thread& me() { return block->thread[size_t(block->current)]; }
inline int my_rank() { return block->current / block->block_threads; }
inline char* memory_of(int rank) { return static_cast<char*>(block->shared->data()) + size_t(rank) * block->window; }
inline int my_warp() { return block->current / kLanes; }
inline int my_warpgroup() { return block->current / kWarpgroupThreads; }

[[noreturn]] void fail(const std::string& what);

// Suspends the calling thread until wake() makes it runnable.
void wait(const char* call);
inline void wake(int thread) { block->thread[size_t(thread)].state = State::runnable; }

// A collective call: all threads that share the meeting must arrive with the same `call`. The last one runs combine
// over the operands of all.
void meet_all(Meeting& meeting, const char* call, int first_thread, int threads, const char* of_what, void* operands,
              void (*combine)(void* const* all));

// ---------------------------------------------------------------------------------------------------- agents
// Agents (shared_state.h) are numbered: threads, tensor cores by the warps that wait for them, bulk stores, copies.
constexpr int kMaxMbarriers = 32;  // in a cluster; more than any kernel has
inline int tensor_cores_of(int warp) { return block->threads + warp; }
inline int bulk_stores_of(int warp) { return block->threads + block->threads / kLanes + warp; }
inline int copies_of(int mbarrier) { return block->threads + 2 * (block->threads / kLanes) + mbarrier; }
inline int agents_of(int threads) { return threads + 2 * (threads / kLanes) + kMaxMbarriers; }

inline Actor actor_of(int thread) {
  const Thread& t = block->thread[size_t(thread)];
  return {thread, thread / kLanes, t.now, &t.knows, t.all, t.all_of_warp};
}

// Release: `to` learns what `thread` did and knows. Its later accesses get a later time.
inline void release(int thread, Clock& to) {
  Thread& t = block->thread[size_t(thread)];
  t.knows[size_t(thread)] = t.now;
  join(to, t.knows);
  t.now = ++block->time;
}
inline void acquire(int thread, const Clock& from) { join(block->thread[size_t(thread)].knows, from); }

void check_alignment(const char* call, const void* address, size_t alignment);
// Fails if the bytes are in the shared memory of another block than the calling thread's.
void check_own(const char* call, const void* address, size_t bytes);
void check_global(const char* call, const void* address, size_t bytes, bool write);

// The units beside the threads that sm_90 instructions use (async.cpp).
std::unique_ptr<AsyncUnits, void (*)(AsyncUnits*)> make_units();
void new_block(AsyncUnits& units);
void check_thread_end(AsyncUnits& units);  // called by every thread that ends
void check_block_end(AsyncUnits& units);

}  // namespace scaledot::sim
