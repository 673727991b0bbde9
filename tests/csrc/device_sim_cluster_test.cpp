// Clusters of blocks in the simulation: a right program, and the errors that must be found in wrong ones.
#include "cuda/ptx/cluster.h"
#include "device_sim_sm90.h"

namespace scaledot {
namespace {

class DeviceSimCluster : public DeviceSimSm90 {};

// Two blocks share a pipeline of two stages. In each, thread 0 copies its half of every tile to both blocks, and a
// warpgroup adds up the tiles. `flaw` says which step is wrong or left out.
enum Flaw {
  kNone,
  kNoBarrierAtTheBegin,
  kNoBarrierAtTheEnd,
  kReleaseOwnStageOnly,
  kHalfForOwnBlockOnly,
};
void shared_pipeline(const Matrix& a, Flaw flaw) {
  constexpr int kBlocks = 2, kStages = 2, kTiles = 5, kBytes = 64 * 128, kHalf = kBytes / kBlocks;
  const int releases = flaw == kReleaseOwnStageOnly ? 4 : 8;
  make_mbarriers({1, 1, releases, releases});
  if (flaw != kNoBarrierAtTheBegin) cluster_barrier();
  const int rank = cluster_rank();
  if (warpgroup_index() == 0) {
    if (thread_index() == 0)
      for (int n = 0; n < kTiles; ++n) {
        uint64_t *full = mbarrier(n % kStages), *empty = mbarrier(kStages + n % kStages);
        mbarrier_wait(empty, (n / kStages & 1) ^ 1);
        mbarrier_arrive_expect(full, kBytes);
        const uint16_t blocks = flaw == kHalfForOwnBlockOnly ? uint16_t(1 << rank) : uint16_t(3);
        tensor_load_to_all(shared_bytes() + n % kStages * kBytes + rank * kHalf, a.map, full, 0, rank * 32, 0, 0,
                           blocks);
      }
  } else {
    const uint32_t x[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};  // ones
    float d[32] = {};
    for (int n = 0; n < kTiles; ++n) {
      const int stage = n % kStages;
      mbarrier_wait(mbarrier(stage), n / kStages & 1);
      for (int half = 0; half < kBlocks; ++half) {
        wgmma_fence();
        wgmma<64, Major::mn>(d, x, mn_major_descriptor(shared_bytes() + stage * kBytes + half * kHalf, kBytes), true,
                             Type<BFloat16>{});
        wgmma_commit();
        wgmma_wait<0>();
      }
      uint64_t* const empty = mbarrier(kStages + stage);
      if (flaw == kReleaseOwnStageOnly) {
        if (lane_index() == 0) mbarrier_arrive(empty);
      } else if (lane_index() < kBlocks) {
        mbarrier_arrive_at(empty, lane_index());
      }
    }
    require_sums<64>(d, [&](int, int j) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a.at(k, j) + a.at(32 + k, j);
      return kTiles * sum;
    });
  }
  if (flaw != kNoBarrierAtTheEnd) cluster_barrier();
}

TEST_F(DeviceSimCluster, PipelineErrors) {
  const Matrix a(64, 64, 3, 32);
  const auto with = [&](Flaw flaw) { return [&a, flaw] { shared_pipeline(a, flaw); }; };
  expect_right(with(kNone), 256, 2);
  expect_caught("tensor_load_to_all", "without a fence_async", with(kNoBarrierAtTheBegin), 256, 2);
  expect_caught("cluster_barrier", "may end before", with(kNoBarrierAtTheEnd), 256, 2);
  expect_caught("tensor_load_to_all", "without a barrier between", with(kReleaseOwnStageOnly), 256, 2);
  expect_caught("mbarrier_wait", "deadlock", with(kHalfForOwnBlockOnly), 256, 2);
}

TEST_F(DeviceSimCluster, EveryBlockHasItsPlaceAndItsMemory) {
  expect_right(
      [] {
        require(block_index() % 2 == cluster_rank() && block_count() == 2);
        auto* x = reinterpret_cast<float*>(shared_bytes()) + thread_index();
        shared_store(x, float(block_index()));
        barrier();
        named_barrier_wait(1, 128);
        require(shared_load(x) == float(block_index()));
        cluster_barrier();
      },
      128, 2);
}

// Blocks do not wait for each other, except at cluster_barrier.
TEST_F(DeviceSimCluster, ABarrierIsOfOneBlock) {
  expect_right(
      [] {
        if (cluster_rank() == 0) barrier();
      },
      128, 2);
  expect_caught(
      "cluster_barrier", "deadlock",
      [] {
        if (thread_index() > 0 || cluster_rank() == 0) cluster_barrier();
        barrier();
      },
      128, 2);
}

TEST_F(DeviceSimCluster, OrdinaryAccessesAreToTheOwnBlock) {
  constexpr int64_t kWindow = round_up(kSharedBytes, 1024);
  const auto access = [](bool write) {
    return [write] {
      auto* x = reinterpret_cast<float*>(shared_bytes() + (cluster_rank() == 0 ? kWindow : -kWindow)) + thread_index();
      if (write)
        shared_store(x, 1.0f);
      else
        shared_load(x);
    };
  };
  expect_caught("shared_load", "of another block", access(false), 128, 2);
  expect_caught("shared_store", "of another block", access(true), 128, 2);
}

TEST_F(DeviceSimCluster, BadRanksAndGrids) {
  expect_caught(
      "mbarrier_arrive_at", "no such block",
      [] {
        make_mbarriers({1});
        mbarrier_arrive_at(mbarrier(0), 2);
      },
      128, 2);
  EXPECT_THROW(sim::run_clusters(3, 2, 128, 1024, [] {}), sim::Failure);
}

}  // namespace
}  // namespace scaledot
