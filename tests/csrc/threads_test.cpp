// With more threads than tasks, the backward computes dQ apart (cpu/simd/attention/backward.h). The forward's tiles
// depend on the number of workers (forward_tiling in query_tiles.h). The bits must be the same.
#include "kernel_cases.h"
#include "kernel_check.h"

namespace scaledot::testing {
namespace {

// Shapes that are split along the keys, and along the rows.
Case many_keys() {
  Case c;
  c.batch = {1}, c.heads = c.kv_heads = 1, c.query_length = 130, c.key_length = 2400, c.head_dim = 24, c.value_dim = 8;
  return c;
}
Case heads_that_share_keys() {
  Case c;
  c.batch = {1}, c.heads = 10, c.kv_heads = 1, c.query_length = 130, c.key_length = 300, c.head_dim = 24,
  c.value_dim = 8;
  return c;
}

class ManyThreads : public ::testing::TestWithParam<std::tuple<std::string, DType, bool>> {};

void expect_same_bits(Case c, const std::tuple<std::string, DType, bool>& param) {
  const auto& [name, dtype, causal] = param;
  const Kernel& kernel = kernel_by_name(name);
  c.dtype = dtype, c.causal = c.lower_right = causal, c.dropout_p = causal ? 0.2 : 0;
  Built one = build(c);
  ASSERT_EQ(kernel.why_not(one.problem(), Pass::backward), nullptr);
  add_gradients(one);
  run(kReferenceKernel, one.problem(), Pass::forward);
  run(kernel, one.problem(), Pass::backward);
  for (int workers : {17, 40}) {
    Built many = one;
    for (TestTensor* t : {&many.grad_query, &many.grad_key, &many.grad_value}) t->fill_with_poison();
    run(kernel, many.problem(), Pass::backward, workers);
    expect_same_bytes("grad_query", many.grad_query, one.grad_query);
    expect_same_bytes("grad_key", many.grad_key, one.grad_key);
    expect_same_bytes("grad_value", many.grad_value, one.grad_value);
  }
}

TEST_P(ManyThreads, SameBitsWhenKeysAreSplit) { expect_same_bits(many_keys(), GetParam()); }
TEST_P(ManyThreads, SameBitsWhenRowsAreSplit) { expect_same_bits(heads_that_share_keys(), GetParam()); }

// Long tiles for one worker and two, short ones for five, and tapered ones for 40.
TEST_P(ManyThreads, SameBitsWhenWorkersChooseTheTiles) {
  const auto& [name, dtype, causal] = GetParam();
  Case c;
  c.batch = {1}, c.heads = c.kv_heads = 8, c.query_length = 500, c.key_length = 270, c.head_dim = c.value_dim = 24;
  c.dtype = dtype, c.causal = c.lower_right = causal, c.dropout_p = causal ? 0.2 : 0;
  std::vector<Case> cases(3, c);
  cases[1].window_left = 150, cases[1].window_right = 20, cases[1].nan_in_masked = true;
  cases[2].mask = MaskKind::boolean, cases[2].empty_rows = cases[2].nan_in_masked = cases[2].return_weights = true;
  for (const Case& one : cases) {
    Built done = build(one);
    const Kernel& kernel = kernel_by_name(name);
    ASSERT_EQ(kernel.why_not(done.problem(), Pass::forward), nullptr);
    run(kernel, done, Pass::forward);
    for (int workers : {2, 5, 40}) expect_same_results(kernel, done, Pass::forward, workers);
  }
}

std::vector<std::tuple<std::string, DType, bool>> taken() {
  std::vector<std::tuple<std::string, DType, bool>> list;
  for (int k = 0; k < cpu_kernels().count; ++k)
    for (DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
      Case c;
      c.dtype = dtype;
      const Kernel& kernel = cpu_kernels().kernels[k];
      if (kernel.why_not(build(c, /*values=*/false).problem(), Pass::backward)) continue;
      for (bool causal : {false, true}) list.emplace_back(kernel.name, dtype, causal);
    }
  return list;
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::string, DType, bool>>& info) {
  const auto& [kernel, dtype, causal] = info.param;
  return kernel + "_" + dtype_name(dtype) + (causal ? "_causal" : "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, ManyThreads, ::testing::ValuesIn(taken()), name_of);

}  // namespace
}  // namespace scaledot::testing
