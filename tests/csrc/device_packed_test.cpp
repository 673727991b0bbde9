// GPU kernels on packed sequences, with and without pages, run on the host. Every sequence is compared with the
// reference kernel in float64 on that sequence alone.
#include "device_packed_check.h"

namespace scaledot::testing {
namespace {

// Compares the gradient of relative_bias with those of the sequences: one after the other, or their sum.
void expect_relative_gradient(const PackedBuilt& b) {
  if (!b.grad_relative_bias.present()) return;
  const std::vector<double> found = b.grad_relative_bias.values();
  std::vector<double> wanted(found.size()), limits(found.size());
  size_t k = 0;
  for (const Oracle& oracle : b.oracles) {
    const std::vector<double> own = oracle.backward.grad_relative_bias.values();
    for (size_t e = 0; e < own.size(); ++e, ++k) {
      double &sum = wanted[k % found.size()], &limit = limits[k % found.size()];
      limit = std::sqrt(square(limit) + square(oracle.limits.grad_relative_bias[e]) +
                        square(kDeviations * unit_roundoff(b.grad_relative_bias.dtype()) * sum));
      sum += own[e];
    }
  }
  EXPECT_TRUE(b.grad_relative_bias.intact());
  EXPECT_EQ(worst_of(found, wanted, b.grad_relative_bias.dtype(), limits).wrong, size_t(0));
}

class DevicePacked : public ::testing::TestWithParam<PackedCase> {};

TEST_P(DevicePacked, EverySequenceAgreesWithReference) {
  const PackedCase& c = GetParam();
  PackedBuilt b = build(c);
  solve_sequences(b);
  const DeviceKernel* kernel = &cuda_kernels().kernels[c.common.cache == DType::none ? 1 : 2];
  ASSERT_STREQ(kernel->name, c.common.cache == DType::none ? "generic" : "generic_quantised");
  ASSERT_EQ(kernel->why_not(b.problem, Pass::forward), nullptr);
  run_packed(*kernel, b, Pass::forward);
  expect_forward(b);
  if (forward_only(c)) return;

  prepare_backward(b);
  b.problem.grad_relative_bias = b.grad_relative_bias.view();
  if (b.grad_mask.present() && c.common.mask_broadcast.head) {
    // The op asks for the gradient of each head.
    EXPECT_STREQ(kernel->why_not(b.problem, Pass::backward),
                 "the sequences are packed, and the gradient of attn_mask is a sum over heads");
    return;
  }
  ASSERT_EQ(kernel->why_not(b.problem, Pass::backward), nullptr);
  run_packed(*kernel, b, Pass::backward);
  expect_backward(b);
  expect_relative_gradient(b);
}

INSTANTIATE_TEST_SUITE_P(Cuda, DevicePacked, ::testing::ValuesIn(packed_cases()),
                         [](const auto& info) { return info.param.name; });

// Lengths and pages are not validated on a GPU. Bad values give wrong results, but never access other memory, which the
// simulation would report.
TEST(DevicePackedBounds, BadLengthsAndPagesStayInBounds) {
  for (int variant = 0; variant < 9; ++variant) {
    SCOPED_TRACE(variant);
    PackedCase c;
    c.common.lower_right = true, c.lengths = {{37, 53}, {3, 40}, {30, 30}};
    const bool paged = variant == 3 || variant == 8;
    c.page_size = paged ? 16 : 0;
    if (variant >= 4) {  // the same for the kernels for Hopper, where TMA copies whole tiles
      c.common.dtype = DType::bfloat16, c.common.order = MemoryOrder::aligned;
      c.common.head_dim = c.common.value_dim = 64;
    }
    PackedBuilt b = build(c);
    if (variant % 4 == 0 && !paged) b.cu_seq_q = {-5, 60, 20, 1000};
    if (variant % 4 == 1) b.cu_seq_k = {7, 500, -3, 90};
    if (variant % 4 == 2) b.problem.query_length = 9, b.problem.key_length = 9;
    if (paged) std::fill(b.table.begin(), b.table.end(), 1 << 20), b.used = {10000, -1, 30};
    if (paged) b.table[0] = -7;
    if (variant == 7) b.cu_seq_q = {66, 0, 70, 0}, b.cu_seq_k = {100, 0, 123, 0};
    EXPECT_STREQ(select_cuda(b.problem, Pass::forward)->name, variant < 4 ? "generic" : "sm90");
    EXPECT_NO_THROW(run_packed(*select_cuda(b.problem, Pass::forward), b, Pass::forward));
    if (paged) continue;  // they have no backward
    ask_for_gradients(b);
    EXPECT_STREQ(select_cuda(b.problem, Pass::backward)->name, variant < 4 ? "generic" : "sm90");
    EXPECT_NO_THROW(run_packed(*select_cuda(b.problem, Pass::backward), b, Pass::backward));
  }
}

}  // namespace
}  // namespace scaledot::testing
