// Helpers for tests of the simulation's sm_90 instructions: programs with TMA loads, mbarriers and wgmma.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"

namespace scaledot {
namespace {

constexpr int64_t kSharedBytes = 96 * 1024;

// The simulation's error message for a program; "" if it finds no error. Two blocks run, as one cluster or alone.
inline std::string verdict(const std::function<void()>& program, int threads, int cluster) {
  try {
    sim::run_clusters(2, cluster, threads, kSharedBytes, program);
  } catch (const sim::Failure& failure) {
    return failure.what();
  }
  return "";
}
inline void expect_right(const std::function<void()>& program, int threads = 128, int cluster = 1) {
  EXPECT_EQ(verdict(program, threads, cluster), "");
}
// The message must contain `call`, the wrapper, and `what`.
inline void expect_caught(const char* call, const char* what, const std::function<void()>& program, int threads = 128,
                          int cluster = 1) {
  const std::string said = verdict(program, threads, cluster);
  EXPECT_NE(said.find(call), std::string::npos) << "said: " << said;
  EXPECT_NE(said.find(what), std::string::npos) << "said: " << said;
}
// For use in programs.
inline void require(bool holds) {
  if (!holds) throw sim::Failure("wrong value");
}

// Shared memory: panels at the start, mbarriers at the end.
inline char* shared_bytes() { return static_cast<char*>(shared_memory()); }
inline uint64_t* mbarrier(int k) { return reinterpret_cast<uint64_t*>(shared_bytes() + kSharedBytes - 256) + k; }

// Initialises mbarrier(0), mbarrier(1), ... for these numbers of arrivals.
inline void make_mbarriers(std::initializer_list<int> arrivals) {
  if (thread_index() == 0) {
    int k = 0;
    for (int n : arrivals) mbarrier_init(mbarrier(k++), n);
    mbarrier_init_fence();
  }
  barrier();
}

// A rows x cols matrix of small integers, which are exact in bfloat16.
struct Matrix {
  int rows, cols;
  std::vector<BFloat16> data;
  TensorMap map;

  Matrix(int rows_, int cols_, int factor, int box_rows) : rows(rows_), cols(cols_), data(size_t(rows_ * cols_ + 8)) {
    for (int k = 0; k < rows * cols; ++k) narrow(float(k * factor % 31 % 17 - 8), data[size_t(k)]);
    const TensorShape shape = {
        begin(), DType::bfloat16, {cols, rows, 1, 1}, {2, 2 * cols, 16, 16}, {64, box_rows, 1, 1}};
    EXPECT_EQ(encode_tensor_map(map, shape), nullptr);
    sim::register_buffer(begin(), size_t(2 * rows * cols), true);
  }
  BFloat16* begin() { return data.data(); }
  float at(int i, int j) const { return i < rows && j < cols ? widen(data[size_t(i * cols + j)]) : 0.0f; }

  // Thread 0 of the block loads all panels of `box` rows from row `first` on. Returns their bytes.
  int load(char* to, uint64_t* b, int first = 0) const {
    const int panels = (cols + 63) / 64, bytes = panels * map.box[1] * 128;
    if (thread_index() == 0) {
      mbarrier_arrive_expect(b, bytes);
      for (int p = 0; p < panels; ++p) tensor_load(to + p * map.box[1] * 128, map, b, 64 * p, first, 0, 0);
    }
    return bytes;
  }
};

class DeviceSimSm90 : public ::testing::Test {
 protected:
  void TearDown() override { sim::clear_buffers(); }
};

// Requires d = expected(row, column) of the warpgroup's accumulator.
template <int kN, class Expected>
void require_sums(const float (&d)[kN / 2], const Expected& expected) {
  const int w = warp_index() % 4, g = lane_index() / 4, t = lane_index() % 4;
  for (int e = 0; e < kN / 2; ++e) require(d[e] == expected(16 * w + g + 8 * (e / 2 % 2), 8 * (e / 4) + 2 * t + e % 2));
}

}  // namespace
}  // namespace scaledot
