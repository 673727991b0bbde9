// Small parts of core/: offsets into strided tensors, the arena, dispatch over dtypes, integer rounding.
#include <gtest/gtest.h>

#include <type_traits>
#include <utility>

#include "core/arena.h"
#include "core/dispatch.h"
#include "red_zones.h"

namespace scaledot::testing {
namespace {

TEST(Problem, OffsetOfSeveralBatchDimensions) {
  Problem p = {};
  p.batch_dims = 3;
  p.batch_sizes[0] = 2, p.batch_sizes[1] = 3, p.batch_sizes[2] = 4;
  TensorView view = {};
  view.batch_stride[0] = 1000, view.batch_stride[1] = 0, view.batch_stride[2] = 7;  // the middle one is broadcast
  view.head_stride = 100000;
  int64_t batch = 0;
  for (int64_t a = 0; a < 2; ++a)
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t c = 0; c < 4; ++c, ++batch)
        EXPECT_EQ(offset(p, view, batch, 5), 500000 + 1000 * a + 7 * c) << a << ' ' << b << ' ' << c;
}

TEST(Problem, OffsetWithoutBatchDimensionsAndNegativeStride) {
  Problem p = {};
  p.batch = 1;
  TensorView view = {};
  view.head_stride = -3;
  EXPECT_EQ(offset(p, view, 0, 4), -12);
}

TEST(Problem, AbsentTensorHasNullAddress) {
  Problem p = {};
  TensorView view = {};
  EXPECT_EQ(element_ptr<float>(p, view, 0, 0), nullptr);
  float numbers[8] = {};
  view.data = numbers, view.head_stride = 4;
  EXPECT_EQ(element_ptr<float>(p, view, 0, 1), numbers + 4);
}

TEST(Problem, CeilDivAndRoundUp) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(1, 4), 1);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(round_up(9, 8), 16);
  EXPECT_EQ(round_up(16, 8), 16);
}

#if defined(SCALEDOT_RED_ZONES)
constexpr int64_t kRedZone = kAlignment;  // after each array that is not empty
#else
constexpr int64_t kRedZone = 0;
#endif

TEST(Arena, CountsBytesWithoutMemoryAsWithIt) {
  alignas(kAlignment) char memory[3 * kAlignment + 2 * kRedZone];
  const auto lay_out = [](Arena& arena) {
    const std::pair<float*, double*> pieces = {take<float>(arena, 1), take<double>(arena, 9)};  // in this order
    EXPECT_EQ(arena.used % kAlignment, 0);
    return pieces;
  };
  Arena size = {nullptr, 0}, arena = {memory, 0};
  EXPECT_EQ(lay_out(size).second, nullptr);
  const auto [one, nine] = lay_out(arena);
  EXPECT_EQ(size.used, int64_t(sizeof(memory)));
  EXPECT_EQ(arena.used, size.used);
  EXPECT_EQ(static_cast<void*>(one), memory);
  EXPECT_EQ(static_cast<void*>(nine), memory + kAlignment + kRedZone);
  EXPECT_EQ(static_cast<void*>(take<char>(arena, 0)), memory + sizeof(memory));
  EXPECT_EQ(arena.used, size.used) << "an empty array takes no memory";
  RedZones::open(memory, sizeof(memory));  // the stack is used again
}

TEST(Dispatch, EveryFloatingDTypeHasItsStorageType) {
  for (DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    int64_t size = 0;
    bool computes_in_double = false;
    with_storage(dtype, [&](auto type) {
      using Storage = typename decltype(type)::type;
      size = sizeof(Storage);
      computes_in_double = std::is_same_v<typename Compute<Storage>::type, double>;
    });
    EXPECT_EQ(size, element_size(dtype));
    EXPECT_EQ(computes_in_double, dtype == DType::float64);
  }
  bool called = false;
  with_storage(DType::boolean, [&](auto) { called = true; });
  EXPECT_FALSE(called);
}

}  // namespace
}  // namespace scaledot::testing
