// csrc/cpu/kernels.cpp: the table's order and the choice of a kernel.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "cpu/cpu.h"
#include "problem_builder.h"

namespace scaledot::testing {
namespace {

// The level with this name.
Capability level_of(const std::string& name) {
  int level = 0;
  while (level < kCapabilities - 1 && name != kCapabilityLevels[level].name) ++level;
  return Capability(level);
}

class Select : public ::testing::Test {
 protected:
  void TearDown() override { force_kernel(nullptr); }
};

TEST_F(Select, LastKernelIsDefaultAndTakesEveryDtype) {
  const KernelTable table = cpu_kernels();
  std::set<std::string> names;
  for (int k = 0; k < table.count; ++k) EXPECT_TRUE(names.insert(table.kernels[k].name).second) << "names are unique";
  const Kernel& last = table.kernels[table.count - 1];
  EXPECT_STREQ(last.name, "default");
  for (DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    Case c;
    c.dtype = dtype;
    const Built b = build(c);
    EXPECT_EQ(last.why_not(b.problem(), Pass::forward), nullptr);
    EXPECT_EQ(last.why_not(b.problem(), Pass::backward), nullptr);
  }
}

TEST_F(Select, TakesFirstKernelThatAcceptsTheProblem) {
  for (int64_t query_length : {1, 100})
    for (Pass pass : {Pass::forward, Pass::backward}) {
      Case c;
      c.query_length = query_length;
      const Built b = build(c);
      const KernelTable table = cpu_kernels();
      int first = 0;
      while (table.kernels[first].why_not(b.problem(), pass)) ++first;
      EXPECT_STREQ(select(table, b.problem(), pass).name, table.kernels[first].name);
    }
}

TEST_F(Select, RefusesInstructionSetsThatTheMachineLacks) {
  const Built b = build({});
  const KernelTable table = cpu_kernels();
  for (int k = 0; k < table.count; ++k) {
    const std::string name = table.kernels[k].name;
    if (name != "avx2" && name != "avx512" && name != "neon") continue;
    EXPECT_EQ(table.kernels[k].why_not(b.problem(), Pass::forward) == nullptr, capability() >= level_of(name)) << name;
  }
}

TEST_F(Select, ForcedKernelComesFirstIfItAcceptsTheProblem) {
  Case c;
  const Built many_rows = build(c);
  c.query_length = 1;
  const Built one_row = build(c);
  EXPECT_FALSE(force_kernel("no such kernel"));
  ASSERT_TRUE(force_kernel("default"));
  EXPECT_STREQ(select(cpu_kernels(), one_row.problem(), Pass::forward).name, "default");
  ASSERT_TRUE(force_kernel("default_decode"));
  EXPECT_STREQ(select(cpu_kernels(), one_row.problem(), Pass::forward).name, "default_decode");
  EXPECT_STRNE(select(cpu_kernels(), many_rows.problem(), Pass::forward).name, "default_decode");
  EXPECT_STREQ(select(cpu_kernels(), one_row.problem(), Pass::backward).name, "default_decode");
  EXPECT_STRNE(select(cpu_kernels(), many_rows.problem(), Pass::backward).name, "default_decode");
}

}  // namespace
}  // namespace scaledot::testing
