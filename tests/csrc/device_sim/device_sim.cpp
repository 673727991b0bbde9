// This file uses _longjmp between the fibers' stacks, which glibc's fortified version reports as an error.
#undef _FORTIFY_SOURCE
#include "device_sim/device_sim.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "core/problem.h"
#include "device_sim/block.h"

namespace scaledot::sim {

Block* block = nullptr;
Device device = kDevice;
static int64_t launched = 0;

void fail(const std::string& what) {
  std::ostringstream text;
  text << what << " (thread " << thread_index() << " of block " << block_index() << ")";
  throw Failure(text.str());
}

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kMaxThreads = 1024;           // of a block
constexpr int kMaxCluster = 8;              // blocks of a cluster on every GPU that has clusters
constexpr int64_t kMaxGrid = 0x7fffffff;    // blocks of a grid
constexpr int64_t kWindowAlignment = 1024;  // of a block's shared memory

// ---------------------------------------------------------------------------------------------------- fibers
// A fiber starts on its stack by setcontext. After that, _setjmp and _longjmp switch fibers; unlike swapcontext, they
// make no system call. Functions that return twice are not inlined, to keep them away from their callers' registers.
[[gnu::noinline]] void yield() {
  if (_setjmp(me().resume) == 0) {
    me().stack.leave(block->stack);
    _longjmp(block->scheduler, 1);
  }
  me().stack.arrive(block->stack);
}

void fiber_main() {
  me().stack.arrive(block->stack);
  try {
    (*block->kernel)();
    if (!me().copies.empty()) fail("cp_async: the thread ended without waiting for its copies");
    check_thread_end(*block->units);
  } catch (...) {
    block->failure = std::current_exception();
  }
  me().state = State::done;
  FiberStack::end(block->stack);
  _longjmp(block->scheduler, 1);
}

[[gnu::noinline]] void prepare(Thread& thread, char* stack) {
  thread.stack = FiberStack::fresh(stack, kStackBytes);
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = stack;
  thread.start.uc_stack.ss_size = kStackBytes;
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, fiber_main, 0);
}

[[gnu::noinline]] void resume(Thread& thread) {
  if (_setjmp(block->scheduler) != 0) return block->stack.arrive(thread.stack);
  block->stack.leave(thread.stack);
  if (thread.started) _longjmp(thread.resume, 1);
  thread.started = true;
  setcontext(&thread.start);
}

[[noreturn]] void report_deadlock() {
  std::ostringstream text;
  text << "deadlock in block " << block->index * block->blocks << ":";
  int done = 0;
  for (int t = 0; t < block->threads; ++t) {
    const Thread& thread = block->thread[size_t(t)];
    done += thread.state == State::done;
    const bool first = t == 0 || block->thread[size_t(t - 1)].waits_in != thread.waits_in;
    if (thread.state == State::waiting && first) text << " thread " << t << " waits in " << thread.waits_in << ",";
  }
  text << " " << done << " threads have ended";
  throw Failure(text.str());
}

void run_block() {
  for (int left = block->threads; left > 0;) {
    bool progress = false;
    for (int t = 0; t < block->threads; ++t) {
      Thread& thread = block->thread[size_t(t)];
      if (thread.state != State::runnable) continue;
      progress = true;
      block->current = t;
      resume(thread);
      if (block->failure) std::rethrow_exception(block->failure);
      left -= thread.state == State::done;
    }
    if (!progress) report_deadlock();
  }
}

// A block's memory is gone when its last thread ends. So one of its threads must know of every use by other blocks.
void check_cluster_end() {
  for (int rank = 0; rank < block->blocks; ++rank) {
    const Clock& used = block->remote[size_t(rank)];
    const auto first = block->thread.begin() + rank * block->block_threads;
    for (size_t agent = 0; agent < used.size(); ++agent)
      if (used[agent] > 0 && std::none_of(first, first + block->block_threads,
                                          [&](const Thread& thread) { return thread.knows[agent] >= used[agent]; }))
        throw Failure("cluster_barrier: a block may end before another one has used its shared memory");
  }
}

void check_aligned_end() {
  for (size_t warp = 0; warp < block->aligned.size(); ++warp)
    if (!block->aligned[warp].open.empty())
      throw Failure(std::string(block->aligned[warp].open.front().call) + ": only some lanes of warp " +
                    std::to_string(warp) + " have come to it");
}

char* stacks() {
  static const std::unique_ptr<char[]> memory(new char[kMaxThreads * kStackBytes]);
  return memory.get();
}

// ---------------------------------------------------------------------------------------------------- buffers
struct Buffer {
  const char* begin;
  const char* end;
  bool writable;
};
std::vector<Buffer> buffers;

}  // namespace

void wait(const char* call) {
  me().state = State::waiting;
  me().waits_in = call;
  yield();
}

void meet_all(Meeting& meeting, const char* call, int first_thread, int threads, const char* of_what, void* operands,
              void (*combine)(void* const* all)) {
  if (meeting.arrived > 0 && meeting.call != call)
    fail(std::string(call) + ": other threads of the " + of_what + " wait in " + meeting.call);
  meeting.call = call;
  meeting.operands[block->current - first_thread] = operands;
  if (++meeting.arrived < threads) return wait(call);
  meeting.arrived = 0;
  combine(meeting.operands);
  for (int t = first_thread; t < first_thread + threads; ++t) wake(t);
}

void check_alignment(const char* call, const void* address, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) fail(std::string(call) + ": misaligned address");
}

void check_global(const char* call, const void* address, size_t bytes, bool write) {
  const char* begin = static_cast<const char*>(address);
  for (size_t k = 0; k < buffers.size(); ++k) {
    if (begin < buffers[k].begin || begin + bytes > buffers[k].end) continue;
    if (write && !buffers[k].writable) fail(std::string(call) + ": writes to an input");
    if (k > 0) std::swap(buffers[k], buffers[k - 1]);  // frequently used buffers move to the front
    return;
  }
  fail(std::string(call) + ": global memory out of bounds");
}

void check_own(const char* call, const void* address, size_t bytes) {
  if (block->blocks == 1) return;
  const char* from = static_cast<const char*>(address);
  if (from < memory_of(my_rank()) || from + bytes > memory_of(my_rank()) + block->block_bytes)
    fail(std::string(call) + ": shared memory out of bounds, or of another block");
}

void come_together(const char* call, Place place) {
  AlignedCalls& calls = block->aligned[size_t(my_warp())];
  const size_t index = me().aligned_calls++ - calls.done;
  if (index == calls.open.size()) calls.open.push_back({call, place, 0});
  AlignedCall& with = calls.open[index];
  if (with.call != call || with.place.line != place.line || std::strcmp(with.place.file, place.file) != 0) {
    std::ostringstream text;
    text << call << ": the warp has diverged; line " << place.line << ", while other lanes are at " << with.call
         << ", line " << with.place.line;
    fail(text.str());
  }
  if (++with.lanes < kLanes) return;
  calls.open.pop_front();
  ++calls.done;
}

void register_buffer(const void* data, size_t bytes, bool writable) {
  buffers.push_back({static_cast<const char*>(data), static_cast<const char*>(data) + bytes, writable});
}
void clear_buffers() { buffers.clear(); }

void set_device(Device wanted) { device = wanted; }
int compute_capability() { return device.capability; }
bool has_code() { return device.has_code; }
int64_t launches() { return launched; }

const char* clear_bytes(void* data, int64_t bytes) {
  ++launched;
  const char* begin = static_cast<const char*>(data);
  for (const Buffer& buffer : buffers)
    if (begin >= buffer.begin && begin + bytes <= buffer.end && buffer.writable) {
      std::memset(data, 0, size_t(bytes));
      return nullptr;
    }
  return "clear_bytes: global memory out of bounds";
}

void run_grid(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel) {
  run_clusters(blocks, 1, threads, shared_bytes, kernel);
}

const char* why_no_launch(int64_t blocks, int cluster, int threads, int64_t shared_bytes) {
  if (blocks < 1 || blocks > kMaxGrid) return "launch: not a number of blocks for a grid";
  if (threads < 1 || threads > kMaxThreads) return "launch: not a number of threads for a block";
  if (cluster < 1 || cluster > kMaxCluster) return "launch: not a number of blocks for a cluster";
  if (cluster > 1 && device.capability < 90) return "launch: clusters need compute capability 9.0";
  if (blocks % cluster != 0) return "launch: not a whole number of clusters";
  if (shared_bytes > (device.capability < 90 ? kMaxSharedBytesOfAll : kMaxSharedBytes))
    return "launch: more shared memory than a block can have";
  return nullptr;
}

void run_clusters(int64_t blocks, int cluster, int threads, int64_t shared_bytes, const std::function<void()>& kernel) {
  if (const char* refused = why_no_launch(blocks, cluster, threads, shared_bytes)) throw Failure(refused);
  if (threads % kLanes != 0 || cluster * threads > kMaxThreads)
    throw Failure("launch: that number of threads is not simulated");
  ++launched;
  const int64_t window = cluster == 1 ? shared_bytes : round_up(shared_bytes, kWindowAlignment);
  SharedState shared(cluster * window);
  const auto units = make_units();
  Block one;
  block = &one;
  one.count = blocks, one.blocks = cluster, one.block_threads = threads;
  one.window = size_t(window), one.block_bytes = size_t(shared_bytes);
  one.kernel = &kernel, one.shared = &shared, one.units = units.get();
  threads *= cluster;
  one.threads = threads;
  one.thread.resize(size_t(threads));
  one.time = 0;
  for (int64_t index = 0; index < blocks / cluster; ++index) {
    one.index = index;
    one.warp.assign(size_t(threads / kLanes), Meeting{nullptr, 0, {}});
    one.aligned.assign(size_t(threads / kLanes), AlignedCalls{{}, 0});
    one.warpgroup.assign(size_t(threads / kWarpgroupThreads + 1), Meeting{nullptr, 0, {}});
    const Time begin = one.time++;
    const Clock forgotten(size_t(agents_of(threads)), begin);
    one.barrier.assign(size_t(cluster + 1), ThreadBarrier{0, false, false, nullptr, forgotten});
    one.remote.assign(size_t(cluster), Clock(forgotten.size(), 0));
    shared.new_block(threads, agents_of(threads), begin);
    new_block(*units);
    for (int t = 0; t < threads; ++t) {
      Thread& thread = one.thread[size_t(t)];
      thread.started = false, thread.state = State::runnable, thread.waits_in = nullptr;
      thread.now = one.time, thread.all = thread.all_of_warp = begin;
      thread.knows = forgotten;
      thread.fences.clear();
      thread.copies.clear();
      thread.aligned_calls = 0;
      prepare(thread, stacks() + size_t(t) * kStackBytes);
    }
    run_block();
    check_block_end(*units);
    check_cluster_end();
    check_aligned_end();
  }
  block = nullptr;
}

int thread_index() { return block->current % block->block_threads; }
int64_t block_index() { return block->index * block->blocks + my_rank(); }
int64_t block_count() { return block->count; }
int cluster_rank() { return my_rank(); }
void* shared_memory() { return memory_of(my_rank()); }

// ---------------------------------------------------------------------------------------------------- barriers
namespace {

// `barrier` is one of `threads` threads, from thread `first` on.
bool meet_at(ThreadBarrier& barrier, int first, int threads, const char* call, bool predicate) {
  if (barrier.arrived > 0 && barrier.call != call)
    fail(std::string(call) + ": other threads of the block wait in " + barrier.call);
  barrier.call = call;
  barrier.predicate |= predicate;
  if (++barrier.arrived < threads) {
    wait(call);
  } else {
    barrier.result = barrier.predicate;
    barrier.arrived = 0, barrier.predicate = false;
    for (int t = first; t < first + threads; ++t) {
      join(barrier.knows, block->thread[size_t(t)].knows);
      barrier.knows[size_t(t)] = block->thread[size_t(t)].now;
    }
    const Time done = block->time++;
    for (int t = first; t < first + threads; ++t) {
      Thread& thread = block->thread[size_t(t)];
      thread.state = State::runnable;
      thread.knows = barrier.knows;
      thread.now = block->time;
      thread.all = thread.all_of_warp = done;
    }
  }
  return barrier.result;
}

}  // namespace

bool barrier_or(const char* call, bool predicate) {
  const int threads = block->block_threads;
  return meet_at(block->barrier[size_t(my_rank())], my_rank() * threads, threads, call, predicate);
}

void cluster_barrier(const char* call) { meet_at(block->barrier.back(), 0, block->threads, call, false); }

void warp_collective(const char* call, void* operands, void (*combine)(void* const* all)) {
  const int warp = my_warp();
  meet_all(block->warp[size_t(warp)], call, warp * kLanes, kLanes, "warp", operands, combine);
}

void warp_barrier(const char* call) {
  warp_collective(call, nullptr, [](void* const*) {
    const int first = my_warp() * kLanes;
    Clock known = me().knows;
    for (int t = first; t < first + kLanes; ++t) {
      join(known, block->thread[size_t(t)].knows);
      known[size_t(t)] = block->thread[size_t(t)].now;
    }
    const Time done = block->time++;
    for (int t = first; t < first + kLanes; ++t) {
      Thread& thread = block->thread[size_t(t)];
      thread.knows = known;
      thread.now = block->time;
      thread.all_of_warp = done;
    }
  });
}

// ---------------------------------------------------------------------------------------------------- memory
void read_shared(const char* call, const void* from, size_t bytes, size_t alignment) {
  check_alignment(call, from, alignment);
  check_own(call, from, bytes);
  if (const char* wrong = block->shared->read(from, bytes, actor_of(block->current)))
    fail(std::string(call) + ": " + wrong);
}
void write_shared(const char* call, const void* to, size_t bytes, size_t alignment) {
  check_alignment(call, to, alignment);
  check_own(call, to, bytes);
  if (const char* wrong = block->shared->write(to, bytes, actor_of(block->current)))
    fail(std::string(call) + ": " + wrong);
}
void read_global(const char* call, const void* from, size_t bytes, size_t alignment) {
  check_alignment(call, from, alignment);
  check_global(call, from, bytes, false);
}
void write_global(const char* call, const void* to, size_t bytes, size_t alignment) {
  check_alignment(call, to, alignment);
  check_global(call, to, bytes, true);
}

void cp_async(const char* call, void* to, const void* from, int bytes) {
  check_alignment(call, to, 16);
  check_alignment(call, from, 16);
  if (bytes < 0 || bytes > 16) fail(std::string(call) + ": not a number of bytes to copy");
  check_own(call, to, 16);
  if (const char* wrong = block->shared->begin_copy(to, 16, actor_of(block->current)))
    fail(std::string(call) + ": " + wrong);
  Copy copy = {static_cast<char*>(to), {}};
  if (bytes > 0) {
    check_global(call, from, size_t(bytes), false);
    std::memcpy(copy.data, from, size_t(bytes));
  }
  me().copies.push_back(copy);
}

// Completes the thread's first `count` copies.
static void complete_copies(size_t count) {
  std::vector<Copy>& copies = me().copies;
  for (size_t k = 0; k < count; ++k) {
    block->shared->end_copy(copies[k].to, 16, block->current, me().now);
    std::memcpy(copies[k].to, copies[k].data, 16);
  }
  copies.erase(copies.begin(), copies.begin() + std::ptrdiff_t(count));
}
void cp_async_wait_all() {
  complete_copies(me().copies.size());
  me().last_group = me().open_group = 0;
}
void cp_async_commit() {
  me().last_group = me().open_group;
  me().open_group = me().copies.size();
}
void cp_async_wait_older() {
  complete_copies(me().last_group);
  me().open_group -= me().last_group;
  me().last_group = 0;
}

// ---------------------------------------------------------------------------------------------------- matrices
void ldmatrix_x4(const char* call, uint32_t (&r)[4], const void* row, bool transposed) {
  read_shared(call, row, 16, 16);
  struct Operands {
    uint32_t* r;
    const char* row;
    bool transposed;
  } mine = {r, static_cast<const char*>(row), transposed};
  warp_collective(call, &mine, [](void* const* all) {
    const auto number = [&](int matrix, int i, int j) -> uint32_t {
      uint16_t bits;
      std::memcpy(&bits, static_cast<Operands*>(all[matrix * 8 + i])->row + 2 * j, 2);
      return bits;
    };
    for (int lane = 0; lane < kLanes; ++lane) {
      const Operands& o = *static_cast<Operands*>(all[lane]);
      const int i = lane / 4, j = lane % 4 * 2;
      for (int m = 0; m < 4; ++m)
        o.r[m] =
            o.transposed ? number(m, j, i) | number(m, j + 1, i) << 16 : number(m, i, j) | number(m, i, j + 1) << 16;
    }
  });
}

void mma_m16n8k16(const char* call, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  float (*widen)(uint16_t bits)) {
  struct Operands {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
    float (*widen)(uint16_t bits);
  } mine = {c, a, {b0, b1}, widen};
  warp_collective(call, &mine, [](void* const* all) {
    float x[16][16], y[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Operands& o = *static_cast<Operands*>(all[lane]);
      const int g = lane / 4, t = lane % 4 * 2;
      const auto half = [&](uint32_t pair, int which) { return o.widen(uint16_t(pair >> (16 * which))); };
      for (int k = 0; k < 2; ++k) {
        x[g][t + k] = half(o.a[0], k), x[g + 8][t + k] = half(o.a[1], k);
        x[g][t + 8 + k] = half(o.a[2], k), x[g + 8][t + 8 + k] = half(o.a[3], k);
        y[t + k][g] = half(o.b[0], k), y[t + 8 + k][g] = half(o.b[1], k);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const Operands& o = *static_cast<Operands*>(all[lane]);
      const int g = lane / 4, t = lane % 4 * 2;
      for (int e = 0; e < 4; ++e) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += x[g + e / 2 * 8][k] * y[k][t + e % 2];
        o.c[e] += sum;
      }
    }
  });
}

}  // namespace scaledot::sim
