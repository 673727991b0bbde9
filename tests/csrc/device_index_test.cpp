// The index arithmetic of the GPU kernels (tiles, tasks, register layouts), against brute force. By static_assert where
// possible, so that the build itself fails.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cuda/generic/backward.cuh"
#include "cuda/generic/mask_gradient.cuh"
#include "cuda/masks.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/forward_tiles.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

// ---------------------------------------------------------------------------------------------------- by the compiler
// Each check goes through all threads at compile time.

// Each of the 16 x 8 accumulators of an mma is held once.
constexpr bool mma_sums_are_held_once() {
  int times[16][8] = {};
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int e = 0; e < 4; ++e) ++times[mma_row(lane, e)][mma_column(lane, e)];
  for (const auto& row : times)
    for (int n : row)
      if (n != 1) return false;
  return true;
}
static_assert(mma_sums_are_held_once());

// ldmatrix by the PTX ISA's table: the row and column in memory of element `half` of a lane's register `m`.
struct Spot {
  int row, col;
  constexpr bool operator==(const Spot&) const = default;
};
template <class MatrixRowOf>
constexpr Spot loaded(const MatrixRowOf& matrix_row, int lane, int m, int half, bool transposed) {
  const int within_row = transposed ? lane % 4 * 2 + half : lane / 4,
            within_col = transposed ? lane / 4 : lane % 4 * 2 + half;
  const MatrixRow named = matrix_row(m * 8 + within_row);
  return {named.row, named.col + within_col};
}

// ldmatrix gives a lane the registers that mma.m16n8k16 needs: a[i, k] as in mma.h, and b[k, j] of two products.
constexpr bool ldmatrix_feeds_mma() {
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int m = 0; m < 4; ++m)
      for (int half = 0; half < 2; ++half) {
        const int g = lane / 4, t = lane % 4 * 2 + half;
        const int i = g + m % 2 * 8, a_k = t + m / 2 * 8, j = g + m / 2 * 8, b_k = t + m % 2 * 8;
        const auto a = [&](ALayout layout) {
          return loaded([&](int l) { return a_matrix_row(layout, l); }, lane, m, half, layout == ALayout::transposed);
        };
        const auto b = [&](BLayout layout) {
          return loaded([&](int l) { return b_matrix_row(layout, l); }, lane, m, half, layout == BLayout::by_row);
        };
        if (a(ALayout::rows) != Spot{i, a_k} || a(ALayout::transposed) != Spot{a_k, i}) return false;
        if (b(BLayout::by_column) != Spot{j, b_k} || b(BLayout::by_row) != Spot{b_k, j}) return false;
      }
  return true;
}
static_assert(ldmatrix_feeds_mma());

// The threads of a block hold every score of a tile once, and elements 16 keys apart share a dropout counter.
template <class C, int kColumnWarps>
constexpr bool scores_are_held_once() {
  using L = ScoreLayout<C, kColumnWarps>;
  bool seen[C::kSide][C::kSide] = {};
  for (int thread = 0; thread < kThreads<C, kColumnWarps>; ++thread)
    for (int half = 0; half < 2; ++half)
      for (int n = 0; n < L::kTiles; ++n)
        for (int j = 0; j < 2; ++j) {
          const int key = L::warp_key_of(thread) + L::column_of(thread, n, j);
          const int shares_counter = L::warp_key_of(thread) + L::column_of(thread, n % 2, j);
          if (key % kDropoutLanes != shares_counter % kDropoutLanes) return false;
          bool& here = seen[L::row_of(thread, half)][key];
          if (here) return false;
          here = true;
        }
  for (const auto& row : seen)
    for (bool held : row)
      if (!held) return false;
  return true;
}

// The warps of a block compute every column of a panel once.
template <class C>
constexpr bool panel_columns_are_computed_once() {
  for (int64_t cols = 1; cols <= 2 * C::kPanel; ++cols)
    for (int panel = 0; panel < panels_of(cols, C::kPanel); ++panel) {
      int next = 0;
      for (int warp = 0; warp < kBackwardColumnWarps; ++warp) {
        const PanelShare<C> share(cols, panel, warp);
        if (share.tiles % 2 != 0 || share.tiles > PanelShare<C>::kTiles) return false;
        if (share.tiles > 0 && share.first != next) return false;
        next += share.tiles * 8;
      }
      if (next != panel_width(cols, panel, C::kPanel)) return false;
    }
  return true;
}

// 16 bytes of each of eight neighbouring rows are in different banks.
constexpr bool rows_use_different_banks(int pitch_bytes) {
  bool taken[8] = {};
  for (int r = 0; r < 8; ++r) {
    bool& group = taken[r * pitch_bytes / 16 % 8];
    if (group) return false;
    group = true;
  }
  return pitch_bytes % 16 == 0;
}

constexpr int64_t kMinSharedBytes = 99 * 1024;  // what every GPU from sm_80 on gives a block

template <class C>
constexpr bool config_is_sound() {
  constexpr int kBytes = int(sizeof(typename C::Storage));
  static_assert(sizeof(GenericForwardShared<C>) <= kMinSharedBytes &&
                sizeof(GenericScoresShared<C>) <= kMinSharedBytes);
  static_assert(sizeof(GenericBackwardShared<C>) <= kMinSharedBytes && sizeof(GenericMaskShared<C>) <= kMinSharedBytes);
  static_assert(kDropoutGroup % C::kSide == 0);  // keep_mask_bits: a tile never overlaps two groups
  static_assert(rows_use_different_banks(C::kPitch * kBytes) && rows_use_different_banks(C::kScorePitch * kBytes));
  static_assert(scores_are_held_once<C, kForwardColumnWarps>() && scores_are_held_once<C, kBackwardColumnWarps>());
  static_assert(panel_columns_are_computed_once<C>());
  return true;
}
static_assert(config_is_sound<GenericConfig<BFloat16, 64>>() && config_is_sound<GenericConfig<BFloat16, 128>>());
static_assert(config_is_sound<GenericConfig<float, 64>>() && config_is_sound<GenericConfig<float, 128>>());
static_assert(config_is_sound<GenericConfig<double, 64>>());

constexpr bool every_block_has_its_own_key_task() {
  bool seen[3][5][2] = {};
  for (int64_t block = 0; block < 3 * 5 * 2; ++block) {
    const KeyTask t = key_task(block, 5, 2);
    if (t.kv_group >= 3 || seen[t.kv_group][t.tile][t.panel]) return false;
    seen[t.kv_group][t.tile][t.panel] = true;
  }
  return true;
}
static_assert(every_block_has_its_own_key_task());

// The first of the generator's published results (philox_test.cpp has all of them).
static_assert(philox(0, 0, 0, 0, 0, 0).word[0] == 0x5f6fb709 && philox(0, 0, 0, 0, 0, 0).word[3] == 0x4f730a48);

// For causal problems with and without a window: tile_kind against every single key.
constexpr bool tile_kind_agrees_with_single_keys() {
  for (int64_t diagonal : {-9, 0, 7})
    for (int64_t left : {int64_t(3), kUnbounded}) {
      Problem p = {};
      p.query_length = 21, p.key_length = 26;
      p.position = {diagonal, left, 0};
      for (int64_t row = 0; row < 21; row += 4)
        for (int64_t key = 0; key < 26; key += 4) {
          const Range rows = {row, min<int64_t>(row + 4, 21)}, keys = {key, min<int64_t>(key + 4, 26)};
          int64_t live = 0;
          for (int64_t i = rows.begin; i < rows.end; ++i)
            for (int64_t j = keys.begin; j < keys.end; ++j) live += attends(p, i, j);
          const TileKind kind = tile_kind(p, rows, keys);
          if ((kind == TileKind::full) != (live == count(rows) * count(keys))) return false;
          if (kind == TileKind::skip && live != 0) return false;
        }
    }
  return true;
}
static_assert(tile_kind_agrees_with_single_keys());

// ---------------------------------------------------------------------------------------------------- at run time
// Every row of every head is in exactly one tile, and no tile has too many rows.
TEST(DeviceIndex, TilesCoverAllRowsOnce) {
  for (int64_t query_length : {1, 2, 7, 21, 63, 64, 65, 130, 200})
    for (int64_t group : {1, 2, 3, 5, 9})
      for (int side : {32, 64})
        for (bool stack : {false, true}) {
          Problem p = {};
          p.batch = 2, p.kv_heads = 2, p.heads = 2 * group, p.query_length = query_length;
          const StackedTiling tiling = query_tiling(p, side, stack);
          std::map<std::tuple<int64_t, int64_t, int64_t>, int> times;
          for (int64_t pair = 0; pair < 4; ++pair)
            for (int64_t index = 0; index < tiles_per_kv_group(tiling); ++index) {
              const StackedTile tile = query_tile(p, tiling, pair, index);
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

TEST(DeviceIndex, EveryBlockHasItsOwnTask) {
  const StackedTiling tiling = {64, 1, 5, 2};
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> seen;
  for (int64_t block = 0; block < 3 * 10 * 4 * 7; ++block) {
    const QueryTask t = query_task(block, tiling, 4, 7);
    EXPECT_TRUE(t.kv_group < 3 && t.tile < 10 && t.panel < 4 && t.split < 7);
    EXPECT_TRUE(seen.insert({t.kv_group, t.tile, t.panel, t.split}).second);
  }
}

TEST(DeviceIndex, PanelsCoverAllColumns) {
  for (int64_t cols = 1; cols < 400; ++cols)
    for (int panel : {64, 128}) {
      int64_t covered = 0;
      for (int64_t index = 0; index < panels_of(cols, panel); ++index) {
        const int width = panel_width(cols, index, panel);
        EXPECT_TRUE(width % 16 == 0 && width >= 16 && width <= panel);
        covered += min<int64_t>(width, cols - index * panel);
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

// The order of Hopper's query tiles: each once, and within a section later rows come first.
TEST(DeviceIndex, Sm90TileOrderHasEveryTileOnce) {
  for (int batch_heads : {1, 2, 7, 24})
    for (int row_tiles : {1, 2, 5})
      for (int section : {1, 2, 3, 24}) {
        if (section > batch_heads) continue;
        const Sm90TileOrder order = {batch_heads, row_tiles, section};
        std::set<std::pair<int, int>> seen;
        Sm90TileIndex before = {0, row_tiles};
        for (int index = 0; index < batch_heads * row_tiles; ++index) {
          const Sm90TileIndex tile = sm90_tile_index(order, index);
          EXPECT_TRUE(tile.batch_head >= 0 && tile.batch_head < batch_heads && tile.row_tile >= 0 &&
                      tile.row_tile < row_tiles);
          EXPECT_TRUE(seen.insert({tile.batch_head, tile.row_tile}).second);
          EXPECT_EQ(sm90_tile_number(order, tile), index);
          if (tile.batch_head / section == before.batch_head / section) {
            EXPECT_LE(tile.row_tile, before.row_tile);
          }
          before = tile;
        }
      }
}

// Which key tiles a query tile needs, and which have masked scores, against every single score.
TEST(DeviceIndex, Sm90KeyTilesOfAQueryTile) {
  for (const int64_t diagonal : {-40, 0, 30})
    for (const int64_t left : {int64_t(0), int64_t(25), kUnbounded})
      for (const int64_t right : {int64_t(0), int64_t(7), kUnbounded}) {
        Problem p = {};
        p.query_length = 150, p.key_length = 170;
        p.position = {diagonal, left, right};
        for (int64_t row = 0; row < p.query_length; row += 32) {
          const Range rows = {row, min(row + 32, p.query_length)};
          constexpr int kKeys = 16;
          const Sm90KeyTiles keys = sm90_key_tiles(p, rows, kKeys);
          for (int t = 0; t * kKeys < p.key_length; ++t) {
            bool any = false, all = true;
            for (int64_t i = rows.begin; i < rows.end; ++i)
              for (int64_t j = t * kKeys; j < (t + 1) * kKeys; ++j) {
                const bool sees = j < p.key_length && attends(p, i, j);
                any |= sees, all &= sees;
              }
            if (any) {
              EXPECT_TRUE(t >= keys.begin && t < keys.end);
            }
            if (t >= keys.begin && t < keys.end) {
              EXPECT_EQ(tile_has_masked(keys, t * kKeys, kKeys), !all);
            }
          }
        }
      }
}

// A swizzled box has every 16-byte chunk once, and the eight rows of a matrix are in different banks.
TEST(DeviceIndex, SwizzleIsAPermutationWithoutBankConflicts) {
  std::set<int> places;
  for (int row = 0; row < 16; ++row)
    for (int byte = 0; byte < 128; byte += 16) {
      EXPECT_EQ(swizzled_byte(row, byte) / 128, row);
      EXPECT_TRUE(places.insert(swizzled_byte(row, byte)).second);
    }
  for (int byte = 0; byte < 128; byte += 16) {
    std::set<int> banks;
    for (int row = 0; row < 8; ++row) banks.insert(swizzled_byte(row, byte) % 128);
    EXPECT_EQ(banks.size(), size_t(8));
  }
}

// The batch entries that share an entry of the mask, each once.
TEST(DeviceIndex, BatchEntriesOfABroadcastMask) {
  for (int form = 0; form < 8; ++form) {
    Problem p = {};
    p.batch_dims = 3, p.batch = 2 * 3 * 4;
    p.batch_sizes[0] = 2, p.batch_sizes[1] = 3, p.batch_sizes[2] = 4;
    int64_t stride = 1;
    for (int d = 2; d >= 0; --d) {
      p.grad_mask.batch_stride[d] = form >> d & 1 ? stride : 0;
      if (form >> d & 1) stride *= p.batch_sizes[d];
    }
    const int64_t own = stored_batches(p, p.grad_mask);
    EXPECT_EQ(own, stride);
    std::set<int64_t> seen;
    for (int64_t o = 0; o < own; ++o)
      for (int64_t s = 0; s < p.batch / own; ++s) {
        const int64_t batch = batch_of_stored(p, p.grad_mask, o, s);
        EXPECT_TRUE(seen.insert(batch).second);
        EXPECT_EQ(offset(p, p.grad_mask, batch, 0), offset(p, p.grad_mask, batch_of_stored(p, p.grad_mask, o, 0), 0));
      }
    EXPECT_EQ(int64_t(seen.size()), p.batch);
  }
}

// key_terms of single keys agrees with row_terms of a whole row.
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
          const int64_t entry = relative_entry(p, row, j);
          uint8_t found = key_terms(p, row, j, element, one);
          if (p.relative_bias.data) {
            one = alibi_bias(row, j) + load_element<T>(p.relative_bias.data, p.relative_bias.dtype,
                                                       offset(p, p.relative_bias, batch, head) + entry);
            if (adds_mask(p)) one += element;
            found = key_state(p, row, j, element, true, one);
          }
          // Kernels look up the block mask apart.
          if (has_blocks(p) && !block_allows(p, offset(p, p.blocks, batch, head), i, j)) found = kMasked;
          ASSERT_EQ(found, state[size_t(j)]) << "row " << i << " key " << j;
          if (state[size_t(j)] == kLive && mask_use(p).additive) {
            ASSERT_EQ(one, additive[size_t(j)]) << "row " << i << " key " << j;
          }
        }
      }
}

TEST(DeviceIndex, KeyTermsAgreeWithRowTerms) {
  for (const Case& c : cases()) {
    if (c.mask == MaskKind::none && c.alibi == AlibiKind::none && c.relative == RelativeKind::none &&
        c.dtype != DType::float32)
      continue;
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

TEST_F(DeviceMasks, AgreeWithCpu) {
  constexpr int64_t kHeads = 3, kRows = 37, kKeys = 83, kScores = kHeads * kRows * kKeys;
  const float slopes[kHeads] = {0.5f, 0.0f, 0.125f};
  const int64_t seed[2] = {0x1234567890abcdef, 7};
  Problem p = {};
  p.batch = 1, p.heads = kHeads, p.query_length = kRows, p.key_length = kKeys, p.dropout_p = 0.3;
  p.position = {kKeys - kRows, 20, 5};
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
