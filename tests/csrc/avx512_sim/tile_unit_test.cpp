// The tile unit's simulation: what Intel documents of each instruction, and that wrong programs are noticed.
#include "tile_unit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "core/number.h"
#include "cpu/cpu.h"
#include "executors.h"
#include "kernel_cases.h"
#include "kernel_check.h"
#include "random.h"

namespace scaledot::tile_sim {
namespace {

Configuration full() {
  Configuration c = {};
  c.palette = 1;
  for (int tile = 0; tile < kTiles; ++tile) c.rows[tile] = kMostRows, c.row_bytes[tile] = kMostBytes;
  return c;
}
// sums (tile 0) of rows x cols, a (tile 1) of rows x pairs, b (tile 2) of pairs x cols.
Configuration product(int rows, int cols, int pairs) {
  Configuration c = {};
  c.palette = 1;
  c.rows[0] = c.rows[1] = uint8_t(rows), c.rows[2] = uint8_t(pairs);
  c.row_bytes[0] = c.row_bytes[2] = uint16_t(cols * 4), c.row_bytes[1] = uint16_t(pairs * 4);
  return c;
}

class TileUnit : public ::testing::Test {
 protected:
  void TearDown() override { release(); }
};
using TileUnitDeath = TileUnit;

Configuration stored() {
  Configuration c;
  std::memset(&c, 0xff, sizeof c);
  store_configuration(&c);
  return c;
}
bool is_zero(const Configuration& c) {
  const Configuration none = {};
  return std::memcmp(&c, &none, sizeof c) == 0;
}

// ---------------------------------------------------------------------------------------------------- configuration
TEST_F(TileUnit, ConfigurationIsStoredAsLoaded) {
  EXPECT_TRUE(is_zero(stored()));
  const Configuration c = product(3, 5, 7);
  load_configuration(&c);
  const Configuration now = stored();
  EXPECT_EQ(std::memcmp(&now, &c, sizeof c), 0);
  release();
  EXPECT_TRUE(is_zero(stored()));
}

TEST_F(TileUnit, PaletteZeroReleases) {
  Configuration c = full();
  load_configuration(&c);
  c.palette = 0;
  load_configuration(&c);
  EXPECT_TRUE(is_zero(stored()));
}

TEST_F(TileUnit, ConfigurationClearsTiles) {
  const Configuration c = full();
  const std::vector<uint8_t> ones(1024, 1);
  std::vector<uint8_t> out(1024, 2);
  load_configuration(&c);
  load(3, ones.data(), 64);
  load_configuration(&c);
  store(3, out.data(), 64);
  EXPECT_EQ(out, std::vector<uint8_t>(1024, 0));
}

TEST_F(TileUnit, EachThreadHasItsOwn) {
  const Configuration c = full();
  load_configuration(&c);
  bool none = false;
  std::thread([&] { none = is_zero(stored()); }).join();
  EXPECT_TRUE(none);
  EXPECT_FALSE(is_zero(stored()));
}

TEST_F(TileUnitDeath, BadConfigurations) {
  Configuration c = full();
  const auto expect_fault = [](const Configuration& wrong, const char* why) {
    EXPECT_DEATH(load_configuration(&wrong), why);
  };
  c.palette = 2;
  expect_fault(c, "tile unit: the palette");
  c = full(), c.start_row = 1;
  expect_fault(c, "tile unit: the start row");
  c = full(), c.reserved[13] = 1;
  expect_fault(c, "tile unit: a reserved byte");
  c = full(), c.rows[7] = 17;
  expect_fault(c, "tile unit: a tile has more than 16 rows");
  c = full(), c.row_bytes[0] = 68;
  expect_fault(c, "tile unit: a row has more than 64 bytes");
  c = full(), c.rows[2] = 0;
  expect_fault(c, "tile unit: a tile has rows without bytes");
  c = full(), c.row_bytes[2] = 0;
  expect_fault(c, "tile unit: a tile has rows without bytes");
  c = full(), c.rows[8] = 1, c.row_bytes[8] = 4;
  expect_fault(c, "tile unit: there is no such tile");
}

// ---------------------------------------------------------------------------------------------------- memory
TEST_F(TileUnit, LoadsAndStoresKeepTheirShape) {
  constexpr int64_t kStride = 80;
  for (int rows : {1, 7, 16})
    for (int bytes : {4, 12, 64}) {
      Configuration c = full();
      c.rows[5] = uint8_t(rows), c.row_bytes[5] = uint16_t(bytes);
      load_configuration(&c);
      std::vector<uint8_t> from(16 * kStride), to(16 * kStride, 0xee);
      for (size_t k = 0; k < from.size(); ++k) from[k] = uint8_t(k % 251);
      load(5, from.data(), kStride);
      store(5, to.data(), kStride);
      for (int64_t i = 0; i < 16; ++i)
        for (int64_t k = 0; k < kStride; ++k) {
          const size_t at = size_t(i * kStride + k);
          ASSERT_EQ(to[at], i < rows && k < bytes ? from[at] : 0xee) << i << ", " << k;
        }
    }
}

TEST_F(TileUnit, ZeroClears) {
  const Configuration c = full();
  load_configuration(&c);
  const std::vector<uint8_t> ones(1024, 1);
  std::vector<uint8_t> out(1024, 2);
  load(6, ones.data(), 64);
  zero(6);
  store(6, out.data(), 64);
  EXPECT_EQ(out, std::vector<uint8_t>(1024, 0));
}

TEST_F(TileUnit, StrideMayBeAnyNumber) {
  const Configuration c = full();
  load_configuration(&c);
  std::vector<uint8_t> row(64, 7), out(16 * 64);
  load(0, row.data(), 0);  // every row from the same address
  store(0, out.data() + 15 * 64, -64);
  EXPECT_EQ(out, std::vector<uint8_t>(1024, 7));
}

TEST_F(TileUnitDeath, UseWithoutConfiguration) {
  uint8_t memory[1024] = {};
  EXPECT_DEATH(zero(0), "tile unit: used without a configuration");
  EXPECT_DEATH(load(0, memory, 64), "tile unit: used without a configuration");
  EXPECT_DEATH(store(0, memory, 64), "tile unit: used without a configuration");
  EXPECT_DEATH(dot_bfloat16(0, 1, 2), "tile unit: used without a configuration");
  Configuration c = full();
  c.rows[4] = 0, c.row_bytes[4] = 0;
  load_configuration(&c);
  EXPECT_DEATH(zero(4), "tile unit: the configuration leaves out this tile");
  EXPECT_DEATH(zero(8), "tile unit: there is no such tile");
  release();
  EXPECT_DEATH(zero(0), "tile unit: used without a configuration");
}

// ---------------------------------------------------------------------------------------------------- products
BFloat16 rounded(double x) {
  BFloat16 result;
  narrow(float(x), result);
  return result;
}

// The document's operation, element by element.
float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float documented(float sum, const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
  float temp[2] = {0, 0};
  for (size_t k = 0; k < a.size(); ++k)
    temp[k % 2] =
        without_subnormal(std::fma(without_subnormal(widen(a[k])), without_subnormal(widen(b[k])), temp[k % 2]));
  return without_subnormal(without_subnormal(sum) + without_subnormal(temp[0] + temp[1]));
}

// Runs one product of the shape; a and b are row-major, 2 * pairs deep.
std::vector<float> run_product(int rows, int cols, int pairs, const std::vector<BFloat16>& a,
                               const std::vector<BFloat16>& b, std::vector<float> sums) {
  const Configuration c = product(rows, cols, pairs);
  std::vector<BFloat16> packed(b.size());
  for (int k = 0; k < 2 * pairs; ++k)
    for (int j = 0; j < cols; ++j) packed[size_t((k / 2 * cols + j) * 2 + k % 2)] = b[size_t(k * cols + j)];
  load_configuration(&c);
  load(0, sums.data(), cols * 4);
  load(1, a.data(), pairs * 4);
  load(2, packed.data(), cols * 4);
  dot_bfloat16(0, 1, 2);
  store(0, sums.data(), cols * 4);
  return sums;
}

TEST_F(TileUnit, ProductsAreTheDocumentedOnes) {
  scaledot::testing::Random random(3);
  for (int rows : {1, 5, 16})
    for (int cols : {1, 9, 16})
      for (int pairs : {1, 3, 16})
        for (double scale : {1.0, 0x1p-70, 0x1p-130, 0x1p60}) {
          std::vector<BFloat16> a, b;
          for (double x : random.normals(rows * pairs * 2)) a.push_back(rounded(x * scale));
          for (double x : random.normals(cols * pairs * 2)) b.push_back(rounded(x * (scale > 1 ? 1 : scale)));
          std::vector<float> sums;
          for (double x : random.normals(rows * cols)) sums.push_back(float(x * (scale < 0x1p-100 ? 0x1p-128 : scale)));
          const std::vector<float> found = run_product(rows, cols, pairs, a, b, sums);
          for (int i = 0; i < rows; ++i)
            for (int j = 0; j < cols; ++j) {
              std::vector<BFloat16> row, column;
              for (int k = 0; k < 2 * pairs; ++k)
                row.push_back(a[size_t(i * 2 * pairs + k)]), column.push_back(b[size_t(k * cols + j)]);
              const float expected = documented(sums[size_t(i * cols + j)], row, column);
              ASSERT_EQ(std::memcmp(&found[size_t(i * cols + j)], &expected, 4), 0)
                  << found[size_t(i * cols + j)] << ", should be " << expected;
            }
        }
}

// 1 + 2^-24 is 1, but 2^-24 + 2^-24 is not lost: the order of the sums is visible.
TEST_F(TileUnit, EvenAndOddElementsAreSummedApart) {
  const float tiny = 0x1p-24f;
  const std::vector<BFloat16> one = {rounded(1), rounded(1), rounded(1), rounded(1)};
  EXPECT_EQ(run_product(1, 1, 2, one, {rounded(1), rounded(tiny), rounded(0), rounded(tiny)}, {0})[0], 1 + 0x1p-23f);
  EXPECT_EQ(run_product(1, 1, 2, one, {rounded(1), rounded(0), rounded(tiny), rounded(0)}, {0})[0], 1);
  EXPECT_EQ(run_product(1, 1, 2, one, {rounded(tiny), rounded(0), rounded(0), rounded(tiny)}, {1})[0], 1 + 0x1p-23f);
}

TEST_F(TileUnit, SubnormalsAreZeroAndMxcsrIsIgnored) {
  const float smallest = std::numeric_limits<float>::denorm_min(), least = std::numeric_limits<float>::min();
  EXPECT_EQ(run_product(1, 1, 1, {rounded(0), rounded(0)}, {rounded(0), rounded(0)}, {smallest})[0], 0);
  EXPECT_EQ(run_product(1, 1, 1, {rounded(least), rounded(0)}, {rounded(0.5), rounded(0)}, {0})[0], 0);
  const std::vector<BFloat16> subnormal = {BFloat16{1}, BFloat16{1}}, large = {rounded(0x1p100), rounded(0x1p100)};
  EXPECT_EQ(run_product(1, 1, 1, subnormal, large, {3})[0], 3);
  const unsigned own = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(own | 0x6000);  // towards zero
  const float found = run_product(1, 1, 1, {rounded(0x1p-24f), rounded(0x1p-25f)}, {rounded(1), rounded(1)}, {1})[0];
  const unsigned restored = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(own);
  EXPECT_EQ(found, 1 + 0x1p-23f);
  EXPECT_EQ(restored & 0x6000, 0x6000u);
}

TEST_F(TileUnit, NansAndInfinitiesPass) {
  const BFloat16 zero = rounded(0), infinity = rounded(INFINITY), nan = rounded(NAN), one = rounded(1);
  EXPECT_EQ(run_product(1, 1, 1, {one, zero}, {infinity, zero}, {0})[0], INFINITY);
  EXPECT_TRUE(std::isnan(run_product(1, 1, 1, {zero, zero}, {infinity, zero}, {0})[0]));
  EXPECT_TRUE(std::isnan(run_product(1, 1, 1, {one, nan}, {one, zero}, {0})[0]));
}

TEST_F(TileUnitDeath, ShapesThatDoNotMatch) {
  const auto expect_fault = [](Configuration c, const char* why) {
    load_configuration(&c);
    EXPECT_DEATH(dot_bfloat16(0, 1, 2), why);
  };
  Configuration c = product(4, 5, 6);
  c.rows[1] = 3;
  expect_fault(c, "tile unit: the sums and the left factor");
  c = product(4, 5, 6), c.row_bytes[2] = 16;
  expect_fault(c, "tile unit: the sums and the right factor");
  c = product(4, 5, 6), c.rows[2] = 5;
  expect_fault(c, "tile unit: the columns of the left factor");
  c = product(4, 5, 6), c.row_bytes[1] = 22;
  expect_fault(c, "tile unit: a row of a factor or sum is not a multiple of 4 bytes");
  c = full();
  load_configuration(&c);
  EXPECT_DEATH(dot_bfloat16(0, 0, 2), "tile unit: the three tiles");
  EXPECT_DEATH(dot_bfloat16(0, 1, 1), "tile unit: the three tiles");
}

// ---------------------------------------------------------------------------------------------------- the kernel
// A task leaves no tile state behind, in the threads that others use too.
TEST_F(TileUnit, KernelReleasesTheUnit) {
  using namespace scaledot::testing;
  const Kernel& kernel = kernel_by_name("amx_bf16");
  Case c;
  c.dtype = DType::bfloat16, c.query_length = 70, c.key_length = 300;
  Built b = build(c);
  add_gradients(b);
  for (Pass pass : {Pass::forward, Pass::backward}) {
    ASSERT_EQ(kernel.why_not(b.problem(), pass), nullptr);
    run(kernel, b.problem(), pass);
    EXPECT_TRUE(is_zero(stored()));
  }
  c.query_length = 2;
  Built few = build(c);
  ASSERT_EQ(kernel_by_name("amx_bf16_decode").why_not(few.problem(), Pass::forward), nullptr);
  run(kernel_by_name("amx_bf16_decode"), few.problem(), Pass::forward);
  EXPECT_TRUE(is_zero(stored()));
}

TEST_F(TileUnit, FewRowsOverManyKeysAreDecoded) {
  using namespace scaledot::testing;
  Case c;
  c.dtype = DType::bfloat16, c.heads = 6, c.kv_heads = 3, c.query_length = 1, c.key_length = 128;
  const auto selected = [&] { return std::string(select(cpu_kernels(), build(c).problem(), Pass::forward).name); };
  EXPECT_EQ(selected(), "amx_bf16_decode");  // two heads share keys: 2 rows
  c.key_length = 127;
  EXPECT_EQ(selected(), "avx512_decode");
  c.key_length = 1000, c.kv_heads = 6;
  EXPECT_EQ(selected(), "avx512_decode");
  c.query_length = 32, c.key_length = 512;
  EXPECT_EQ(selected(), "amx_bf16_decode");
  c.key_length = 511;
  EXPECT_EQ(selected(), "amx_bf16");
  c.query_length = 33, c.key_length = 1000;
  EXPECT_EQ(selected(), "amx_bf16");
}

TEST_F(TileUnit, FewRowsGoToAvx512) {
  using namespace scaledot::testing;
  Case c;
  c.dtype = DType::bfloat16, c.heads = 6, c.kv_heads = 3, c.query_length = 3;  // two heads share keys: 6 rows
  EXPECT_STREQ(select(cpu_kernels(), build(c).problem(), Pass::backward).name, "avx512_decode");
  EXPECT_STREQ(kernel_by_name("amx_bf16").why_not(build(c).problem(), Pass::backward),
               "fewer than 8 query rows share a KV head");
  c.query_length = 4;
  EXPECT_STREQ(select(cpu_kernels(), build(c).problem(), Pass::backward).name, "amx_bf16");
}

// The cases that the kernel leaves to AVX-512 for having few rows are right all the same.
TEST_F(TileUnit, FewRowsWouldBeRight) {
  using namespace scaledot::testing;
  const Kernel& kernel = kernel_by_name("amx_bf16");
  Kernel eager = kernel;
  eager.why_not = [](const Problem&, Pass) -> const char* { return nullptr; };
  int count = 0;
  for (const Case& c : cases()) {
    const auto refused = [&](Pass pass) { return kernel.why_not(build(c).problem(), pass) != nullptr; };
    if (c.dtype != DType::bfloat16 || (!refused(Pass::forward) && !refused(Pass::backward))) continue;
    SCOPED_TRACE(c.name);
    check_forward(eager, c);
    check_backward(eager, c);
    ++count;
  }
  EXPECT_GT(count, 40);
}

// Single rows and few keys, which amx_bf16_decode leaves to others for its speed.
TEST_F(TileUnit, DecodingOfFewKeysWouldBeRight) {
  using namespace scaledot::testing;
  const Kernel& kernel = kernel_by_name("amx_bf16_decode");
  Kernel eager = kernel;
  eager.why_not = [](const Problem&, Pass) -> const char* { return nullptr; };
  int count = 0;
  for (const Case& c : cases()) {
    const char* reason = kernel.why_not(build(c).problem(), Pass::forward);
    const std::string text = reason ? reason : "";
    if (text.rfind("one query row", 0) != 0 && text.rfind("there are fewer than 128 keys", 0) != 0) continue;
    SCOPED_TRACE(c.name);
    check_forward(eager, c);
    ++count;
  }
  EXPECT_GT(count, 40);
}

}  // namespace
}  // namespace scaledot::tile_sim
