// Every kernel of the CPU table that takes a case, forward and backward, against the reference kernel in float64.
#include <algorithm>
#include <cstring>
#include <map>

#include "cpu/cpu.h"
#include "kernel_cases.h"
#include "kernel_check.h"

namespace scaledot::testing {
namespace {

// A kernel, and a case whose forward or backward it takes.
struct KernelCase {
  std::string kernel;
  Case c;
  bool forward, backward;
};
void PrintTo(const KernelCase& one, std::ostream* stream) { *stream << one.kernel << ", " << one.c.name; }

// The backward reads returned weights as the saved softmax: rows of whole vectors.
std::vector<Case> serving_cases() {
  return cases_of("serving", {DType::float32, DType::float64},
                  [](Case& c) { c.return_weights = true, c.key_length = 144; });
}

std::vector<Case> cpu_cases() {
  std::vector<Case> result = cases();
  for (const Case& c : serving_cases()) result.push_back(c);
  for (const Case& c : average_cases()) result.push_back(c);
  for (const Case& c : quantised_cases()) result.push_back(c);
  return result;
}

// The kernels that take a case.
std::vector<KernelCase> kernel_cases_of(const Case& c) {
  std::vector<KernelCase> result;
  const Built b = build(c, /*values=*/false);
  const KernelTable table = cpu_kernels();
  for (int k = 0; k < table.count; ++k) {
    const Kernel& kernel = table.kernels[k];
    const bool forward = !kernel.why_not(b.problem(), Pass::forward);
    const bool one_pass = c.average_weights || c.cache != DType::none;
    const bool backward = !one_pass && !kernel.why_not(b.problem(), Pass::backward);
    if (forward || backward) result.push_back({kernel.name, c, forward, backward});
  }
  return result;
}

// GoogleTest deals them to shards one by one. So that all kernels of a case, which share the oracle, are in one of
// 2 or 4 shards, they are in groups of kCachedCases cases: the first kernel of each, then the second of each.
const std::vector<KernelCase>& kernel_cases() {
  static const std::vector<KernelCase> list = [] {
    std::map<size_t, std::vector<std::vector<KernelCase>>> by_count;  // cases, by the number of their kernels
    for (const Case& c : cpu_cases()) {
      const std::vector<KernelCase> of_one = kernel_cases_of(c);
      by_count[of_one.size()].push_back(of_one);
    }
    std::vector<KernelCase> result;
    for (const auto& [count, cases] : by_count)
      for (size_t first = 0; first < cases.size(); first += kCachedCases)
        for (size_t k = 0; k < count; ++k)
          for (size_t c = first; c < std::min(first + kCachedCases, cases.size()); ++c) result.push_back(cases[c][k]);
    return result;
  }();
  return list;
}

void check_saved_softmax(const Kernel& kernel, const Case& c) {
  const Problem p = prepared(c).inputs.problem();
  if (!can_save_softmax(p) || !has_scores(p)) return;
  const bool some = c.key_length > kSavedTile;
  check_kept(kernel, c, c.key_length, /*on_threads=*/!some);
  if (some) check_kept(kernel, c, kSavedTile, /*on_threads=*/true);
  if (returned_weights_are_softmax(p)) check_reuse_returned(kernel, c);
}

class Kernels : public ::testing::TestWithParam<KernelCase> {};

TEST_P(Kernels, AgreesWithReference) {
  const auto& [name, c, forward, backward] = GetParam();
  const Kernel& kernel = kernel_by_name(name);
  if (forward) check_forward(kernel, c);
  if (backward) check_backward(kernel, c);
  if (forward && backward) check_saved_softmax(kernel, c);
  if (forward && backward && has_output_low(c.dtype)) check_output_low(kernel, c);
}

INSTANTIATE_TEST_SUITE_P(Cpu, Kernels, ::testing::ValuesIn(kernel_cases()),
                         [](const auto& info) { return info.param.kernel + "_takes_" + info.param.c.name; });

// ---------------------------------------------------------------------------------- the low part of the output

// The mean of the squares of all differences, relative to the mean of the squares.
double relative_variance(const TestTensor& found, const TestTensor& exact) {
  const std::vector<double> x = found.values(), y = exact.values();
  double error = 0, size = 0;
  for (size_t k = 0; k < x.size(); ++k) error += (x[k] - y[k]) * (x[k] - y[k]), size += y[k] * y[k];
  return error / size;
}

// Keys and values with large means, to which the gradient of a query owes nothing: the sum over j of dS_ij is 0.
Case case_with_means(DType dtype, int64_t rows) {
  Case c;
  c.name = std::string("means_") + dtype_name(dtype);
  c.dtype = dtype, c.heads = c.kv_heads = 2, c.query_length = rows, c.key_length = 700, c.head_dim = c.value_dim = 64;
  return c;
}

Built with_means(const Case& c) {
  Built b = build(c);
  for (TestTensor* t : {&b.key, &b.value}) {
    std::vector<double> values = t->values();
    for (double& x : values) x = 4 + x / 4;
    t->set(values);
  }
  add_gradients(b);
  return b;
}

TEST(Remainder, MakesTheGradientOfTheQueryExact) {
  const KernelTable table = cpu_kernels();
  int checked = 0;
  for (DType dtype : {DType::bfloat16, DType::float16})
    for (int64_t rows : {1, 150})
      for (int k = 0; k < table.count; ++k) {
        const Kernel& kernel = table.kernels[k];
        const Case c = case_with_means(dtype, rows);
        Built b = with_means(c);
        if (kernel.why_not(b.problem(), Pass::forward)) continue;
        SCOPED_TRACE(kernel.name + (" " + c.name) + " " + std::to_string(rows));
        const Oracle oracle = solve(b);
        const Kernel& backward = select(table, b.problem(), Pass::backward);
        run(kernel, b, Pass::forward);
        run(backward, b, Pass::backward);
        const double without = relative_variance(b.grad_query, oracle.backward.grad_query);
        add_output_low(b);
        run(kernel, b, Pass::forward);
        run(backward, b, Pass::backward);
        const double with = relative_variance(b.grad_query, oracle.backward.grad_query);
        if (std::strstr(backward.name, "_decode")) {  // it computes delta from all scores of a row
          EXPECT_EQ(with, without);
        } else if (std::strstr(backward.name, "bf16")) {  // shared_key.h makes up for errors of delta
          EXPECT_LE(with, without);
          EXPECT_LT(std::sqrt(without), 0x1p-9) << "the rounding of a result";
        } else {
          EXPECT_LT(with, without / 9) << "relative errors " << std::sqrt(with) << ", " << std::sqrt(without);
        }
        expect_backward(b, oracle);
        expect_output_low(b, oracle);
        ++checked;
      }
  EXPECT_GE(checked, 8);
}

// ---------------------------------------------------------------------------------- how many cases each kernel takes

bool starts_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

Capability needed_by(const std::string& kernel) {
  int level = kCapabilities - 1;
  while (level > 0 && !starts_with(kernel, kCapabilityLevels[level].name)) --level;
  return Capability(level);
}

struct Count {
  size_t forward = 0, backward = 0;
};

// The least number of cases a kernel has to take. Otherwise one that refuses everything would pass.
Count least_cases(const std::string& kernel) {
  for (const char* takes_all : {"default", "avx2", "avx512", "neon"})
    if (kernel == takes_all) return {cpu_cases().size(), cases().size()};
  if (kernel.find("_key_lists") != std::string::npos) return {};  // key_lists_test.cpp has their cases
  // A quarter of the cases is bfloat16.
  const bool one_dtype = kernel.find("_bf16") != std::string::npos;
  if (kernel.find("_decode") != std::string::npos) return {one_dtype ? size_t(30) : size_t(105), 0};
  return one_dtype ? Count{100, 100} : Count{400, 400};
}

TEST(KernelCases, EveryKernelTakesItsShare) {
  std::map<std::string, Count> taken;
  for (const KernelCase& one : kernel_cases()) {
    taken[one.kernel].forward += one.forward;
    taken[one.kernel].backward += one.backward;
  }
  for (int k = 0; k < cpu_kernels().count; ++k) {
    const std::string name = cpu_kernels().kernels[k].name;
    const Count count = taken[name], least = least_cases(name);
    if (capability() < needed_by(name)) {
      EXPECT_EQ(count.forward + count.backward, size_t(0)) << name << " takes what this machine cannot run";
      continue;
    }
    EXPECT_GE(count.forward, least.forward) << name << ", forward";
    EXPECT_GE(count.backward, least.backward) << name << ", backward";
  }
}

TEST(KernelCases, NamesAreUnique) {
  std::map<std::string, int> names;
  for (const Case& c : cpu_cases()) EXPECT_EQ(++names[c.name], 1) << c.name;
}

}  // namespace
}  // namespace scaledot::testing
