// The simulation itself (device_sim/): errors that it must find, and its instructions against plain loops.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/launch.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

constexpr int kThreadsOfTest = 64;

// The simulation's error message for a program; "" if it finds no error.
std::string verdict(const std::function<void()>& program, int threads = kThreadsOfTest, int64_t shared_bytes = 1024) {
  try {
    sim::run_grid(2, threads, shared_bytes, program);
  } catch (const sim::Failure& failure) {
    return failure.what();
  }
  return "";
}

void expect_caught(const char* call, const char* what, const std::function<void()>& program) {
  const std::string said = verdict(program);
  EXPECT_NE(said.find(call), std::string::npos) << "said: " << said;
  EXPECT_NE(said.find(what), std::string::npos) << "said: " << said;
}

float* shared_floats() { return static_cast<float*>(shared_memory()); }

class DeviceSim : public ::testing::Test {
 protected:
  void TearDown() override { sim::clear_buffers(); }
};

TEST_F(DeviceSim, CorrectProgramPasses) {
  EXPECT_EQ(verdict([] {
              shared_store(shared_floats() + thread_index(), float(thread_index()));
              barrier();
              const float x = shared_load(shared_floats() + (thread_index() + 33) % kThreadsOfTest);
              if (x != float((thread_index() + 33) % kThreadsOfTest)) throw sim::Failure("wrong value");
              if (barrier_or(thread_index() == 5) != true || barrier_or(false) != false)
                throw sim::Failure("wrong vote");
              shared_store(shared_floats() + thread_index(), x);
              warp_barrier();
              shared_load(shared_floats() + (thread_index() ^ 1));
              if (shuffle_xor(float(lane_index()), 3) != float(lane_index() ^ 3)) throw sim::Failure("wrong lane");
            }),
            "");
}

TEST_F(DeviceSim, BarrierMissedBySomeThreads) {
  expect_caught("barrier", "deadlock", [] {
    if (thread_index() != 3) barrier();
  });
}

TEST_F(DeviceSim, ShuffleMissedBySomeLanes) {
  expect_caught("shuffle_xor", "deadlock", [] {
    if (lane_index() < 16) shuffle_xor(1.0f, 1);
  });
}

TEST_F(DeviceSim, LanesAtDifferentCalls) {
  expect_caught("shuffle_xor", "wait in", [] {
    if (lane_index() < 16)
      warp_barrier();
    else
      shuffle_xor(1.0f, 1);
  });
}

// Instructions that are .aligned in PTX: half of a warp comes to one on the one side of a branch.
TEST_F(DeviceSim, DivergedWarps) {
  const auto branch = [](auto here, auto there) {
    return [=] {
      if (lane_index() < 16)
        here();
      else
        there();
    };
  };
  expect_caught("barrier", "has diverged",
                branch([] { barrier(); },  // two instructions of the same name
                       [] { barrier(); }));
  expect_caught("barrier_or", "other lanes are at barrier,", branch([] { barrier(); }, [] { barrier_or(true); }));
  uint32_t r[4];
  const auto load = [&r] { ldmatrix_x4(r, shared_floats() + thread_index() / 32 * 32); };
  expect_caught("ldmatrix_x4", "has diverged", [&] {
    shared_store(shared_floats() + thread_index(), 0.0f);
    warp_barrier();
    branch(load, [&r] { ldmatrix_x4(r, shared_floats() + thread_index() / 32 * 32); })();
  });
  // The same place, and instructions that need no converged warp.
  EXPECT_EQ(verdict(
                [&] {
                  shared_store(shared_floats() + thread_index(), 0.0f);
                  warp_barrier();
                  for (int k = 0; k < 3; ++k) ldmatrix_x4(r, shared_floats() + thread_index() / 32 * 32);
                  branch([] { warp_barrier(); }, [] { warp_barrier(); })();
                  barrier();
                },
                32),
            "");
}

TEST_F(DeviceSim, SharedMemoryOutOfBounds) {
  expect_caught("shared_store", "out of bounds", [] { shared_store(shared_floats() + 250 + thread_index(), 1.0f); });
  expect_caught("shared_load", "out of bounds", [] { shared_load(shared_floats() - 1); });
}

TEST_F(DeviceSim, GlobalMemoryOutOfBounds) {
  std::vector<float> buffer(100), input(100);
  sim::register_buffer(buffer.data(), 64 * sizeof(float), true);
  sim::register_buffer(input.data(), input.size() * sizeof(float), false);
  EXPECT_EQ(verdict([&] { global_store(buffer.data() + thread_index(), 1.0f); }), "");
  expect_caught("global_load", "out of bounds", [&] { global_load(buffer.data() + 1 + thread_index()); });
  expect_caught("global_store", "out of bounds", [&] { global_store(buffer.data() + 1 + thread_index(), 1.0f); });
  expect_caught("global_store", "input", [&] { global_store(input.data() + thread_index(), 1.0f); });
  expect_caught("global_element", "out of bounds",
                [&] { global_element<float>(buffer.data(), DType::float32, 64 + thread_index()); });
}

TEST_F(DeviceSim, ReadOfUnwrittenSharedMemory) {
  expect_caught("shared_load", "nobody has written", [] {
    if (thread_index() > 0) shared_store(shared_floats() + thread_index(), 1.0f);
    barrier();
    shared_load(shared_floats() + thread_index());
  });
}

TEST_F(DeviceSim, MissingBarrier) {
  expect_caught("shared_load", "without a barrier", [] {
    shared_store(shared_floats() + thread_index(), 1.0f);
    if (thread_index() > 0) shared_load(shared_floats() + thread_index() - 1);
  });
  expect_caught("shared_store", "what another thread reads", [] {
    shared_store(shared_floats() + thread_index(), 1.0f);
    barrier();
    shared_load(shared_floats() + thread_index());
    if (thread_index() > 0) shared_store(shared_floats() + thread_index() - 1, 2.0f);
  });
  expect_caught("shared_store", "what another thread writes", [] { shared_store(shared_floats(), 1.0f); });
  expect_caught("shared_load", "without a barrier", [] {  // a warp's barrier does not order two warps
    shared_store(shared_floats() + thread_index(), 1.0f);
    warp_barrier();
    if (thread_index() >= 32) shared_load(shared_floats() + thread_index() - 32);
  });
}

TEST_F(DeviceSim, CopyReadBeforeWait) {
  alignas(16) static const float source[256] = {};
  sim::register_buffer(source, sizeof(source), false);
  const auto copy = [] { cp_async(shared_floats() + 4 * thread_index() % 256, source + 4 * thread_index() % 256, 16); };
  EXPECT_EQ(verdict([&] {
              copy();
              cp_async_wait_all();
              barrier();
              shared_load(shared_floats() + 200);
            }),
            "");
  expect_caught("shared_load", "not waited for", [&] {
    copy();
    shared_load(shared_floats() + 4 * thread_index());
  });
  expect_caught("shared_load", "without a barrier", [&] {
    copy();
    cp_async_wait_all();
    if (thread_index() > 0) shared_load(shared_floats() + 4 * thread_index() - 4);
  });
  expect_caught("cp_async", "without waiting", copy);
  expect_caught("cp_async", "out of bounds", [&] { cp_async(shared_floats() + 4 * thread_index(), source + 256, 16); });
  expect_caught("cp_async", "misaligned", [&] { cp_async(shared_floats() + 4 * thread_index(), source + 1, 8); });
}

TEST_F(DeviceSim, OlderCopiesAreWaitedFor) {
  alignas(16) static const float source[256] = {};
  sim::register_buffer(source, sizeof(source), false);
  const auto copy_groups = [](int groups) {
    if (thread_index() > 0) return;
    for (int k = 0; k < groups; ++k) {
      cp_async(shared_floats() + 4 * k, source, 16);
      cp_async_commit();
    }
    cp_async_commit();
    cp_async_wait_older();
    cp_async(shared_floats() + 4 * groups, source, 16);
    cp_async_commit();
    cp_async(shared_floats() + 4 * groups + 4, source, 16);
    cp_async_commit();
    cp_async_wait_older();
    for (int k = 0; k <= groups; ++k) shared_load(shared_floats() + 4 * k);
  };
  EXPECT_EQ(verdict([&] { copy_groups(2), cp_async_wait_all(); }), "");
  expect_caught("shared_load", "not waited for", [&] { copy_groups(2), shared_load(shared_floats() + 12); });
  expect_caught("shared_load", "not waited for", [] {
    cp_async(shared_floats() + 4 * thread_index(), source, 16);
    cp_async_wait_older();  // not committed
    shared_load(shared_floats() + 4 * thread_index());
  });
}

TEST_F(DeviceSim, CopyFillsWithZeros) {
  alignas(16) static const float source[4] = {1, 2, 3, 4};
  sim::register_buffer(source, 6, false);
  EXPECT_EQ(verdict(
                [&] {
                  if (thread_index() == 0) {
                    cp_async(shared_floats(), source, 4);
                    cp_async(shared_floats() + 4, source, 0);
                    cp_async_wait_all();
                    for (int k = 0; k < 8; ++k)
                      if (shared_load(shared_floats() + k) != (k == 0 ? 1.0f : 0.0f)) throw sim::Failure("wrong value");
                  }
                },
                32),
            "");
}

TEST_F(DeviceSim, MisalignedAddresses) {
  expect_caught("ldmatrix_x4", "misaligned", [] {
    uint32_t r[4];
    ldmatrix_x4(r, static_cast<char*>(shared_memory()) + 8);
  });
}

TEST_F(DeviceSim, BlockTooLarge) {
  EXPECT_NE(verdict([] {}, 32, sim::kMaxSharedBytes + 1), "");
  EXPECT_NE(verdict([] {}, 32, sim::kMaxSharedBytesOfAll + 1), "");
  EXPECT_NE(verdict([] {}, 33), "");
}

// As on a GPU, a launch that the driver refuses returns an error, and the kernel does not run.
int runs = 0;
void count_runs() { runs += thread_index() == 0; }
TEST_F(DeviceSim, RefusedLaunches) {
  const auto error = [](int64_t blocks, int cluster, int threads, int64_t shared_bytes) -> std::string {
    const char* said = launch_clusters(count_runs, blocks, cluster, threads, shared_bytes, nullptr);
    return said ? said : "";
  };
  const auto refuses = [&](const char* what, int64_t blocks, int cluster, int threads, int64_t shared_bytes) {
    const std::string said = error(blocks, cluster, threads, shared_bytes);
    EXPECT_NE(said.find(what), std::string::npos) << "said: " << said;
  };
  refuses("shared memory", 2, 1, 128, sim::kMaxSharedBytes + 1);
  refuses("number of threads", 2, 1, 1056, 0);
  refuses("number of threads", 2, 1, 0, 0);
  refuses("number of blocks for a grid", int64_t(1) << 31, 1, 128, 0);
  refuses("number of blocks for a grid", -1, 1, 128, 0);
  refuses("whole number of clusters", 5, 2, 128, 0);
  refuses("number of blocks for a cluster", 16, 16, 32, 0);
  sim::set_device({80, true});
  refuses("shared memory", 2, 1, 128, sim::kMaxSharedBytesOfAll + 1);
  refuses("clusters need", 4, 2, 128, 0);
  sim::set_device(sim::kDevice);
  EXPECT_EQ(runs, 0);
  EXPECT_EQ(error(0, 2, 128, 0), "");  // launches nothing
  EXPECT_EQ(runs, 0);
  EXPECT_EQ(error(4, 2, 128, 1024), "");
  EXPECT_EQ(runs, 4);
}

TEST(GivenMemory, KnowsWhatAKernelWasLastGivenOnADevice) {
  GivenMemory given;
  alignas(16) static char kernels[32];
  const void *one = kernels, *other = kernels + 16;
  EXPECT_FALSE(given.has(one, 0, 100));
  given.set(one, 0, 100), given.set(one, 1, 227), given.set(other, 0, 60);
  EXPECT_TRUE(given.has(one, 0, 100) && given.has(one, 1, 227) && given.has(other, 0, 60));
  EXPECT_FALSE(given.has(one, 0, 101) || given.has(other, 1, 60) || given.has(one, 2, 100));
  given.set(one, 0, 64);
  EXPECT_TRUE(given.has(one, 0, 64));
  EXPECT_FALSE(given.has(one, 0, 100));
  given.set(one, 300, 64);  // a device whose number has no place
  EXPECT_FALSE(given.has(one, 300, 64) || given.has(one, 44, 64));
}

// c = a b by ldmatrix and mma, with elements that are exact in bfloat16, against three loops.
TEST_F(DeviceSim, MatrixProduct) {
  const auto a = [](int i, int k) { return float((3 * i + 5 * k) % 17 - 8); };
  const auto b = [](int k, int j) { return float((7 * k + 2 * j) % 13 - 6); };
  for (const bool transposed : {false, true})
    EXPECT_EQ(verdict(
                  [&] {
                    // a as [i][k]; b as [j][k], or transposed as [k][j].
                    auto* x = static_cast<BFloat16*>(shared_memory());
                    auto* y = x + 256;
                    for (int n = lane_index(); n < 256; n += 32) {
                      BFloat16 s, t;
                      narrow(a(n / 16, n % 16), s);
                      narrow(transposed ? b(n / 16, n % 16) : b(n % 16, n / 16), t);
                      shared_store(x + n, s);
                      shared_store(y + n, t);
                    }
                    barrier();
                    const int lane = lane_index(), low = lane % 8, bit3 = lane / 8 % 2, bit4 = lane / 16;
                    uint32_t p[4], q[4];
                    ldmatrix_x4(p, x + (bit3 * 8 + low) * 16 + bit4 * 8);
                    if (transposed)
                      ldmatrix_x4_trans(q, y + (bit3 * 8 + low) * 16 + bit4 * 8);
                    else
                      ldmatrix_x4(q, y + (bit4 * 8 + low) * 16 + bit3 * 8);
                    float c[2][4] = {};
                    mma_m16n8k16(c[0], p, q[0], q[1], Type<BFloat16>{});
                    mma_m16n8k16(c[1], p, q[2], q[3], Type<BFloat16>{});
                    for (int n = 0; n < 2; ++n)
                      for (int e = 0; e < 4; ++e) {
                        const int i = lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
                        float sum = 0;
                        for (int k = 0; k < 16; ++k) sum += a(i, k) * b(k, j);
                        if (c[n][e] != sum) throw sim::Failure("wrong sum");
                      }
                  },
                  32),
              "");
}

}  // namespace
}  // namespace scaledot
