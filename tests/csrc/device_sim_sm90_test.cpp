// What the simulation of device_sim/ says of sm_90's instructions: right programs against plain loops, wrong ones by name.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/ptx/memory.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"

namespace scaledot {
namespace {

constexpr int64_t kSharedBytes = 96 * 1024;

std::string verdict(const std::function<void()>& program, int threads) {
  try {
    sim::run_grid(2, threads, kSharedBytes, program);
  } catch (const sim::Failure& failure) {
    return failure.what();
  }
  return "";
}
void expect_right(const std::function<void()>& program, int threads = 128) { EXPECT_EQ(verdict(program, threads), ""); }
void expect_caught(const char* call, const char* what, const std::function<void()>& program, int threads = 128) {
  const std::string said = verdict(program, threads);
  EXPECT_NE(said.find(call), std::string::npos) << "said: " << said;
  EXPECT_NE(said.find(what), std::string::npos) << "said: " << said;
}
void require(bool holds) {
  if (!holds) throw sim::Failure("wrong value");
}

// Shared memory: panels from the start, mbarriers at the end.
char* shared_bytes() { return static_cast<char*>(shared_memory()); }
uint64_t* mbarrier(int k) { return reinterpret_cast<uint64_t*>(shared_bytes() + kSharedBytes - 256) + k; }

void make_mbarriers(std::initializer_list<int> arrivals) {
  if (thread_index() == 0) {
    int k = 0;
    for (int n : arrivals) mbarrier_init(mbarrier(k++), n);
    mbarrier_init_fence();
  }
  barrier();
}

// rows x cols of small numbers that are exact in bfloat16.
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

  // All panels of `box` rows from row `first` on, by thread 0 of the block.
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

template <int kN, class Expected>
void require_sums(const float (&d)[kN / 2], const Expected& expected) {
  const int w = warp_index() % 4, g = lane_index() / 4, t = lane_index() % 4;
  for (int e = 0; e < kN / 2; ++e) require(d[e] == expected(16 * w + g + 8 * (e / 2 % 2), 8 * (e / 4) + 2 * t + e % 2));
}

// ---------------------------------------------------------------------------------------------------- products
// a b^T, both K-major: the scores of attention. Ragged: rows and columns that are not there count as 0.
template <int kN>
void expect_scores(int depth, int rows, int cols) {
  const Matrix a(rows, depth, 3, 64), b(cols, depth, 5, kN);
  expect_right([&] {
    make_mbarriers({1, 1});
    char* place_b = shared_bytes() + a.load(shared_bytes(), mbarrier(0));
    b.load(place_b, mbarrier(1));
    mbarrier_wait(mbarrier(0), 0);
    mbarrier_wait(mbarrier(1), 0);
    float d[kN / 2];
    wgmma_fence();
    for (int k = 0; k < depth; k += 16) {
      const int panel = k / 64, within = k % 64 * 2;
      wgmma<kN, Major::k, Major::k>(d, operand_at(operand_k(shared_bytes()), panel * 64 * 128 + within),
                                    operand_at(operand_k(place_b), panel * kN * 128 + within), k > 0, Type<BFloat16>{});
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    require_sums<kN>(d, [&](int i, int j) {
      float sum = 0;
      for (int k = 0; k < depth; ++k) sum += a.at(i, k) * b.at(j, k);
      return sum;
    });
  });
}
TEST_F(DeviceSimSm90, BothOperandsKMajor) {
  expect_scores<64>(64, 64, 64);
  expect_scores<128>(128, 64, 128);
  expect_scores<80>(72, 50, 77);
}

// a b, b MN-major over two panels: the weights times the values. a from registers, as the sums of a product hold it.
TEST_F(DeviceSimSm90, RegistersTimesMnMajor) {
  const Matrix b(48, 128, 5, 48);
  const auto a = [](int i, int k) { return float((3 * i + 7 * k) % 13 - 6); };
  expect_right([&] {
    make_mbarriers({1});
    b.load(shared_bytes(), mbarrier(0));
    mbarrier_wait(mbarrier(0), 0);
    const int w = warp_index() % 4, g = lane_index() / 4, t = lane_index() % 4;
    uint32_t x[3][4];
    for (int k = 0; k < 3; ++k)
      for (int r = 0; r < 4; ++r) {
        const int i = 16 * w + g + 8 * (r % 2), col = 16 * k + 2 * t + 8 * (r / 2);
        BFloat16 low, high;
        narrow(a(i, col), low), narrow(a(i, col + 1), high);
        x[k][r] = uint32_t(low.bits) | uint32_t(high.bits) << 16;
      }
    float d[64] = {};
    wgmma_fence();
    for (int k = 0; k < 3; ++k)
      wgmma<128, Major::mn>(d, x[k], operand_at(operand_mn(shared_bytes(), 48 * 128), k * 16 * 128), true,
                            Type<BFloat16>{});
    wgmma_commit();
    wgmma_wait<0>();
    require_sums<128>(d, [&](int i, int j) {
      float sum = 0;
      for (int k = 0; k < 48; ++k) sum += a(i, k) * b.at(k, j);
      return sum;
    });
  });
}

// a^T b, both MN-major: the gradient of the keys.
TEST_F(DeviceSimSm90, BothOperandsMnMajor) {
  const Matrix a(32, 128, 3, 32), b(32, 64, 5, 32);
  expect_right([&] {
    make_mbarriers({1, 1});
    char* place_b = shared_bytes() + a.load(shared_bytes(), mbarrier(0));
    b.load(place_b, mbarrier(1));
    mbarrier_wait(mbarrier(0), 0);
    mbarrier_wait(mbarrier(1), 0);
    float d[2][32];
    wgmma_fence();
    for (int half = 0; half < 2; ++half)  // 64 columns of a each
      for (int k = 0; k < 32; k += 16)
        wgmma<64, Major::mn, Major::mn>(d[half],
                                        operand_at(operand_mn(shared_bytes() + half * 32 * 128, 32 * 128), k * 128),
                                        operand_at(operand_mn(place_b, 32 * 128), k * 128), k > 0, Type<BFloat16>{});
    wgmma_commit();
    wgmma_wait<0>();
    for (int half = 0; half < 2; ++half)
      require_sums<64>(d[half], [&](int i, int j) {
        float sum = 0;
        for (int k = 0; k < 32; ++k) sum += a.at(k, 64 * half + i) * b.at(k, j);
        return sum;
      });
  });
}

// ---------------------------------------------------------------------------------------------------- copies
TEST_F(DeviceSimSm90, ABoxIsSwizzledAndFilledWithZeros) {
  const Matrix a(20, 72, 3, 16);
  expect_right([&] {
    make_mbarriers({1});
    a.load(shared_bytes(), mbarrier(0), 8);
    mbarrier_wait(mbarrier(0), 0);
    for (int i = warp_index(); i < 16; i += 4)
      for (int j = lane_index(); j < 128; j += 32) {
        const auto* x =
            reinterpret_cast<const BFloat16*>(shared_bytes() + j / 64 * 16 * 128 + swizzled_byte(i, j % 64 * 2));
        require(widen(shared_load(x)) == a.at(8 + i, j));
      }
  });
}

TEST_F(DeviceSimSm90, AStoreLeavesOutWhatIsNotThere) {
  Matrix a(20, 72, 3, 16);
  const std::vector<BFloat16> before = a.data;
  expect_right([&] {
    for (int k = thread_index(); k < 16 * 64; k += 128) {
      BFloat16 x;
      narrow(float(k % 64 + k / 64), x);
      shared_store(reinterpret_cast<BFloat16*>(shared_bytes() + swizzled_byte(k / 64, k % 64 * 2)), x);
    }
    fence_async();
    barrier();
    if (thread_index() == 0) {
      tensor_store(a.map, shared_bytes(), 64, 8, 0, 0);
      bulk_commit();
      bulk_wait_read<0>();
    }
  });
  for (int i = 0; i < 20; ++i)
    for (int j = 0; j < 72; ++j)
      EXPECT_EQ(a.at(i, j), i >= 8 && j >= 64 ? float(i - 8 + j - 64) : widen(before[size_t(i * 72 + j)]));
}

TEST_F(DeviceSimSm90, BulkCopiesAndSums) {
  alignas(16) static float source[64], sums[64];
  for (int k = 0; k < 64; ++k) source[k] = float(k), sums[k] = 100;
  sim::register_buffer(source, sizeof(source), false);
  sim::register_buffer(sums, sizeof(sums), true);
  const auto program = [&] {
    make_mbarriers({1});
    if (thread_index() != 0) return;
    mbarrier_arrive_expect(mbarrier(0), 256);
    bulk_load(shared_bytes(), source, 256, mbarrier(0));
    mbarrier_wait(mbarrier(0), 0);
    bulk_reduce_add(sums, reinterpret_cast<float*>(shared_bytes()), 256);
    bulk_commit();
    bulk_wait<0>();
  };
  expect_right(program);
  for (int k = 0; k < 64; ++k) EXPECT_EQ(sums[k], 100 + 2 * k);  // two blocks
  expect_caught("bulk_load", "misaligned", [&] {
    make_mbarriers({1});
    if (thread_index() == 0) bulk_load(shared_bytes() + 8, source, 16, mbarrier(0));
  });
  expect_caught("bulk_reduce_add", "out of bounds", [&] {
    shared_store(reinterpret_cast<float*>(shared_bytes()) + thread_index(), 1.0f);
    fence_async();
    barrier();
    if (thread_index() == 0) bulk_reduce_add(sums + 60, reinterpret_cast<float*>(shared_bytes()), 32);
  });
}

TEST_F(DeviceSimSm90, StmatrixIsLdmatrixTheOtherWay) {
  for (const bool transposed : {false, true})
    expect_right([&] {
      const int lane = lane_index(), g = lane / 4, t = 2 * (lane % 4);
      const auto number = [](int m, int i, int j) { return uint32_t(m * 100 + i * 10 + j); };
      uint32_t r[4];
      for (int m = 0; m < 4; ++m)
        r[m] = transposed ? number(m, t, g) | number(m, t + 1, g) << 16 : number(m, g, t) | number(m, g, t + 1) << 16;
      auto* base = reinterpret_cast<uint16_t*>(shared_bytes()) + warp_index() * 256;
      if (transposed)
        stmatrix_x4_trans(base + lane * 8, r);
      else
        stmatrix_x4(base + lane * 8, r);
      warp_barrier();
      for (int k = lane; k < 256; k += 32) require(shared_load(base + k) == number(k / 64, k / 8 % 8, k % 8));
    });
}

// ---------------------------------------------------------------------------------------------------- wrong programs
// One warpgroup loads into two stages, another one reads them; what `flaw` names is left out.
enum Flaw {
  kNone,
  kNoFull,
  kNoEmpty,
  kNoFenceBeforeWgmma,
  kNoWait,
  kTooFewArrivals,
  kTooManyBytes,
  kSumsTouched,
  kOperandTouched
};
void pipeline(const Matrix& a, Flaw flaw) {
  constexpr int kStages = 2, kTiles = 5, kBytes = 64 * 128;
  make_mbarriers({1, 1, 4, 4});
  if (warpgroup_index() == 0) {
    give_registers<24>();
    if (thread_index() != 0) return;
    for (int n = 0; n < kTiles; ++n) {
      uint64_t *full = mbarrier(n % kStages), *empty = mbarrier(kStages + n % kStages);
      if (flaw != kNoEmpty) mbarrier_wait(empty, (n / kStages & 1) ^ 1);
      mbarrier_arrive_expect(full, flaw == kTooManyBytes ? 2 * kBytes : kBytes);
      tensor_load(shared_bytes() + n % kStages * kBytes, a.map, full, 0, 0, 0, 0);
    }
    return;
  }
  take_registers<240>();
  uint32_t x[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};  // ones
  float d[32] = {};
  for (int n = 0; n < kTiles; ++n) {
    const int stage = n % kStages;
    if (flaw != kNoFull) mbarrier_wait(mbarrier(stage), n / kStages & 1);
    if (flaw != kNoFenceBeforeWgmma) wgmma_fence();
    wgmma<64, Major::mn>(d, x, operand_mn(shared_bytes() + stage * kBytes, kBytes), true, Type<BFloat16>{});
    wgmma_commit();
    if (flaw == kSumsTouched) d[3] = 0;
    if (flaw == kOperandTouched) x[1] = 0;
    if (flaw != kNoWait) wgmma_wait<0>();
    if (lane_index() == 0 && !(flaw == kTooFewArrivals && warp_index() == 7))
      mbarrier_arrive(mbarrier(kStages + stage));
  }
  wgmma_wait<0>();
  require_sums<64>(d, [&](int, int j) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += a.at(k, j);
    return kTiles * sum;
  });
}

TEST_F(DeviceSimSm90, APipeline) {
  const Matrix a(64, 64, 3, 64);
  const auto with = [&](Flaw flaw) { return [&a, flaw] { pipeline(a, flaw); }; };
  expect_right(with(kNone), 256);
  expect_caught("wgmma", "not waited for", with(kNoFull), 256);
  expect_caught("tensor_load", "not waited for", with(kNoEmpty), 256);
  expect_caught("wgmma", "no wgmma_fence", with(kNoFenceBeforeWgmma), 256);
  expect_caught("tensor_load", "what another thread reads", with(kNoWait), 256);
  expect_caught("mbarrier_wait", "deadlock", with(kTooFewArrivals), 256);
  expect_caught("mbarrier_wait", "deadlock", with(kTooManyBytes), 256);
  expect_caught("wgmma_wait", "sums were written", with(kSumsTouched), 256);
  expect_caught("wgmma_wait", "was changed", with(kOperandTouched), 256);
}

TEST_F(DeviceSimSm90, WhatThreadsWroteNeedsAFence) {
  const auto program = [](bool fence, bool bar) {
    return [=] {
      for (int k = thread_index(); k < 64 * 64; k += 128)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + k, BFloat16{0x3f80});
      if (fence) fence_async();
      if (bar) named_barrier_wait(3, 128);
      float d[32];
      wgmma_fence();
      wgmma<64, Major::k, Major::k>(d, operand_k(shared_bytes()), operand_k(shared_bytes()), false, Type<BFloat16>{});
      wgmma_commit();
      wgmma_wait<0>();
      require_sums<64>(d, [](int, int) { return 16.0f; });
    };
  };
  expect_right(program(true, true));
  expect_caught("wgmma", "without a fence_async", program(false, true));
  expect_caught("wgmma", "without a barrier", program(true, false));
}

TEST_F(DeviceSimSm90, AStoreThatIsNotWaitedFor) {
  const Matrix a(16, 64, 3, 16);
  const auto program = [&](bool wait, bool overwrite) {
    return [&a, wait, overwrite] {
      for (int k = thread_index(); k < 16 * 64; k += 128)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + k, BFloat16{0});
      fence_async();
      barrier();
      if (thread_index() != 0) return;
      tensor_store(a.map, shared_bytes(), 0, 0, 0, 0);
      bulk_commit();
      if (overwrite) shared_store(reinterpret_cast<BFloat16*>(shared_bytes()), BFloat16{0});
      if (wait) bulk_wait_read<0>();
    };
  };
  expect_right(program(true, false));
  expect_caught("bulk_wait", "without waiting", program(false, false));
  expect_caught("shared_store", "what another thread reads", program(true, true));
}

TEST_F(DeviceSimSm90, NamedBarriers) {
  const auto program = [](int first_count, bool arrives) {
    return [=] {
      auto* x = reinterpret_cast<float*>(shared_bytes());
      if (warp_index() < 2) {  // the first two warps write, the others read
        shared_store(x + thread_index(), 1.0f);
        if (arrives) named_barrier_arrive(5, first_count);
      } else {
        named_barrier_wait(5, 128);
        shared_load(x + thread_index() - 64);
      }
    };
  };
  expect_right(program(128, true));
  expect_caught("named_barrier_wait", "deadlock", program(128, false));
  expect_caught("named_barrier_wait", "another number", program(96, true));
  expect_caught("named_barrier_wait", "1 to 15", [] { named_barrier_wait(0, 128); });
}

TEST_F(DeviceSimSm90, BarriersAndMapsThatAreNotThere) {
  expect_caught("mbarrier_arrive", "no mbarrier", [] { mbarrier_arrive(mbarrier(0)); });
  expect_caught("mbarrier_arrive", "without a barrier", [] {
    if (thread_index() == 0) mbarrier_init(mbarrier(0), 128);
    if (thread_index() > 0) mbarrier_arrive(mbarrier(0));
  });
  const Matrix a(16, 64, 3, 16);
  expect_caught("tensor_load", "misaligned", [&] {
    make_mbarriers({1});
    a.load(shared_bytes() + 512, mbarrier(0));
  });
  expect_caught("tensor_load", "nobody waited", [&] {
    make_mbarriers({1});
    a.load(shared_bytes(), mbarrier(0));
  });
  expect_caught("tensor_load", "without a fence_async", [&] {
    if (thread_index() == 0) mbarrier_init(mbarrier(0), 1);
    barrier();
    a.load(shared_bytes(), mbarrier(0));
  });
  sim::clear_buffers();
  expect_caught("tensor_load", "global memory out of bounds", [&] {
    make_mbarriers({1});
    a.load(shared_bytes(), mbarrier(0));
    mbarrier_wait(mbarrier(0), 0);
  });
  TensorMap map;
  const TensorShape shape = {a.data.data(), DType::bfloat16, {64, 16, 1, 1}, {2, 8, 16, 16}, {64, 16, 1, 1}};
  EXPECT_NE(encode_tensor_map(map, shape), nullptr);
}

TEST_F(DeviceSimSm90, TooManyRegisters) {
  expect_caught(
      "set_max_registers", "more registers", [] { take_registers<256>(); }, 384);
  expect_caught("take_registers", "not a number", [] { take_registers<250>(); });
}

}  // namespace
}  // namespace scaledot
