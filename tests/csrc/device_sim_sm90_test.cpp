// The simulation's sm_90 instructions in correct programs, against plain loops.
#include "device_sim_sm90.h"
#include "cuda/ptx/stmatrix.h"

namespace scaledot {
namespace {

// a b^T, both K-major, as for the scores of attention. Rows and columns outside the tensors count as 0.
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
      wgmma<kN, Major::k, Major::k>(
          d, advance_descriptor(k_major_descriptor(shared_bytes()), panel * 64 * 128 + within),
          advance_descriptor(k_major_descriptor(place_b), panel * kN * 128 + within), k > 0, Type<BFloat16>{});
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
    require_sums<kN>(d, [&](int i, int j) {
      float sum = 0;
      for (int k = 0; k < depth; ++k) sum += a.at(i, k) * b.at(j, k);
      return sum;
    });
  });
}
TEST_F(DeviceSimSm90, WgmmaBothOperandsKMajor) {
  expect_scores<64>(64, 64, 64);
  expect_scores<128>(128, 64, 128);
  expect_scores<80>(72, 50, 77);
}

// a b, as for the weights times the values: b MN-major over two panels, a in registers.
TEST_F(DeviceSimSm90, WgmmaRegistersTimesMnMajor) {
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
      wgmma<128, Major::mn>(d, x[k], advance_descriptor(mn_major_descriptor(shared_bytes(), 48 * 128), k * 16 * 128),
                            true, Type<BFloat16>{});
    wgmma_commit();
    wgmma_wait<0>();
    require_sums<128>(d, [&](int i, int j) {
      float sum = 0;
      for (int k = 0; k < 48; ++k) sum += a(i, k) * b.at(k, j);
      return sum;
    });
  });
}

// a^T b, both MN-major, as for the gradient of the queries.
TEST_F(DeviceSimSm90, WgmmaBothOperandsMnMajor) {
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
        wgmma<64, Major::mn, Major::mn>(
            d[half], advance_descriptor(mn_major_descriptor(shared_bytes() + half * 32 * 128, 32 * 128), k * 128),
            advance_descriptor(mn_major_descriptor(place_b, 32 * 128), k * 128), k > 0, Type<BFloat16>{});
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
TEST_F(DeviceSimSm90, TensorLoadSwizzlesAndFillsWithZeros) {
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

TEST_F(DeviceSimSm90, TensorStoreSkipsElementsOutsideTheTensor) {
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

TEST_F(DeviceSimSm90, BulkLoadAndReduceAdd) {
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

TEST_F(DeviceSimSm90, StmatrixInvertsLdmatrix) {
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

}  // namespace
}  // namespace scaledot
