// core/philox.h: the generator's published test vectors, and the properties that dropout relies on.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "core/philox.h"
#include "core/varlen.h"

namespace scaledot {
namespace {

// Known answers of philox4x32 with 7 rounds, from the kat_vectors of the authors' Random123 library.
TEST(Philox, KnownAnswers) {
  struct {
    uint32_t counter[4], key[2], answer[4];
  } const vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const auto& v : vectors) {
    const PhiloxWords w = philox(v.key[0], v.key[1], v.counter[0], v.counter[1], v.counter[2], v.counter[3]);
    for (int k = 0; k < 4; ++k) EXPECT_EQ(w.word[k], v.answer[k]);
  }
}

Problem dropout_problem(const int64_t* seed, double dropout_p) {
  Problem p = {};
  p.heads = 3;
  p.dropout_p = dropout_p;
  p.dropout_seed = seed;
  return p;
}

TEST(Dropout, GroupFunctionAgreesWithSingleColumns) {
  const int64_t seed[2] = {-0x123456789abcdef, 77};
  const Problem p = dropout_problem(seed, 0.37);
  for (int64_t row = 0; row < 5; ++row) {
    const DropoutRow stream = dropout_row(p, 1, 2, row);
    for (int64_t group = 0; group < 6; ++group) {
      uint8_t keep[kDropoutGroup];
      dropout_keep_group(stream, group, keep);
      for (int64_t k = 0; k < kDropoutGroup; ++k)
        ASSERT_EQ(keep[k] != 0, dropout_keeps(stream, group * kDropoutGroup + k))
            << "column " << group * kDropoutGroup + k;
    }
  }
}

// Each group of dropout_batch batches draws the same mask as a separate call with its seed.
TEST(Dropout, EachGroupOfBatchesUsesItsSeed) {
  const int64_t seeds[3][2] = {{11, 1}, {-12, 2}, {13, 3}};
  Problem all = dropout_problem(seeds[0], 0.4);
  all.batch = 6;
  all.dropout_batch = 2;
  for (int64_t batch = 0; batch < all.batch; ++batch) {
    Problem alone = dropout_problem(seeds[batch / 2], 0.4);
    alone.batch = alone.dropout_batch = 2;
    for (int64_t column = 0; column < 200; ++column)
      ASSERT_EQ(dropout_keeps(dropout_row(all, batch, 1, 5), column),
                dropout_keeps(dropout_row(alone, batch % 2, 1, 5), column));
  }
}

// Sequences of a packed problem count within their group.
TEST(Dropout, EachGroupOfSequencesUsesItsSeed) {
  const int64_t seeds[3][2] = {{11, 1}, {-12, 2}, {13, 3}};
  const int32_t cu_seq[] = {0, 3, 5, 6, 6, 9, 12};
  Problem packed = dropout_problem(seeds[0], 0.4);
  packed.batch = 6;
  packed.query_length = packed.key_length = 3;
  packed.packed.cu_seq_q = packed.packed.cu_seq_k = {cu_seq, /*wide=*/false};
  packed.packed.total_q = packed.packed.total_k = 12;
  for (const int64_t share : {int64_t(6), int64_t(3), int64_t(2)}) {
    packed.dropout_batch = share;
    for (int64_t b = 0; b < packed.batch; ++b) {
      const int64_t seed[2] = {seeds[b / share][0], seeds[b / share][1] + b % share};
      const Problem alone = dropout_problem(seed, 0.4), one = sequence(packed, b);
      for (int64_t column = 0; column < 200; ++column)
        ASSERT_EQ(dropout_keeps(dropout_row(one, 0, 1, 5), column), dropout_keeps(dropout_row(alone, 0, 1, 5), column))
            << "sequence " << b << ", " << share << " a seed";
    }
  }
}

// The definition: which word of which counter a column reads.
TEST(Dropout, EachColumnReadsItsDefinedWord) {
  const int64_t seed[2] = {0x0fedcba987654321, 5};
  const Problem p = dropout_problem(seed, 0.5);
  const DropoutRow stream = dropout_row(p, 2, 1, 9);
  for (int64_t column = 0; column < 1000; ++column) {
    const uint32_t counter = uint32_t(column / 64 * 16 + column % 16);
    const PhiloxWords w = philox(0x87654321, 0x0fedcba9, counter, 9, 2 * 3 + 1, 5);
    ASSERT_EQ(dropout_keeps(stream, column), w.word[column % 64 / 16] >= 0x80000000u) << column;
  }
}

TEST(Dropout, KeepsTheExpectedShare) {
  const int64_t seed[2] = {42, 0};
  for (double dropout_p : {0.0, 0.01, 0.3, 0.9, 0.999}) {
    const Problem p = dropout_problem(seed, dropout_p);
    constexpr int64_t kRows = 200, kColumns = 512;
    int64_t kept = 0;
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t column = 0; column < kColumns; ++column) kept += dropout_keeps(dropout_row(p, 0, 0, row), column);
    const double n = kRows * kColumns, deviation = std::sqrt(n * dropout_p * (1 - dropout_p));
    EXPECT_NEAR(double(kept), n * (1 - dropout_p), 5 * deviation) << "dropout_p " << dropout_p;
  }
}

// Changing any of seed, offset, batch, head and row gives another mask.
TEST(Dropout, DifferentStreamsGiveDifferentMasks) {
  std::set<std::vector<bool>> masks;
  int streams = 0;
  for (int64_t low : {1, 2})
    for (int64_t high : {0, 1})
      for (int64_t offset : {0, 1})
        for (int64_t batch : {0, 1})
          for (int64_t head : {0, 1, 2})
            for (int64_t row : {0, 1}) {
              const int64_t seed[2] = {low + (high << 32), offset};
              const Problem p = dropout_problem(seed, 0.5);
              std::vector<bool> mask;
              for (int64_t column = 0; column < 128; ++column)
                mask.push_back(dropout_keeps(dropout_row(p, batch, head, row), column));
              masks.insert(mask);
              ++streams;
            }
  EXPECT_EQ(int(masks.size()), streams);
}

TEST(Dropout, ThresholdIsTheProbabilityTimesTwoTo32) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(0.25), 0x40000000u);
  EXPECT_EQ(dropout_threshold(0x1.fffffep-1), 0xffffff00u);
}

}  // namespace
}  // namespace scaledot
