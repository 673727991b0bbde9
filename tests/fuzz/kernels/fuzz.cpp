// The program that libFuzzer runs: a wrong result ends it as an access to wrong memory does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "check.h"
#include "input.h"
#include "random.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

class EndOnFailure : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "%s\n", result.message());
    std::abort();
  }
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new EndOnFailure);
  return 0;
}

// For the blocks that pool.cpp leaves to malloc. Kernels allocate nothing, and the preset `address` finds leaks of the
// tests.
extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=1:thread_local_quarantine_size_kb=64:malloc_context_size=4:detect_leaks=0";
}

// A field has a fixed place among the bytes, so most mutations set a few bytes where they are. The others are
// libFuzzer's own, which also move bytes. The size of most problems is drawn anew. Otherwise libFuzzer would go on from
// the largest ones, which reach more code than others, and only a few would run in a second.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  scaledot::testing::Random random(seed);
  const auto below = [&](uint64_t n) { return size_t(random.bits() % n); };
  const auto set = [&](size_t at) {
    if (at >= max_size) return;
    if (at >= size) std::fill(data + size, data + at, uint8_t(0)), size = at + 1;
    data[at] = uint8_t(random.bits());
  };
  if (below(4) == 0)
    size = LLVMFuzzerMutate(data, size, max_size);
  else
    for (size_t k = below(4) + 1; k > 0; --k) set(below(scaledot::testing::kMostBytes));
  if (below(8) > 0) set(scaledot::testing::kEffortByte);
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  scaledot::testing::check(data, size);
  return 0;
}
