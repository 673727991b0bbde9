// core/mask.h against definitions written out element by element.
#include <gtest/gtest.h>

#include "core/mask.h"
#include "problem_builder.h"

namespace scaledot::testing {
namespace {

// A problem with positions only.
Problem positions(int64_t query_length, int64_t key_length, int64_t diagonal, int64_t left, int64_t right) {
  Problem p = {};
  p.query_length = query_length, p.key_length = key_length;
  p.position = {diagonal, left, right};
  return p;
}

// Whether row i attends to key j, from the definitions.
bool defined(const Problem& p, int64_t i, int64_t j) {
  const PositionMask& m = p.position;
  const int64_t distance = j - (i + m.diagonal);
  return 0 <= j && j < p.key_length && -m.window_left <= distance && distance <= m.window_right;
}

std::vector<Problem> all_positions() {
  std::vector<Problem> problems;
  constexpr int64_t kSizes[][2] = {{1, 1}, {7, 12}, {12, 7}, {20, 20}, {3, 30}, {30, 3}};
  constexpr int64_t kSides[] = {0, 2, 9, kUnbounded};
  for (const auto& size : kSizes)
    for (int64_t diagonal : {int64_t(0), size[1] - size[0]})
      for (int64_t left : kSides)
        for (int64_t right : kSides) problems.push_back(positions(size[0], size[1], diagonal, left, right));
  return problems;
}

TEST(Mask, AttendsFollowsTheDefinition) {
  for (const Problem& p : all_positions())
    for (int64_t i = 0; i < p.query_length; ++i)
      for (int64_t j = 0; j < p.key_length; ++j)
        ASSERT_EQ(attends(p, i, j), defined(p, i, j))
            << i << ", " << j << " of " << p.query_length << " x " << p.key_length << ", diagonal "
            << p.position.diagonal << ", window " << p.position.window_left << ", " << p.position.window_right;
}

TEST(Mask, RowKeysAreNonDecreasing) {
  for (const Problem& p : all_positions())
    for (int64_t i = 0; i + 1 < p.query_length; ++i) {
      const Range here = row_keys(p, i), next = row_keys(p, i + 1);
      ASSERT_LE(here.begin, next.begin);
      ASSERT_LE(here.end, next.end);
    }
}

// Ranges and kinds of tiles of every size: skip only if no row attends to any key, full only if every row attends to
// all.
TEST(Mask, KeyRangeAndTileKindAgreeWithElements) {
  for (const Problem& p : all_positions())
    for (int64_t first = 0; first < p.query_length; first += 3)
      for (int64_t last = first + 1; last <= p.query_length; last += 4)
        for (int64_t begin = 0; begin < p.key_length; begin += 3)
          for (int64_t end = begin + 1; end <= p.key_length; end += 5) {
            int64_t seen = 0;
            for (int64_t i = first; i < last; ++i)
              for (int64_t j = begin; j < end; ++j) seen += defined(p, i, j);
            const TileKind kind = tile_kind(p, {first, last}, {begin, end});
            const bool full = seen == (last - first) * (end - begin);
            ASSERT_EQ(kind == TileKind::full, full);
            if (kind == TileKind::skip) {
              ASSERT_EQ(seen, 0);
            }
            const Range range = key_range(p, {first, last});
            if (seen) {
              ASSERT_EQ(kind == TileKind::skip, false);
              ASSERT_TRUE(range.begin < end && begin < range.end);
            }
          }
}

TEST(Mask, CausalSkipsHalfTheTiles) {
  const Problem p = positions(512, 512, 0, kUnbounded, 0);
  int skipped = 0, full = 0;
  for (int64_t row = 0; row < 512; row += 64)
    for (int64_t key = 0; key < 512; key += 64) {
      const TileKind kind = tile_kind(p, {row, row + 64}, {key, key + 64});
      skipped += kind == TileKind::skip;
      full += kind == TileKind::full;
    }
  EXPECT_EQ(skipped, 28);
  EXPECT_EQ(full, 28);
}

// States and additive terms of one row, for every kind and dtype of mask, and ranges that start anywhere.
TEST(Mask, RowTermsFollowTheDefinition) {
  constexpr DType kDTypes[] = {DType::boolean, DType::float32, DType::float64, DType::bfloat16, DType::float16};
  for (DType dtype : kDTypes)
    for (MemoryOrder order : {MemoryOrder::contiguous, MemoryOrder::inner2, MemoryOrder::transposed})
      for (double masked_score : {-kInfinity, -2.5})
        for (bool alibi : {false, true}) {
          Case c;
          c.query_length = 11, c.key_length = 23, c.causal = true, c.lower_right = true, c.window_left = 9;
          c.masked_score = masked_score, c.order = order;
          c.alibi = alibi ? AlibiKind::batch_heads : AlibiKind::none;
          c.mask = dtype == DType::boolean ? MaskKind::boolean : MaskKind::additive_with_inf;
          c.mask_dtype = dtype;
          const Built b = build(c);
          const Problem p = b.problem();
          const TensorView& m = p.attn_mask;
          for (int64_t batch = 0; batch < p.batch; ++batch)
            for (int64_t head = 0; head < p.heads; ++head)
              for (int64_t i = 0; i < p.query_length; ++i) {
                const Range keys = {i % 5, c.key_length - i % 3};
                double additive[23];
                uint8_t state[23];
                row_terms<double>(p, batch, head, i, keys, additive, state);
                for (int64_t j = keys.begin; j < keys.end; ++j) {
                  const double mask = load_element<double>(
                      m.data, m.dtype, offset(p, m, batch, head) + i * m.row_stride + j * m.col_stride);
                  uint8_t expected = kLive;
                  if (dtype == DType::boolean && mask == 0) expected = masked_score == -kInfinity ? kMasked : kReplaced;
                  if (dtype != DType::boolean && mask == -kInfinity) expected = kMasked;
                  if (!attends(p, i, j)) expected = kMasked;
                  ASSERT_EQ(state[j - keys.begin], expected);
                  double bias = dtype == DType::boolean ? 0 : mask;
                  if (alibi)
                    bias -= load_element<double>(p.alibi_slopes.data, p.alibi_slopes.dtype,
                                                 offset(p, p.alibi_slopes, batch, head)) *
                            std::abs(double(j - i - p.position.diagonal));
                  if (mask_use(p).additive && expected == kLive) {
                    ASSERT_NEAR(additive[j - keys.begin], bias, 1e-12);
                  }
                }
              }
        }
}

// relative_bias of each score, also of a problem from which the entries that no score reads are left out.
TEST(Mask, RelativeBiasFollowsTheDistance) {
  for (DistanceRange range : {DistanceRange{-3, 4}, {-100, 100}, {2, 30}, {-30, -2}, {50, 60}, {0, 0}})
    for (bool lower_right : {false, true})
      for (int64_t window : {int64_t(2), kUnbounded}) {
        Case c;
        c.query_length = 11, c.key_length = 23, c.lower_right = lower_right, c.window_left = c.window_right = window;
        c.relative = RelativeKind::batch_heads, c.relative_range = range;
        const Built b = build(c);
        const Problem p = b.problem();
        Problem trimmed = p;
        trim_relative_bias(trimmed);
        EXPECT_LE(trimmed.relative_range.high - trimmed.relative_range.low, c.query_length + c.key_length - 2);
        for (int64_t batch = 0; batch < p.batch; ++batch)
          for (int64_t head = 0; head < p.heads; ++head)
            for (int64_t i = 0; i < p.query_length; ++i) {
              double additive[23], again[23];
              row_terms<double>(p, batch, head, i, {0, c.key_length}, additive, nullptr);
              row_terms<double>(trimmed, batch, head, i, {0, c.key_length}, again, nullptr);
              for (int64_t j = 0; j < c.key_length; ++j) {
                if (!attends(p, i, j)) continue;
                const int64_t distance = j - i - p.position.diagonal;
                const int64_t entry = min(max(distance, range.low), range.high) - range.low;
                const double bias =
                    element_ptr<float>(p, p.relative_bias, batch, head)[entry];  // float32, as for every 32-bit problem
                ASSERT_EQ(additive[j], bias);
                ASSERT_EQ(again[j], bias);
              }
            }
      }
}

// Whether the block mask shows key j to row i, from the definition.
bool shown_by_definition(const Built& b, int64_t batch, int64_t head, int64_t i, int64_t j) {
  const Case& c = b.c;
  const TensorView& v = b.block_view;
  const int64_t at = batch * v.batch_stride[0] + head * v.head_stride + i / c.block_rows * v.row_stride;
  const int32_t number = b.blocks[size_t(at + j / c.block_keys)];
  if (number < 0) return number == kFullBlock;
  const int64_t words = (c.block_keys + 63) / 64, bit = j % c.block_keys;
  return b.block_words[size_t((number * c.block_rows + i % c.block_rows) * words + bit / 64)] >> (bit % 64) & 1;
}

std::vector<Built> block_masks() {
  std::vector<Built> masks;
  for (int64_t rows : {1, 4, 30})
    for (int64_t keys : {1, 10, 64, 90})
      for (bool shared : {false, true}) {
        Case c;
        c.query_length = 13, c.key_length = 150, c.block_rows = rows, c.block_keys = keys;
        c.block_broadcast.head = c.block_broadcast.batch = shared;
        masks.push_back(build(c));
      }
  return masks;
}

// Tiles of both heads together, and states of rows, that begin and end anywhere.
TEST(BlockMask, TilesAndRowsFollowTheDefinition) {
  for (const Built& b : block_masks()) {
    const Problem p = b.problem();
    for (int64_t batch = 0; batch < p.batch; ++batch)
      for (int64_t first = 0; first < p.query_length; first += 5)
        for (int64_t begin = 0; begin < p.key_length; begin += 7) {
          const Range heads = {0, p.heads}, rows = {first, min<int64_t>(first + 3, p.query_length)},
                      keys = {begin, min<int64_t>(begin + 70, p.key_length)};
          int64_t seen = 0, total = 0, lowest = keys.end, highest = keys.begin;
          for (int64_t head = 0; head < p.heads; ++head)
            for (int64_t i = rows.begin; i < rows.end; ++i) {
              uint8_t state[70];
              double additive[70];
              row_terms<double>(p, batch, head, i, keys, additive, state);
              for (int64_t j = keys.begin; j < keys.end; ++j, ++total) {
                const bool shown = shown_by_definition(b, batch, head, i, j);
                ASSERT_EQ(state[j - keys.begin] == kLive, shown);
                ASSERT_EQ(block_allows(p, offset(p, p.blocks, batch, head), i, j), shown);
                seen += shown;
                if (shown) lowest = min(lowest, j), highest = max(highest, j + 1);
              }
            }
          const TileKind kind = block_tile_kind(p, batch, heads, rows, keys);
          if (kind == TileKind::skip) {
            ASSERT_EQ(seen, 0);
          } else if (kind == TileKind::full) {
            ASSERT_EQ(seen, total);
          }
          const Range range = block_keys_of(p, batch, heads, rows, keys);
          ASSERT_EQ(range.begin < range.end, kind != TileKind::skip);
          ASSERT_TRUE(seen == 0 || (range.begin <= lowest && highest <= range.end));
        }
  }
}

// On a GPU nobody checks the numbers. None makes a kernel read outside of the bits.
TEST(BlockMask, ANumberWithoutBitsIsAnEmptyBlock) {
  for (int32_t number : {-100, -3, 5, 1 << 30}) {
    const uint64_t bits[5 * 2] = {};
    Problem p = {};
    p.blocks.data = &number;
    p.block_rows = 2, p.block_keys = 8;
    p.block_bits = {bits, 5};
    EXPECT_EQ(block_tile_kind(p, 0, {0, 1}, {0, 2}, {0, 8}), TileKind::skip) << number;
    EXPECT_FALSE(block_allows(p, 0, 1, 3));
  }
}

TEST(Mask, SoftcapIsBoundedAndItsSlopeMatchesDifferences) {
  for (double softcap : {0.5, 3.0, 50.0})
    for (double x = -40; x <= 40; x += 0.37) {
      const double h = 1e-5, numeric = (capped(x + h, softcap) - capped(x - h, softcap)) / (2 * h);
      EXPECT_LE(std::abs(capped(x, softcap)), softcap);
      EXPECT_NEAR(capped_slope(capped(x, softcap), softcap), numeric, 1e-8);
    }
}

}  // namespace
}  // namespace scaledot::testing
