// One block's shared memory, and what is known of every two bytes of it: who wrote and read them last, and when.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace scaledot::sim {

// A thread's time: how many barriers of its block, and of its warp, it has passed. A barrier orders what was before it and what
// comes after, for the threads that share it.
struct Clock {
  int thread;
  uint64_t block;
  uint64_t warp;
};

class SharedState {
 public:
  explicit SharedState(int64_t bytes)
      : bytes_(size_t(bytes)),
        memory_(static_cast<char*>(std::aligned_alloc(128, (bytes_ + 256) / 128 * 128)), &std::free),
        cells_(bytes_ / kCell + 1) {}

  void* data() { return memory_.get(); }

  // Forgets all; returns the time at which the block begins.
  Clock new_block() {
    std::memset(memory_.get(), 0xff, bytes_);  // NaN in every floating type
    begin_ += uint64_t(1) << 32;
    return {0, begin_, 0};
  }

  // Each returns nullptr, or what is wrong.
  const char* read(const void* from, size_t bytes, const Clock& now) {
    if (outside(from, bytes)) return kOutside;
    for (size_t k = first(from); k <= last(from, bytes); ++k) {
      Cell& cell = cells_[k];
      if (cell.write.block < begin_) return "reads shared memory that nobody has written";
      if (cell.copying) return "reads the destination of a copy that was not waited for";
      if (!ordered(cell.write, now)) return "reads what another thread writes, without a barrier between";
      const Access before = cell.read;
      cell.read = {now.thread, now.thread / 32, now.block, now.warp};
      if (before.block != now.block) continue;
      if (before.thread != now.thread) cell.read.thread = kSeveral;
      if (before.warp_index != now.thread / 32) cell.read.warp_index = kSeveral;
    }
    return nullptr;
  }

  const char* write(const void* to, size_t bytes, const Clock& now) {
    if (outside(to, bytes)) return kOutside;
    for (size_t k = first(to); k <= last(to, bytes); ++k) {
      Cell& cell = cells_[k];
      if (cell.copying) return "writes to the destination of a copy that was not waited for";
      if (!ordered(cell.write, now)) return "writes what another thread writes, without a barrier between";
      if (!ordered(cell.read, now)) return "writes what another thread reads, without a barrier between";
      cell.write = {now.thread, now.thread / 32, now.block, now.warp};
    }
    return nullptr;
  }

  const char* begin_copy(const void* to, size_t bytes, const Clock& now) {
    if (const char* wrong = write(to, bytes, now)) return wrong;
    for (size_t k = first(to); k <= last(to, bytes); ++k) cells_[k].copying = true;
    return nullptr;
  }

  void end_copy(const void* to, size_t bytes, const Clock& now) {
    for (size_t k = first(to); k <= last(to, bytes); ++k) {
      cells_[k].copying = false;
      cells_[k].write = {now.thread, now.thread / 32, now.block, now.warp};
    }
  }

 private:
  static constexpr size_t kCell = 2;  // bytes
  static constexpr int kSeveral = -1;
  static constexpr const char* kOutside = "shared memory out of bounds";

  struct Access {
    int thread = kSeveral, warp_index = kSeveral;
    uint64_t block = 0, warp = 0;
  };
  struct Cell {
    Access write, read;
    bool copying = false;
  };

  // Whether what `then` did is done for a thread at `now`.
  static bool ordered(const Access& then, const Clock& now) {
    if (then.block != now.block || then.thread == now.thread) return true;
    return then.warp_index == now.thread / 32 && then.warp < now.warp;
  }

  size_t offset(const void* address) const { return size_t(static_cast<const char*>(address) - memory_.get()); }
  size_t first(const void* address) const { return offset(address) / kCell; }
  size_t last(const void* address, size_t bytes) const { return (offset(address) + bytes - 1) / kCell; }
  bool outside(const void* address, size_t bytes) const {
    const char* from = static_cast<const char*>(address);
    return from < memory_.get() || from + bytes > memory_.get() + bytes_;
  }

  size_t bytes_;
  std::unique_ptr<char, decltype(&std::free)> memory_;
  std::vector<Cell> cells_;
  uint64_t begin_ = 0;
};

}  // namespace scaledot::sim
