// Barriers and copy engines of sm_90: mbarriers, named barriers, TMA, bulk copies.
#include "device_sim/async.h"

#include <cstring>

namespace scaledot::sim {
namespace {

constexpr int64_t kSwizzledRowBytes = 128;

[[noreturn]] void fail(const char* call, const char* what) { sim::fail(std::string(call) + ": " + what); }

void check(const char* call, const char* wrong) {
  if (wrong) fail(call, wrong);
}

int index_of(const char* call, const uint64_t* address) {
  const std::vector<Mbarrier>& all = block->units->mbarriers;
  for (size_t k = 0; k < all.size(); ++k)
    if (all[k].address == address) return int(k);
  fail(call, "no mbarrier was initialised here");
}

// The object at the same place in the shared memory of the block of that rank. The calling thread uses it, so that
// block must not end earlier.
template <class T>
T* in_block(T* address, int rank) {
  if (rank == my_rank()) return address;
  block->remote[size_t(rank)][size_t(block->current)] = me().now;
  const auto place = reinterpret_cast<const char*>(address) - memory_of(my_rank());
  return reinterpret_cast<T*>(memory_of(rank) + place);
}

// A thread's use of an mbarrier. Like a read, it must be ordered after the initialisation.
Mbarrier& use(const char* call, uint64_t* address) {
  const int index = index_of(call, address);
  check(call, block->shared->read(address, 8, actor_of(block->current)));
  return block->units->mbarriers[size_t(index)];
}

void complete_if_over(Mbarrier& b, int index) {
  if (b.missing > 0 || b.bytes != 0) return;
  join(b.completed, b.arrived);
  b.completed[size_t(copies_of(index))] = block->time;
  ++b.phase;
  b.missing = b.arrivals;
  for (int t : b.waiting) wake(t);
  b.waiting.clear();
}

// ---------------------------------------------------------------------------------------------------- boxes
// The address of byte `byte` of row `row` of a box. In rows of 128 bytes, bits 7 to 9 of the address are xor-ed into
// bits 4 to 6 (PTX ISA, "128B swizzle mode").
char* place_in_box(char* box, int64_t row_bytes, int64_t row, int64_t byte) {
  const size_t plain = block->shared->offset(box) + size_t(row * row_bytes + byte);
  const size_t swizzled = row_bytes == kSwizzledRowBytes ? plain ^ ((plain >> 7 & 7) << 4) : plain;
  return static_cast<char*>(block->shared->data()) + swizzled;
}

int64_t box_bytes(const TensorMap& m) { return int64_t(2) * m.box[0] * m.box[1] * m.box[2] * m.box[3]; }

void check_box(const char* call, const TensorMap& m, const void* shared) {
  check_alignment(call, shared, m.box[0] * 2 == kSwizzledRowBytes ? 1024 : 128);
  if (block->shared->outside(shared, size_t(box_bytes(m)))) fail(call, "shared memory out of bounds");
}

// For every 16 bytes of the box, calls body(address in shared memory, address in the tensor, bytes inside the tensor).
template <class Body>
void for_each_chunk(const TensorMap& m, char* shared, const int32_t (&at)[4], const Body& body) {
  const int64_t row_bytes = int64_t(2) * m.box[0];
  int64_t row = 0;
  for (int64_t l = at[3]; l < at[3] + m.box[3]; ++l)
    for (int64_t k = at[2]; k < at[2] + m.box[2]; ++k)
      for (int64_t j = at[1]; j < at[1] + m.box[1]; ++j, ++row) {
        const bool there = l >= 0 && l < m.size[3] && k >= 0 && k < m.size[2] && j >= 0 && j < m.size[1];
        const char* from =
            static_cast<const char*>(m.data) + j * m.stride[1] + k * m.stride[2] + l * m.stride[3] + 2 * at[0];
        for (int64_t byte = 0; byte < row_bytes; byte += 16) {
          const int64_t col = at[0] + byte / 2;
          const int64_t count = there && col >= 0 ? std::clamp<int64_t>(m.size[0] - col, 0, 8) : 0;
          body(place_in_box(shared, row_bytes, row, byte), const_cast<char*>(from) + byte, size_t(2 * count));
        }
      }
}

void deliver(const Load& load) {
  const size_t bytes = load.map.data ? size_t(box_bytes(load.map)) : size_t(load.bytes);
  const Time now = ++block->time;
  block->shared->end_copy(load.to, bytes, copies_of(load.mbarrier), now);
  if (load.map.data) {
    for_each_chunk(load.map, load.to, load.at, [&](char* to, const char* from, size_t there) {
      std::memset(to, 0, 16);
      if (there == 0) return;
      check_global(load.call, from, there, false);
      std::memcpy(to, from, there);
    });
  } else {
    check_global(load.call, load.from, bytes, false);
    std::memcpy(load.to, load.from, bytes);
  }
  block->units->mbarriers[size_t(load.mbarrier)].bytes -= int64_t(bytes);
}

void start(Load load, uint64_t* mbarrier, size_t bytes) {
  load.mbarrier = index_of(load.call, mbarrier);
  check_fenced(load.call, mbarrier, 8, actor_of(block->current));
  check(load.call, block->shared->why_not_write(load.to, bytes, actor_of(block->current)));
  check_overwritten(load.call, load.to, bytes, actor_of(block->current));
  check(load.call, block->shared->begin_copy(load.to, bytes, actor_of(block->current)));
  block->units->loads.push_back(load);
  // Threads that already wait for the mbarrier wake up to deliver the copy.
  Mbarrier& barrier = block->units->mbarriers[size_t(load.mbarrier)];
  for (int t : barrier.waiting) wake(t);
  barrier.waiting.clear();
}

BulkStores& stores_of_thread(const char* call) {
  BulkStores& stores = block->units->stores[size_t(my_warp())];
  if (stores.thread >= 0 && stores.thread != block->current)
    fail(call, "another thread of the warp issued bulk stores, which is not simulated");
  stores.thread = block->current;
  return stores;
}

// The actor that now reads for a bulk store of this thread.
Actor storing_actor(const char* call) {
  Actor actor = actor_of(block->current);
  actor.agent = bulk_stores_of(my_warp());
  actor.warp = -1;
  stores_of_thread(call).last = actor.now = ++block->time;
  return actor;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- the block
std::unique_ptr<AsyncUnits, void (*)(AsyncUnits*)> make_units() {
  return {new AsyncUnits, [](AsyncUnits* units) { delete units; }};
}

void new_block(AsyncUnits& units) {
  units.mbarriers.clear();
  units.loads.clear();
  units.named.assign(size_t(block->blocks * kNamedBarriers),
                     NamedBarrier{0, 0, nullptr, Clock(size_t(agents_of(block->threads)), 0), {}});
  units.stores.assign(size_t(block->threads / kLanes), BulkStores{-1, 0, {}});
  units.tensor_cores.assign(size_t(block->threads / kWarpgroupThreads + 1), TensorCores{});
}

void check_thread_end(AsyncUnits& units) {
  const BulkStores& stores = units.stores[size_t(my_warp())];
  if (stores.thread == block->current && (stores.last > 0 || !stores.pending.empty()))
    sim::fail("bulk_wait: the thread ended without waiting for its bulk stores");
  check_tensor_cores_end(units.tensor_cores[size_t(my_warpgroup())]);
}

void check_block_end(AsyncUnits& units) {
  if (units.mbarriers.empty() && block->block_bytes > size_t(kMaxSharedBytesOfAll))
    sim::fail("launch: more shared memory than a block can have on every GPU");
  if (!units.loads.empty()) fail(units.loads[0].call, "the block ended with a copy that nobody waited for");
  int registers = 0;
  for (const TensorCores& cores : units.tensor_cores) registers += cores.registers * kWarpgroupThreads;
  if (registers > 65536 * block->blocks)
    sim::fail("set_max_registers: the warpgroups take more registers than there are");
}

// ---------------------------------------------------------------------------------------------------- fences
void fence_async() {
  me().fences.push_back(me().now);
  me().now = ++block->time;
}

namespace {

// Whether a thread's access at `time` is followed by a fence_async of that thread that `actor` knows of. Accesses of
// the units beside the threads need none.
bool is_fenced(int agent, Time time, const Actor& actor) {
  if (agent < 0 || agent >= block->threads) return true;
  const Time known = agent == actor.agent ? actor.now : (*actor.knows)[size_t(agent)];
  const std::vector<Time>& fences = block->thread[size_t(agent)].fences;
  const auto after = std::upper_bound(fences.begin(), fences.end(), known);
  return after != fences.begin() && *(after - 1) >= time;
}

}  // namespace

void check_fenced(const char* call, const void* from, size_t bytes, const Actor& actor) {
  block->shared->for_each_write(from, bytes, [&](int agent, Time time) {
    if (!is_fenced(agent, time, actor)) fail(call, "reads what a thread has written without a fence_async after it");
  });
}

void check_overwritten(const char* call, const void* to, size_t bytes, const Actor& actor) {
  block->shared->for_each_read(to, bytes, [&](int agent, Time time) {
    if (!is_fenced(agent, time, actor)) fail(call, "overwrites what a thread has read without a fence_async after it");
  });
  block->shared->for_each_write(to, bytes, [&](int agent, Time time) {
    if (!is_fenced(agent, time, actor))
      fail(call, "overwrites what a thread has written without a fence_async after it");
  });
}

void read_async(const char* call, const void* from, size_t bytes, const Actor& actor) {
  check(call, block->shared->read(from, bytes, actor));
  check_fenced(call, from, bytes, actor);
}

// ---------------------------------------------------------------------------------------------------- mbarriers
void mbarrier_init(const char* call, uint64_t* address, int arrivals) {
  write_shared(call, address, 8, 8);
  std::vector<Mbarrier>& all = block->units->mbarriers;
  for (const Mbarrier& b : all)
    if (b.address == address) fail(call, "this mbarrier was initialised before");
  if (int(all.size()) == kMaxMbarriers) fail(call, "more mbarriers than are simulated");
  if (arrivals < 1) fail(call, "not a number of arrivals");
  *address = 0;
  const Clock none(size_t(agents_of(block->threads)), 0);
  all.push_back({address, arrivals, arrivals, 0, 0, none, none, {}});
  block->shared->keep_every_reader();
}

void mbarrier_arrive(const char* call, uint64_t* address, int bytes) {
  check_own(call, address, 8);
  Mbarrier& b = use(call, address);
  b.bytes += bytes;
  --b.missing;
  release(block->current, b.arrived);
  complete_if_over(b, index_of(call, address));
}

void mbarrier_arrive_at(const char* call, uint64_t* address, int rank) {
  check_own(call, address, 8);
  if (rank < 0 || rank >= block->blocks) fail(call, "no such block in the cluster");
  uint64_t* there = in_block(address, rank);
  Mbarrier& b = use(call, there);
  --b.missing;
  release(block->current, b.arrived);
  complete_if_over(b, index_of(call, there));
}

void mbarrier_wait(const char* call, uint64_t* address, int parity) {
  check_own(call, address, 8);
  const int index = index_of(call, address);
  use(call, address);
  // `mbarriers` may grow while this thread waits, so it holds no reference.
  const auto barrier = [&]() -> Mbarrier& { return block->units->mbarriers[size_t(index)]; };
  while (int(barrier().phase & 1) == parity) {
    std::vector<Load>& loads = block->units->loads;
    const uint64_t phase = barrier().phase;
    for (size_t k = 0; k < loads.size();) {
      if (loads[k].mbarrier != index) {
        ++k;
        continue;
      }
      const Load load = loads[k];
      loads.erase(loads.begin() + std::ptrdiff_t(k));
      deliver(load);
    }
    complete_if_over(barrier(), index);
    if (barrier().phase != phase) continue;
    barrier().waiting.push_back(block->current);
    wait(call);
  }
  acquire(block->current, barrier().completed);
}

// ---------------------------------------------------------------------------------------------------- other barriers
void named_barrier(const char* call, int id, int threads, bool waits) {
  if (id < 1 || id > 15) fail(call, "named barriers are 1 to 15; 0 is that of the block");
  NamedBarrier& b = block->units->named[size_t(my_rank() * kNamedBarriers + id)];
  if (threads % kLanes != 0 || threads > block->block_threads) fail(call, "not a number of threads for a barrier");
  if (b.arrived > 0 && b.expected != threads) fail(call, "the other threads count on another number of threads");
  block->shared->keep_every_reader();
  b.expected = threads, b.call = call;
  release(block->current, b.knows);
  if (waits) b.waiting.push_back(block->current);
  if (++b.arrived == threads) {
    b.arrived = 0;
    const std::vector<int> waiting = std::move(b.waiting);
    b.waiting.clear();
    for (int t : waiting) {
      acquire(t, b.knows);
      wake(t);
    }
    std::fill(b.knows.begin(), b.knows.end(), 0);
  } else if (waits) {
    wait(call);
  }
}

void set_max_registers(const char* call, int registers) {
  if (registers < 24 || registers > 256 || registers % 8 != 0) fail(call, "not a number of registers");
  warp_collective(call, nullptr, [](void* const*) {});
  block->units->tensor_cores[size_t(my_warpgroup())].registers = registers;
}

// ---------------------------------------------------------------------------------------------------- copies
void tensor_load(const char* call, void* to, const TensorMap& map, uint64_t* mbarrier, const int32_t (&at)[4]) {
  tensor_load_to_all(call, to, map, mbarrier, at, 1u << my_rank());
}

void tensor_load_to_all(const char* call, void* to, const TensorMap& map, uint64_t* mbarrier, const int32_t (&at)[4],
                        unsigned blocks) {
  check_box(call, map, to);
  check_own(call, to, size_t(box_bytes(map)));
  check_own(call, mbarrier, 8);
  if (blocks == 0 || blocks >> block->blocks != 0) fail(call, "no such block in the cluster");
  for (int rank = 0; rank < block->blocks; ++rank)
    if (blocks >> rank & 1) {
      Load load = {call, 0, in_block(static_cast<char*>(to), rank), map, {at[0], at[1], at[2], at[3]}, nullptr, 0};
      start(load, in_block(mbarrier, rank), size_t(box_bytes(map)));
    }
}

void bulk_load(const char* call, void* to, const void* from, int bytes, uint64_t* mbarrier) {
  check_alignment(call, to, 16);
  check_alignment(call, from, 16);
  if (bytes % 16 != 0) fail(call, "not a multiple of 16 bytes");
  check_own(call, to, size_t(bytes));
  Load load = {call, 0, static_cast<char*>(to), {}, {}, static_cast<const char*>(from), bytes};
  start(load, mbarrier, size_t(bytes));
}

void tensor_store(const char* call, const TensorMap& map, const void* from, const int32_t (&at)[4]) {
  check_box(call, map, from);
  const Actor actor = storing_actor(call);
  for_each_chunk(map, static_cast<char*>(const_cast<void*>(from)), at, [&](char* shared, char* to, size_t there) {
    if (there == 0) return;
    read_async(call, shared, there, actor);
    check_global(call, to, there, true);
    std::memcpy(to, shared, there);
  });
}

static void check_bulk_store(const char* call, const float* to, const float* from, int bytes) {
  check_alignment(call, to, 16);
  check_alignment(call, from, 16);
  if (bytes % 16 != 0 || bytes < 16) fail(call, "not a multiple of 16 bytes");
  if (block->shared->outside(from, size_t(bytes))) fail(call, "shared memory out of bounds");
  read_async(call, from, size_t(bytes), storing_actor(call));
  check_global(call, to, size_t(bytes), true);
}

void bulk_store(const char* call, float* to, const float* from, int bytes) {
  check_bulk_store(call, to, from, bytes);
  std::memcpy(to, from, size_t(bytes));
}

void bulk_reduce_add(const char* call, float* to, const float* from, int bytes) {
  check_bulk_store(call, to, from, bytes);
  for (int k = 0; k < bytes / 4; ++k) to[k] += from[k];
}

void bulk_commit(const char* call) {
  BulkStores& stores = stores_of_thread(call);
  stores.pending.push_back(stores.last);
  stores.last = 0;
}

void bulk_wait(const char* call, int pending) {
  BulkStores& stores = stores_of_thread(call);
  if (stores.last > 0) fail(call, "bulk stores were not committed");
  while (int(stores.pending.size()) > pending) {
    Time& known = me().knows[size_t(bulk_stores_of(my_warp()))];
    known = std::max(known, stores.pending.front());
    stores.pending.pop_front();
  }
}

int atomic_add(const char* call, int* to, int x) {
  check_alignment(call, to, sizeof(int));
  check_global(call, to, sizeof(int), true);
  const int before = *to;
  *to += x;
  return before;
}

}  // namespace scaledot::sim
