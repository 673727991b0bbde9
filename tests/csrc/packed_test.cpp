// CPU kernels on packed sequences, with and without pages, against the reference kernel on each sequence alone.
#include "packed_check.h"

namespace scaledot::testing {
namespace {

class Packed : public ::testing::TestWithParam<PackedCase> {};

TEST_P(Packed, EverySequenceAgreesWithReference) {
  PackedBuilt b = build(GetParam());
  for (const Built& one : b.sequences) b.oracles.push_back(solve(one));
  check_packed(b, Pass::forward, 3, 1);
  if (forward_only(GetParam())) return;
  prepare_backward(b);
  check_packed(b, Pass::backward, 3, 1);
}

INSTANTIATE_TEST_SUITE_P(Cpu, Packed, ::testing::ValuesIn(packed_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace scaledot::testing
