// How the generic GPU kernels cut a problem up (csrc/cuda/generic/config.h and others), against brute force.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cuda/generic/mask_gradient.cuh"
#include "cuda/masks.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

// Every row of every head is in exactly one tile, and no tile has more than fit.
TEST(DeviceIndex, TilesCoverAllRowsOnce) {
  for (int64_t query_length : {1, 2, 7, 21, 63, 64, 65, 130, 200})
    for (int64_t group : {1, 2, 3, 5, 9})
      for (int side : {32, 64})
        for (bool stack : {false, true}) {
          Problem p = {};
          p.batch = 2, p.kv_heads = 2, p.heads = 2 * group, p.query_length = query_length;
          const Tiling tiling = tile_rows_of(p, side, stack);
          std::map<std::tuple<int64_t, int64_t, int64_t>, int> times;
          for (int64_t plane = 0; plane < 4; ++plane)
            for (int64_t index = 0; index < tiles_per_plane(tiling); ++index) {
              const RowTile tile = row_tile(p, tiling, plane, index);
              EXPECT_LE(tile_rows(tile), side);
              EXPECT_GE(tile_rows(tile), 1);
              for (int64_t head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
                EXPECT_EQ(head / group, tile.kv_head);
                for (int64_t i = tile.rows.begin; i < tile.rows.end; ++i) ++times[{tile.batch, head, i}];
              }
            }
          EXPECT_EQ(int64_t(times.size()), 2 * p.heads * query_length);
          for (const auto& [row, n] : times) EXPECT_EQ(n, 1);
        }
}

TEST(DeviceIndex, BlocksAndTasksAreOneToOne) {
  const Tiling tiling = {64, 1, 5, 2};
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> seen;
  for (int64_t block = 0; block < 3 * 10 * 4 * 7; ++block) {
    const ForwardTask t = forward_task(block, tiling, 4, 7);
    EXPECT_TRUE(t.plane < 3 && t.tile < 10 && t.panel < 4 && t.split < 7);
    EXPECT_TRUE(seen.insert({t.plane, t.tile, t.panel, t.split}).second);
  }
}

TEST(DeviceIndex, PanelsHoldAllColumns) {
  for (int64_t cols = 1; cols < 400; ++cols)
    for (int panel : {64, 128}) {
      int64_t covered = 0;
      for (int64_t index = 0; index < panels_of(cols, panel); ++index) {
        const int width = panel_width(cols, index, panel);
        EXPECT_TRUE(width % 16 == 0 && width >= 16 && width <= panel);
        covered += smaller<int64_t>(width, cols - index * panel);
      }
      EXPECT_EQ(covered, cols);
    }
}

TEST(DeviceIndex, KeyTilesOfARange) {
  for (int64_t begin = 0; begin < 70; ++begin)
    for (int64_t end = 0; end < 70; ++end) {
      const Range tiles = key_tiles_of({begin, end}, 32);
      std::set<int64_t> wanted, found;
      for (int64_t j = begin; j < end; ++j) wanted.insert(j / 32);
      for (int64_t t = tiles.begin; t < tiles.end; ++t) found.insert(t);
      EXPECT_EQ(found, wanted);
    }
}

// For every batch of the mask's own, the batches that share it, each once.
TEST(DeviceIndex, BatchesOfABroadcastMask) {
  for (int form = 0; form < 8; ++form) {
    Problem p = {};
    p.batch_dims = 3, p.batch = 2 * 3 * 4;
    p.batch_sizes[0] = 2, p.batch_sizes[1] = 3, p.batch_sizes[2] = 4;
    int64_t stride = 1;
    for (int d = 2; d >= 0; --d) {
      p.grad_mask.batch_stride[d] = form >> d & 1 ? stride : 0;
      if (form >> d & 1) stride *= p.batch_sizes[d];
    }
    const int64_t own = mask_batches(p);
    EXPECT_EQ(own, stride);
    std::set<int64_t> seen;
    for (int64_t o = 0; o < own; ++o)
      for (int64_t s = 0; s < p.batch / own; ++s) {
        const int64_t batch = batch_of_mask(p, o, s);
        EXPECT_TRUE(seen.insert(batch).second);
        EXPECT_EQ(offset(p, p.grad_mask, batch, 0), offset(p, p.grad_mask, batch_of_mask(p, o, 0), 0));
      }
    EXPECT_EQ(int64_t(seen.size()), p.batch);
  }
}

// key_terms says of one key what row_terms says of all.
template <class T>
void expect_same_terms(const Problem& p) {
  std::vector<T> additive(static_cast<size_t>(p.key_length));
  std::vector<uint8_t> state(static_cast<size_t>(p.key_length));
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t head = 0; head < p.heads; ++head)
      for (int64_t i = 0; i < p.query_length; ++i) {
        row_terms<T>(p, batch, head, i, {0, p.key_length}, additive.data(), state.data());
        const RowMask<T> row = row_mask<T>(p, batch, head, i);
        for (int64_t j = 0; j < p.key_length; ++j) {
          T element = T(0), one;
          if (p.attn_mask.data)
            element = load_element<T>(p.attn_mask.data, p.attn_mask.dtype, row.start + j * p.attn_mask.col_stride);
          ASSERT_EQ(key_terms(p, row, j, element, one), state[size_t(j)]) << "row " << i << " key " << j;
          if (state[size_t(j)] == kLive && mask_use(p).additive) {
            ASSERT_EQ(one, additive[size_t(j)]) << "row " << i << " key " << j;
          }
        }
      }
}

TEST(DeviceIndex, OneKeyAtATimeOrAWholeRow) {
  for (const Case& c : cases()) {
    if (c.mask == MaskKind::none && c.alibi == AlibiKind::none && c.dtype != DType::float32) continue;
    SCOPED_TRACE(c.name);
    const Built b = build(c);
    if (c.dtype == DType::float64)
      expect_same_terms<double>(b.problem());
    else
      expect_same_terms<float>(b.problem());
  }
}

class DeviceMasks : public ::testing::Test {
 protected:
  void TearDown() override { sim::clear_buffers(); }
};

TEST_F(DeviceMasks, AreThoseOfTheCpu) {
  constexpr int64_t kHeads = 3, kRows = 37, kKeys = 83, kScores = kHeads * kRows * kKeys;
  const float slopes[kHeads] = {0.5f, 0.0f, 0.125f};
  const int64_t seed[2] = {0x1234567890abcdef, 7};
  Problem p = {};
  p.batch = 1, p.heads = kHeads, p.query_length = kRows, p.key_length = kKeys, p.dropout_p = 0.3;
  p.position = {kKeys - kRows, 20, 5, kChunked, {16, 0}};
  p.dropout_seed = seed;
  p.alibi_slopes.data = const_cast<float*>(slopes);
  p.alibi_slopes.dtype = DType::float32;
  p.alibi_slopes.head_stride = 1;
  bool attended[kRows * kKeys], kept[kScores];
  std::vector<double> bias(static_cast<size_t>(kScores));
  sim::register_buffer(attended, sizeof(attended), true);
  sim::register_buffer(kept, sizeof(kept), true);
  sim::register_buffer(bias.data(), bias.size() * sizeof(double), true);
  ASSERT_EQ(write_attends(p, attended, nullptr), nullptr);
  ASSERT_EQ(write_bias(p, bias.data(), DType::float64, nullptr), nullptr);
  ASSERT_EQ(write_dropout_mask(p, kept, nullptr), nullptr);
  for (int64_t head = 0; head < kHeads; ++head)
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < kKeys; ++j) {
        const size_t k = size_t((head * kRows + i) * kKeys + j);
        EXPECT_EQ(attended[i * kKeys + j], attends(p, i, j));
        EXPECT_EQ(kept[k], dropout_keeps(dropout_row(p, 0, head, i), j));
        EXPECT_EQ(bias[k], -double(slopes[head]) * std::abs(double(j - i - (kKeys - kRows))));
      }
}

}  // namespace
}  // namespace scaledot::testing
