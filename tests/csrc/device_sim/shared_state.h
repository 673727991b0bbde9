// The shared memory of one block, with the last write and the last reads of every two bytes of it, to find data races.
//
// An agent is whoever accesses memory: a thread of the block, the tensor cores of a warpgroup, or one of the copy
// engines (one for each mbarrier, one for each warp's bulk stores). Time counts the block's synchronising calls. An
// agent knows up to which time the accesses of each other agent are done, and barriers of all kinds pass this knowledge
// on (vector clocks: Fidge 1988, Mattern 1988; for race detection: Flanagan and Freund, "FastTrack", 2009).
//
// A warp that waits for a product knows that its own part of it is done. So the tensor cores of a warpgroup count as
// four agents, and their accesses as done for an agent that has learned it of all four warps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "device_sim/device_sim.h"

namespace scaledot::sim {

using Time = uint32_t;
using Clock = std::vector<Time>;  // for each agent, the time up to which its accesses are done

inline void join(Clock& clock, const Clock& other) {
  for (size_t agent = 0; agent < clock.size(); ++agent) clock[agent] = std::max(clock[agent], other[agent]);
}
inline void meet(Clock& clock, const Clock& other) {
  for (size_t agent = 0; agent < clock.size(); ++agent) clock[agent] = std::min(clock[agent], other[agent]);
}

// An agent that accesses memory, and what it knows.
struct Actor {
  int agent;
  int warp;  // -1: not a thread
  Time now;
  const Clock* knows;
  Time all, all_of_warp;  // up to here all accesses by the block's threads, or by the warp's, are done
};

class SharedState {
 public:
  static constexpr size_t kCell = 2;  // bytes

  explicit SharedState(int64_t bytes)
      : bytes_(size_t(bytes)),
        memory_(static_cast<char*>(std::aligned_alloc(1024, (bytes_ + 2048) / 1024 * 1024)), &std::free),
        cells_(bytes_ / kCell + 1) {}

  void* data() { return memory_.get(); }
  size_t bytes() const { return bytes_; }

  // Starts a block with `agents` agents. Accesses up to the time `begin` are forgotten.
  void new_block(int threads, int agents, Time begin) {
    std::memset(memory_.get(), 0xff, bytes_);  // NaN in every floating type
    tensor_begin_ = size_t(threads), tensor_end_ = tensor_begin_ + size_t(threads / kLanes);
    agents_ = size_t(agents);
    begin_ = begin;
    every_reader_ = false;
  }

  // From now on keeps the time of every reader of a cell. Otherwise only the last time is kept if there are several
  // readers. That is enough as long as all barriers are those of the whole block or of warps.
  void keep_every_reader() { every_reader_ = true; }

  // Each returns nullptr, or an error message.
  const char* read(const void* from, size_t bytes, const Actor& actor) {
    if (outside(from, bytes)) return kOutside;
    for (size_t k = first(from); k <= last(from, bytes); ++k) {
      Cell& cell = cells_[k];
      if (cell.write.time <= begin_) return "reads shared memory that nobody has written";
      if (cell.copying) return "reads the destination of a copy that was not waited for";
      if (!done(cell.write, actor)) return "reads what another thread writes, without a barrier between";
      add_reader(cell, actor);
    }
    return nullptr;
  }

  const char* why_not_write(const void* to, size_t bytes, const Actor& actor) const {
    if (outside(to, bytes)) return kOutside;
    for (size_t k = first(to); k <= last(to, bytes); ++k) {
      const Cell& cell = cells_[k];
      if (cell.copying) return "writes to the destination of a copy that was not waited for";
      if (!done(cell.write, actor)) return "writes what another thread writes, without a barrier between";
      if (!all_read(cell, actor)) return "writes what another thread reads, without a barrier between";
    }
    return nullptr;
  }

  const char* write(const void* to, size_t bytes, const Actor& actor) {
    if (const char* wrong = why_not_write(to, bytes, actor)) return wrong;
    for (size_t k = first(to); k <= last(to, bytes); ++k) {
      forget_readers(cells_[k]);
      cells_[k].write = {actor.now, int16_t(actor.agent)};
    }
    return nullptr;
  }

  const char* begin_copy(const void* to, size_t bytes, const Actor& actor) {
    if (const char* wrong = write(to, bytes, actor)) return wrong;
    for (size_t k = first(to); k <= last(to, bytes); ++k) cells_[k].copying = true;
    return nullptr;
  }

  // The copied bytes count as written by `agent` at `now`.
  void end_copy(const void* to, size_t bytes, int agent, Time now) {
    for (size_t k = first(to); k <= last(to, bytes); ++k) {
      cells_[k].copying = false;
      cells_[k].write = {now, int16_t(agent)};
    }
  }

  // Calls body(agent, time) for the last writes to these bytes.
  template <class Body>
  void for_each_write(const void* from, size_t bytes, const Body& body) const {
    for (size_t k = first(from); k <= last(from, bytes); ++k)
      if (cells_[k].write.time > begin_) body(cells_[k].write.agent, cells_[k].write.time);
  }
  // Calls body(agent, time) for the last reads of these bytes by each agent since they were written. Needs
  // keep_every_reader().
  template <class Body>
  void for_each_read(const void* from, size_t bytes, const Body& body) const {
    for (size_t k = first(from); k <= last(from, bytes); ++k) {
      const Cell& cell = cells_[k];
      if (cell.last_read <= begin_) continue;
      for (int r = 0; r < cell.readers && cell.readers <= kReaders; ++r) body(cell.read[r].agent, cell.read[r].time);
      if (cell.times < 0) continue;
      const Clock& times = times_[size_t(cell.times)];
      for (size_t agent = 0; agent < times.size(); ++agent)
        if (times[agent] > begin_) body(int(agent), times[agent]);
    }
  }

  size_t offset(const void* address) const { return size_t(static_cast<const char*>(address) - memory_.get()); }
  bool outside(const void* address, size_t bytes) const {
    const char* from = static_cast<const char*>(address);
    return from < memory_.get() || from + bytes > memory_.get() + bytes_;
  }

 private:
  static constexpr int kReaders = 3;
  static constexpr int kSeveral = -1;
  static constexpr const char* kOutside = "shared memory out of bounds";

  struct Access {
    Time time = 0;
    int16_t agent = kSeveral;
  };
  struct Cell {
    Access write;
    Access read[kReaders];     // the readers, if there are at most kReaders
    Time last_read = 0;        // the time of the last read
    int16_t reading_warp = 0;  // the only warp that reads, or kSeveral
    uint8_t readers = 0;       // how many are in `read`; kReaders + 1: too many for it
    bool unit_reads = false;   // whether an agent that is no thread has read; no barrier waits for those
    bool copying = false;
    int32_t times = -1;  // index in times_, if every reader is kept
  };

  // Up to which time the accesses of `agent` are done, as far as the actor knows.
  Time known(size_t agent, const Actor& actor) const {
    const auto first = actor.knows->begin() + std::ptrdiff_t(agent);
    const bool of_warpgroup = agent >= tensor_begin_ && agent < tensor_end_;
    return of_warpgroup ? *std::min_element(first, first + kWarpgroupWarps) : *first;
  }

  bool done(const Access& then, const Actor& actor) const {
    return then.agent == actor.agent || then.agent == kSeveral || known(size_t(then.agent), actor) >= then.time;
  }

  void add_reader(Cell& cell, const Actor& actor) {
    const bool is_first = cell.last_read <= begin_;
    if (is_first) forget_readers(cell);
    cell.reading_warp = int16_t(is_first || cell.reading_warp == actor.warp ? actor.warp : kSeveral);
    cell.last_read = std::max(cell.last_read, actor.now);
    cell.unit_reads |= actor.warp < 0;
    if (cell.readers <= kReaders) {
      int kept = 0;  // keeps the readers that are not ordered before this one, and threads, which may need a fence
      for (int k = 0; k < cell.readers; ++k) {
        const bool is_other_thread = cell.read[k].agent != actor.agent && size_t(cell.read[k].agent) < tensor_begin_;
        if (!done(cell.read[k], actor) || (every_reader_ && is_other_thread)) cell.read[kept++] = cell.read[k];
      }
      if (kept < kReaders) {
        cell.read[kept] = {actor.now, int16_t(actor.agent)};
        cell.readers = uint8_t(kept + 1);
        return;
      }
      cell.readers = kReaders + 1;
      if (every_reader_) {
        cell.times = int32_t(take_times());
        for (const Access& read : cell.read) times_[size_t(cell.times)][size_t(read.agent)] = read.time;
      }
    }
    if (cell.times >= 0) times_[size_t(cell.times)][size_t(actor.agent)] = actor.now;
  }

  bool all_read(const Cell& cell, const Actor& actor) const {
    if (cell.last_read <= begin_ || (!cell.unit_reads && actor.all >= cell.last_read)) return true;
    if (cell.readers <= kReaders) {
      for (int k = 0; k < cell.readers; ++k)
        if (!done(cell.read[k], actor)) return false;
      return true;
    }
    if (cell.reading_warp == actor.warp && actor.all_of_warp >= cell.last_read) return true;
    if (cell.times < 0) return false;
    const Clock& times = times_[size_t(cell.times)];
    for (size_t agent = 0; agent < times.size(); ++agent)
      if (times[agent] > begin_ && times[agent] > known(agent, actor) && int(agent) != actor.agent) return false;
    return true;
  }

  void forget_readers(Cell& cell) {
    if (cell.times >= 0) free_times_.push_back(size_t(cell.times));
    cell.times = -1;
    cell.readers = 0;
    cell.unit_reads = false;
    cell.last_read = 0;
  }

  size_t take_times() {
    if (free_times_.empty()) {
      times_.emplace_back(agents_, 0);
      return times_.size() - 1;
    }
    const size_t index = free_times_.back();
    free_times_.pop_back();
    times_[index].assign(agents_, 0);
    return index;
  }

  size_t first(const void* address) const { return offset(address) / kCell; }
  size_t last(const void* address, size_t bytes) const { return (offset(address) + bytes - 1) / kCell; }

  size_t bytes_, agents_ = 0;
  size_t tensor_begin_ = 0, tensor_end_ = 0;  // agents that are tensor cores, the first of each four for a warpgroup
  std::unique_ptr<char, decltype(&std::free)> memory_;
  std::vector<Cell> cells_;
  Time begin_ = 0;
  bool every_reader_ = false;
  std::vector<Clock> times_;
  std::vector<size_t> free_times_;
};

}  // namespace scaledot::sim
