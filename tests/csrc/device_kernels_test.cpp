// Every GPU kernel, forward and backward, run on the host against the reference kernel in float64.
#include "device_check.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

class DeviceKernels : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

const DeviceKernel& device_kernel(const std::string& name) {
  const DeviceKernelTable table = cuda_kernels();
  for (int k = 0; k < table.count; ++k)
    if (name == table.kernels[k].name) return table.kernels[k];
  throw std::runtime_error("no kernel " + name);
}

TEST_P(DeviceKernels, AgreesWithReference) {
  const auto& [name, c] = GetParam();
  if (!check_device_kernel(device_kernel(name), c)) GTEST_SKIP() << name << " does not take this case";
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (int k = 0; k < cuda_kernels().count; ++k) result.push_back(cuda_kernels().kernels[k].name);
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceKernels,
                         ::testing::Combine(::testing::ValuesIn(names()), ::testing::ValuesIn(cases())),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param).name; });

}  // namespace
}  // namespace scaledot::testing
