// Errors in sm_90 programs that the simulation must find.
#include "device_sim_sm90.h"

namespace scaledot {
namespace {

class DeviceSimSm90Errors : public DeviceSimSm90 {};

// One warpgroup loads into two stages, and another reads them. `flaw` says which step is wrong or left out.
enum Flaw {
  kNone,
  kNoWaitForFull,
  kNoWaitForEmpty,
  kNoFenceBeforeWgmma,
  kNoWgmmaWait,
  kTooFewArrivals,
  kTooManyBytes,
  kSumsTouched,
  kOperandTouched
};
void pipeline(const Matrix& a, Flaw flaw) {
  constexpr int kStages = 2, kTiles = 5, kBytes = 64 * 128;
  make_mbarriers({1, 1, 4, 4});
  if (warpgroup_index() == 0) {
    dealloc_registers<24>();
    if (thread_index() != 0) return;
    for (int n = 0; n < kTiles; ++n) {
      uint64_t *full = mbarrier(n % kStages), *empty = mbarrier(kStages + n % kStages);
      if (flaw != kNoWaitForEmpty) mbarrier_wait(empty, (n / kStages & 1) ^ 1);
      mbarrier_arrive_expect(full, flaw == kTooManyBytes ? 2 * kBytes : kBytes);
      tensor_load(shared_bytes() + n % kStages * kBytes, a.map, full, 0, 0, 0, 0);
    }
    return;
  }
  alloc_registers<240>();
  uint32_t x[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};  // ones
  float d[32] = {};
  for (int n = 0; n < kTiles; ++n) {
    const int stage = n % kStages;
    if (flaw != kNoWaitForFull) mbarrier_wait(mbarrier(stage), n / kStages & 1);
    if (flaw != kNoFenceBeforeWgmma) wgmma_fence();
    wgmma<64, Major::mn>(d, x, mn_major_descriptor(shared_bytes() + stage * kBytes, kBytes), true, Type<BFloat16>{});
    wgmma_commit();
    if (flaw == kSumsTouched) d[3] = 0;
    if (flaw == kOperandTouched) x[1] = 0;
    if (flaw != kNoWgmmaWait) wgmma_wait<0>();
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

TEST_F(DeviceSimSm90Errors, PipelineErrors) {
  const Matrix a(64, 64, 3, 64);
  const auto with = [&](Flaw flaw) { return [&a, flaw] { pipeline(a, flaw); }; };
  expect_right(with(kNone), 256);
  expect_caught("wgmma", "not waited for", with(kNoWaitForFull), 256);
  expect_caught("tensor_load", "not waited for", with(kNoWaitForEmpty), 256);
  expect_caught("wgmma", "no wgmma_fence", with(kNoFenceBeforeWgmma), 256);
  expect_caught("tensor_load", "what another thread reads", with(kNoWgmmaWait), 256);
  expect_caught("mbarrier_wait", "deadlock", with(kTooFewArrivals), 256);
  expect_caught("mbarrier_wait", "deadlock", with(kTooManyBytes), 256);
  expect_caught("wgmma_wait", "sums were written", with(kSumsTouched), 256);
  expect_caught("wgmma_wait", "was changed", with(kOperandTouched), 256);
}

TEST_F(DeviceSimSm90Errors, WgmmaNeedsFenceAndBarrierAfterWrites) {
  const auto program = [](bool fence, bool bar) {
    return [=] {
      for (int k = thread_index(); k < 64 * 64; k += 128)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + k, BFloat16{0x3f80});
      if (fence) fence_async();
      if (bar) named_barrier_wait(3, 128);
      float d[32];
      wgmma_fence();
      wgmma<64, Major::k, Major::k>(d, k_major_descriptor(shared_bytes()), k_major_descriptor(shared_bytes()), false,
                                    Type<BFloat16>{});
      wgmma_commit();
      wgmma_wait<0>();
      require_sums<64>(d, [](int, int) { return 16.0f; });
    };
  };
  expect_right(program(true, true));
  expect_caught("wgmma", "without a fence_async", program(false, true));
  expect_caught("wgmma", "without a barrier", program(true, false));
}

// The copy engine may overtake reads of the threads, as it may overtake their writes.
TEST_F(DeviceSimSm90Errors, ACopyNeedsFenceAndBarrierAfterReads) {
  const Matrix a(64, 64, 3, 64);
  enum Flaw { kRight, kNoFence, kNoFenceByOneWarp, kFenceFirst, kFenceOfTheCopyingThread };
  const auto program = [&a](Flaw flaw, int rounds) {
    return [&a, flaw, rounds] {
      make_mbarriers({1});
      for (int n = 0; n < rounds; ++n) {
        a.load(shared_bytes(), mbarrier(0));
        mbarrier_wait(mbarrier(0), n % 2);
        const bool fences = flaw == kNoFenceByOneWarp ? warp_index() != 2 : flaw == kRight;
        if (flaw == kFenceFirst) fence_async();
        for (int k = 0; k < 32; ++k)  // each row by a thread, but row 5 by all
          shared_load(reinterpret_cast<BFloat16*>(shared_bytes()) + (k % 2 ? thread_index() % 64 : 5) * 64 + k);
        if (fences) fence_async();
        named_barrier_wait(3, 128);
        if (flaw == kFenceOfTheCopyingThread && thread_index() == 0) fence_async();
      }
    };
  };
  expect_right(program(kRight, 3));
  expect_right(program(kNoFence, 1));
  for (const Flaw flaw : {kNoFence, kNoFenceByOneWarp, kFenceFirst, kFenceOfTheCopyingThread})
    expect_caught("tensor_load", "has read without a fence_async", program(flaw, 2));
  const auto write = [&a](bool fence) {
    return [&a, fence] {
      make_mbarriers({1});
      for (int k = thread_index(); k < 64 * 64; k += 128)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + k, BFloat16{0});
      if (fence) fence_async();
      barrier();
      a.load(shared_bytes(), mbarrier(0));
      mbarrier_wait(mbarrier(0), 0);
    };
  };
  expect_right(write(true));
  expect_caught("tensor_load", "has written without a fence_async", write(false));
}

// wgmma_wait is of one warp: the other three may still have parts of the product to compute.
TEST_F(DeviceSimSm90Errors, AWarpKnowsOnlyItsOwnPartOfAProduct) {
  const Matrix a(64, 64, 3, 64);
  const auto program = [&a](bool bar, int writing_warps) {
    return [&a, bar, writing_warps] {
      make_mbarriers({1});
      a.load(shared_bytes(), mbarrier(0));
      mbarrier_wait(mbarrier(0), 0);
      float d[32];
      wgmma_fence();
      wgmma<64, Major::k, Major::k>(d, k_major_descriptor(shared_bytes()), k_major_descriptor(shared_bytes()), false,
                                    Type<BFloat16>{});
      wgmma_commit();
      wgmma_wait<0>();
      if (bar) named_barrier_wait(3, 128);
      if (warp_index() < writing_warps)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + 1024 * warp_index() + lane_index(), BFloat16{0});
      require_sums<64>(d, [&](int i, int j) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += a.at(i, k) * a.at(j, k);
        return sum;
      });
    };
  };
  expect_right(program(true, 4));
  expect_right(program(false, 0));
  expect_caught("shared_store", "what another thread reads", program(false, 4));
  expect_caught("shared_store", "what another thread reads", program(false, 1));
}

// No barrier waits for the tensor cores or for a copy that still reads shared memory.
TEST_F(DeviceSimSm90Errors, ABarrierWaitsForThreadsOnly) {
  const Matrix a(64, 64, 3, 64);
  const auto product = [&a](bool wait, bool store) {
    return [&a, wait, store] {
      make_mbarriers({1});
      a.load(shared_bytes(), mbarrier(0));
      mbarrier_wait(mbarrier(0), 0);
      float d[32];
      wgmma_fence();
      wgmma<64, Major::k, Major::k>(d, k_major_descriptor(shared_bytes()), k_major_descriptor(shared_bytes()), false,
                                    Type<BFloat16>{});
      wgmma_commit();
      if (wait) wgmma_wait<0>();
      barrier();
      if (store) shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + thread_index(), BFloat16{0});
      wgmma_wait<0>();
    };
  };
  expect_right(product(true, true));
  expect_right(product(false, false));
  expect_caught("shared_store", "what another thread reads", product(false, true));
  const auto copy = [&a](bool wait) {
    return [&a, wait] {
      for (int k = thread_index(); k < 64 * 64; k += 128)
        shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + k, BFloat16{0});
      fence_async();
      barrier();
      if (thread_index() == 0) {
        tensor_store(a.map, shared_bytes(), 0, 0, 0, 0);
        bulk_commit();
        if (wait) bulk_wait_read<0>();
      }
      barrier();
      shared_store(reinterpret_cast<BFloat16*>(shared_bytes()) + thread_index(), BFloat16{0});
      if (thread_index() == 0) bulk_wait_read<0>();
    };
  };
  expect_right(copy(true));
  expect_caught("shared_store", "what another thread reads", copy(false));
}

TEST_F(DeviceSimSm90Errors, BulkStoresMustBeWaitedFor) {
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

TEST_F(DeviceSimSm90Errors, NamedBarrierErrors) {
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

// Instructions that are .aligned in PTX: all lanes of a warp execute the same one.
TEST_F(DeviceSimSm90Errors, DivergedWarps) {
  enum Flaw { kRight, kTwoArrivals, kHalfArrives, kTwoFences, kTwoAllocs };
  const auto program = [](Flaw flaw) {
    return [flaw] {
      const bool first = lane_index() < 16;
      if (flaw == kTwoArrivals && first)
        named_barrier_arrive(5, 128);
      else if (flaw != kHalfArrives || first)
        named_barrier_arrive(5, 128);  // half of the threads, twice, would do as well
      if (flaw == kHalfArrives) named_barrier_arrive(5, 128);
      if (flaw == kTwoFences && first)
        wgmma_fence();
      else
        wgmma_fence();
      if (flaw == kTwoAllocs && first)
        alloc_registers<240>();
      else
        alloc_registers<240>();
    };
  };
  expect_right(program(kRight));
  expect_caught("named_barrier_arrive", "has diverged", program(kTwoArrivals));
  expect_caught("named_barrier_arrive", "has diverged", program(kHalfArrives));
  expect_caught("wgmma_fence", "has diverged", program(kTwoFences));
  expect_caught("alloc_registers", "has diverged", program(kTwoAllocs));
  expect_caught("named_barrier_arrive", "only some lanes of warp 0", [] {
    if (thread_index() < 16) named_barrier_arrive(5, 32);
  });
}

TEST_F(DeviceSimSm90Errors, BadMbarriersAndTensorMaps) {
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

TEST_F(DeviceSimSm90Errors, TooManyRegisters) {
  expect_caught(
      "set_max_registers", "more registers", [] { alloc_registers<256>(); }, 384);
  expect_caught("alloc_registers", "not a number", [] { alloc_registers<250>(); });
}

}  // namespace
}  // namespace scaledot
