// GPU kernels on quantised keys and values, run on the host: every number of each format, and the cases of the CPU
// kernels (kernel_cases.h) as packed sequences. device_packed_test.cpp has the cases of packed_case.h.
#include "cuda/generic/quantised.cuh"
#include "device_packed_check.h"

namespace scaledot::testing {
namespace {

// Every byte, at each place among four.
template <class Stored, class Storage>
void expect_exact_numbers() {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t four = byte | (~byte & 0xff) << 8 | (byte ^ 0x80) << 16 | (byte ^ 0x55) << 24;
    uint32_t pairs[2];
    widen_four(four, pairs[0], pairs[1], Type<Stored>{}, Type<Storage>{});
    for (int k = 0; k < 4; ++k) {
      const uint8_t stored = uint8_t(four >> 8 * k);
      const float wanted = widen(__builtin_bit_cast(Stored, stored));
      const float found = widen(Storage{uint16_t(pairs[k / 2] >> 16 * (k % 2))});
      if (wanted != wanted)
        EXPECT_NE(found, found) << "byte " << int(stored);
      else
        EXPECT_EQ(found, wanted) << "byte " << int(stored);
    }
  }
}
template <class Stored>
void expect_exact_numbers_in_both_types() {
  expect_exact_numbers<Stored, Float16>();
  expect_exact_numbers<Stored, BFloat16>();
}

TEST(DeviceQuantised, EveryNumberIsExact) {
  expect_exact_numbers_in_both_types<Float8E4M3>();
  expect_exact_numbers_in_both_types<Float8E5M2>();
  expect_exact_numbers_in_both_types<Int8>();
}

TEST(DeviceQuantised, TheInstructionForE4M3GivesTheSame) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t other = 255 - byte;
    float wanted[2], found[2];
    widen_pair(float16_pair(byte << 8 | other << 24, Type<Float8E4M3>{}), wanted[0], wanted[1]);
    widen_pair(widen_e4m3(uint16_t(byte | other << 8)), found[0], found[1]);
    for (int k = 0; k < 2; ++k) {
      if (wanted[k] != wanted[k])
        EXPECT_NE(found[k], found[k]) << "byte " << byte;
      else
        EXPECT_EQ(found[k], wanted[k]) << "byte " << byte;
    }
  }
}

TEST(DeviceQuantised, BytesAreSelectedInOrder) {
  EXPECT_EQ(select_bytes(0x44332211, 0, kFirstTwo), 0x22001100u);
  EXPECT_EQ(select_bytes(0x44332211, 0, kLastTwo), 0x44003300u);
  EXPECT_EQ(select_bytes(0x44332211, 0x99999999, kLowerFirstTwo), 0x99229911u);
  EXPECT_EQ(select_bytes(0x44332211, 0x99999999, kLowerLastTwo), 0x99449933u);
}

TEST(DeviceQuantised, TableSaysWhyNot) {
  PackedCase c;
  c.common.cache = DType::int8, c.lengths = {{3, 5}};
  const PackedBuilt packed = build(c);
  ASSERT_TRUE(select_cuda(packed.problem, Pass::forward));
  EXPECT_STREQ(select_cuda(packed.problem, Pass::forward)->name, "generic_quantised");
  EXPECT_FALSE(select_cuda(packed.problem, Pass::backward));
  EXPECT_FALSE(select_cuda(build(c.common).problem(), Pass::forward));
}

// Packed sequences have neither attn_mask nor returned weights.
std::vector<PackedCase> cases_of_sequences() {
  std::vector<PackedCase> result;
  for (const Case& c : quantised_cases()) {
    if (c.mask != MaskKind::none) continue;
    PackedCase packed;
    packed.name = c.name, packed.common = c, packed.lengths = {{c.query_length, c.key_length}};
    packed.common.return_weights = false;
    result.push_back(packed);
  }
  return result;
}

class DeviceQuantisedCases : public ::testing::TestWithParam<PackedCase> {};

TEST_P(DeviceQuantisedCases, AgreesWithReference) {
  PackedBuilt b = build(GetParam());
  for (const Built& one : b.sequences) b.oracles.push_back(solve_for_device(one.c));
  const DeviceKernel* kernel = select_cuda(b.problem, Pass::forward);
  ASSERT_TRUE(kernel);
  run_packed(*kernel, b, Pass::forward);
  expect_forward(b);
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceQuantisedCases, ::testing::ValuesIn(cases_of_sequences()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace scaledot::testing
