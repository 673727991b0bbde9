// rounding_limits.h: a kernel with the permitted rounding stays within the limits, one with coarser rounding does not.
#include "rounding_limits.h"

#include <algorithm>
#include <utility>

#include "kernel_cases.h"
#include "kernel_check.h"

namespace scaledot::testing {
namespace {

// Rounds to nearest with `bits` bits of significand: 8 for bfloat16, 24 for float32.
double rounded(double x, int bits) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::ilogb(x) + 1 - bits);
  return std::nearbyint(x / unit) * unit;
}

// The errors of a case, relative to their limits, if P and dS are rounded to `bits` bits before exact products.
struct Ratios {
  double output, grad_query, grad_key, grad_value;

  double largest() const { return std::max({output, grad_query, grad_key, grad_value}); }
};

// The elements as the dtype stores them.
std::vector<double> stored(std::vector<double> values, DType dtype) {
  for (double& x : values) {
    double storage = 0;
    store_element(&storage, dtype, 0, x);
    x = load_element<double>(&storage, dtype, 0);
  }
  return values;
}

Ratios ratios_with_rounding(Case c, int bits) {
  c.return_weights = true;
  c.grad_weights = false;
  const Oracle oracle = solve(c);
  const Built& b = oracle.backward;
  Problem p = b.problem();

  // grad_mask receives dS if it has an element for each score, with or without a mask.
  TestTensor grad_scores(DType::float64, c.batch, p.heads, p.query_length, p.key_length);
  p.grad_mask = grad_scores.view();
  run(kReferenceKernel, p, Pass::backward);

  const std::vector<double> weights = b.weights.values(), grads = grad_scores.values();
  const std::vector<double> query = b.query.values(), key = b.key.values(), value = b.value.values();
  const std::vector<double> grad_output = b.grad_output.values();
  std::vector<double> output(grad_output.size(), 0.0), grad_query(query.size(), 0.0), grad_key(key.size(), 0.0),
      grad_value(value.size(), 0.0);
  for (int64_t k = 0; k < int64_t(weights.size()); ++k) {
    const int64_t row = k / p.key_length, head = row / p.query_length;
    const int64_t column = head / (p.heads / p.kv_heads) * p.key_length + k % p.key_length;
    const double w = rounded(weights[size_t(k)], bits), dx = p.scale * rounded(grads[size_t(k)], bits);
    for (int64_t d = 0; d < p.value_dim; ++d) {
      const size_t of_row = size_t(row * p.value_dim + d), of_key = size_t(column * p.value_dim + d);
      output[of_row] += w * value[of_key];
      grad_value[of_key] += w * grad_output[of_row];
    }
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const size_t of_row = size_t(row * p.head_dim + d), of_key = size_t(column * p.head_dim + d);
      grad_query[of_row] += dx * key[of_key];
      grad_key[of_key] += dx * query[of_row];
    }
  }
  const auto ratio = [&](const std::vector<double>& found, const TestTensor& exact, const std::vector<double>& limit) {
    return worst_of(stored(found, c.dtype), exact.values(), c.dtype, limit).ratio;
  };
  return {ratio(output, b.output, oracle.limits.output), ratio(grad_query, b.grad_query, oracle.limits.grad_query),
          ratio(grad_key, b.grad_key, oracle.limits.grad_key),
          ratio(grad_value, b.grad_value, oracle.limits.grad_value)};
}

// Cases that this file does not compute: slopes of softcap and masked_score, NaN and inf, shared keys.
bool is_simple(const Case& c) {
  return c.softcap == 0 && c.masked_score == -kInfinity && !c.nan_in_masked && !c.nan_in_live_key &&
         !c.nan_in_live_query && !c.nan_in_live_value && !c.inf_in_live_key && !c.key_broadcast.batch &&
         !c.key_broadcast.head && c.grad_output && c.wants_query && c.wants_key && c.wants_value;
}

TEST(RoundingLimits, Bfloat16ProductsStayWithinTheLimits) {
  double worst = 0;
  int tried = 0;
  for (const Case& c : cases()) {
    if (c.dtype != DType::bfloat16 || !is_simple(c)) continue;
    const double ratio = ratios_with_rounding(c, 8).largest();
    EXPECT_LE(ratio, 1) << c.name;
    worst = max(worst, ratio);
    ++tried;
  }
  EXPECT_GE(tried, 100);
  EXPECT_GE(worst, 0.4) << "the limits are looser than the rounding that they allow";
}

// Each product alone exceeds the limits of this case of the library.
void expect_beyond_limits(const char* feature, DType dtype, int bits) {
  const std::string name = std::string(feature) + "_" + dtype_name(dtype);
  const auto c = std::find_if(cases().begin(), cases().end(), [&](const Case& k) { return k.name == name; });
  ASSERT_NE(c, cases().end()) << name;
  const Ratios ratios = ratios_with_rounding(*c, bits);
  EXPECT_GT(ratios.output, 1) << name;
  EXPECT_GT(ratios.grad_query, 1) << name;
  EXPECT_GT(ratios.grad_key, 1) << name;
  EXPECT_GT(ratios.grad_value, 1) << name;
}

// Each product alone, in every dtype: with fewer bits than a kernel of the dtype may use, results exceed the limits.
TEST(RoundingLimits, CoarserProductsExceedTheLimits) {
  constexpr const char* kFeatures[] = {"plain", "causal",     "window", "alibi", "bool_mask",
                                       "bias",  "float_mask", "gqa",    "scale", "value_dim"};
  constexpr struct {
    DType dtype;
    int bits;
  } kCoarse[] = {{DType::bfloat16, 5}, {DType::float16, 8}, {DType::float32, 17}, {DType::float64, 46}};
  for (const char* feature : kFeatures)
    for (const auto& [dtype, bits] : kCoarse) expect_beyond_limits(feature, dtype, bits);
}

// All scores of a row are the mask's lowest number, beside which ALiBi and the dot product vanish.
TEST(RoundingLimits, ScoresThatEqualABiasHaveNoError) {
  for (const auto& [dtype, bits] : {std::pair{DType::float16, 8}, {DType::float32, 17}, {DType::float64, 46}})
    expect_beyond_limits("alibi_lowest_bias", dtype, bits);
}

}  // namespace
}  // namespace scaledot::testing
