// The program that libFuzzer runs: a wrong result ends it as an access to wrong memory does.
#include <gtest/gtest.h>

#include <cstdlib>

#include "check.h"

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

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  scaledot::testing::check(data, size);
  return 0;
}
