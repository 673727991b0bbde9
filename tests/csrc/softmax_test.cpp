// core/softmax.h: the online softmax of a row, in pieces of any size, equals the softmax of the whole row.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/softmax.h"

namespace scaledot {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One pass over the scores, as the kernels do it, piece by piece.
RowState<double> online(const std::vector<double>& scores, size_t piece) {
  RowState<double> row = empty_row<double>();
  for (size_t start = 0; start < scores.size(); start += piece) {
    const size_t end = min(start + piece, scores.size());
    double highest = row.maximum;
    for (size_t j = start; j < end; ++j) highest = max(highest, scores[j]);
    if (row.sum != 0) row.sum *= exp(row.maximum - highest);
    row.maximum = highest;
    for (size_t j = start; j < end; ++j) row.sum += exp(scores[j] - shift(highest));
  }
  return row;
}

TEST(Softmax, PiecesEqualTheWholeRow) {
  std::vector<double> scores;
  for (int j = 0; j < 97; ++j) scores.push_back(j % 7 == 3 ? -kInfinity : 30 * std::sin(j * 1.7));
  double direct = 0;
  for (double s : scores) direct += std::exp(s);
  for (size_t piece : {1, 2, 5, 16, 97, 200}) {
    const RowState<double> row = online(scores, piece);
    EXPECT_NEAR(logsumexp(row), std::log(direct), 1e-13);
    double total = 0;
    for (double s : scores) total += exp(s - row.maximum) * normaliser(row);
    EXPECT_NEAR(total, 1.0, 1e-13);
  }
}

TEST(Softmax, EmptyRowHasZeroSumAndMinusInfinityLse) {
  for (const std::vector<double>& scores : {std::vector<double>{}, std::vector<double>(5, -kInfinity)}) {
    const RowState<double> row = online(scores, 2);
    EXPECT_EQ(row.sum, 0.0);
    EXPECT_EQ(normaliser(row), 0.0);
    EXPECT_EQ(logsumexp(row), -kInfinity);
    EXPECT_EQ(shift(row.maximum), 0.0);
  }
}

TEST(Softmax, LargeScoresDoNotOverflow) {
  EXPECT_NEAR(logsumexp(online({1e4, 1e4, 1e4}, 1)), 1e4 + std::log(3.0), 1e-9);
  EXPECT_NEAR(logsumexp(online({-1e300, -1e300}, 1)), -1e300, 1e285);
}

TEST(Softmax, NaNStaysNaN) {
  const RowState<double> row = {0.0, std::nan("")};
  EXPECT_TRUE(std::isnan(normaliser(row)));
  EXPECT_TRUE(std::isnan(logsumexp(row)));
}

}  // namespace
}  // namespace scaledot
