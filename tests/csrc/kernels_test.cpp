// Every kernel of the CPU table that takes a case, forward and backward, against the reference kernel in float64.
#include "kernel_cases.h"
#include "kernel_check.h"

namespace scaledot::testing {
namespace {

class Kernels : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(Kernels, AgreesWithReference) {
  const auto& [name, c] = GetParam();
  if (!check_kernel(kernel_by_name(name), c)) GTEST_SKIP() << name << " does not take this case";
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (int k = 0; k < cpu_kernels().count; ++k) names.push_back(cpu_kernels().kernels[k].name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Kernels,
                         ::testing::Combine(::testing::ValuesIn(kernel_names()), ::testing::ValuesIn(cases())),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param).name; });

}  // namespace
}  // namespace scaledot::testing
