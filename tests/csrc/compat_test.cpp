// ops/compat.cpp, which this program is linked with: its functions do what those of the C++ runtime do.
#include <gtest/gtest.h>

#include <exception>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace scaledot {
namespace {

struct Counted : std::runtime_error {
  explicit Counted(int& alive) : std::runtime_error("counted"), alive_(alive) { ++alive_; }
  Counted(const Counted& other) : std::runtime_error(other), alive_(other.alive_) { ++alive_; }
  ~Counted() override { --alive_; }
  int& alive_;
};

std::exception_ptr caught(int& alive) {
  try {
    throw Counted(alive);
  } catch (...) {
    return std::current_exception();
  }
}

TEST(Compat, AnExceptionLivesAsLongAsItsLastPointer) {
  int alive = 0;
  std::exception_ptr first = caught(alive);
  {
    std::exception_ptr second = first, third(second);
    first = nullptr;
    EXPECT_EQ(alive, 1);
    EXPECT_THROW(std::rethrow_exception(third), Counted);
    second = third;
    first = second;
  }
  EXPECT_EQ(alive, 1);
  first = nullptr;
  EXPECT_EQ(alive, 0);
}

TEST(Compat, ThreadsCountTogether) {
  int alive = 0;
  auto shared = std::make_shared<int>(7);
  {
    const std::exception_ptr pointer = caught(alive);
    std::vector<std::thread> threads;
    for (int k = 0; k < 8; ++k)
      threads.emplace_back([pointer, shared] {
        for (int turn = 0; turn < 10000; ++turn) {
          std::exception_ptr copy = pointer;
          std::shared_ptr<int> other = shared;
        }
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(alive, 1);
  }
  EXPECT_EQ(alive, 0);
  EXPECT_EQ(shared.use_count(), 1);
}

TEST(Compat, AStreamIsEmptyAtFirst) {
  std::ostringstream stream;
  EXPECT_EQ(stream.str(), "");
  stream << "text " << 12;
  EXPECT_EQ(stream.str(), "text 12");
  EXPECT_EQ(std::move(stream).str(), "text 12");
}

TEST(Compat, ALengthThatNoArrayCanHave) {
  std::allocator<double> allocator;
  volatile size_t length = std::numeric_limits<size_t>::max();
  EXPECT_THROW(static_cast<void>(allocator.allocate(length)), std::bad_alloc);
}

}  // namespace
}  // namespace scaledot
