// csrc/cpu/simd: elementary functions, conversions, the matrix product and row tiles, for every instruction set of
// this machine.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/cpu.h"
#include "problem_builder.h"
#include "simd_functions.h"

namespace scaledot::testing {
namespace {

std::vector<const SimdFunctions*> available() {
  std::vector<const SimdFunctions*> list = {&kDefaultFunctions};
#if defined(__x86_64__)
  if (capability() >= Capability::avx2) list.push_back(&kAvx2Functions);
  if (capability() >= Capability::avx512) list.push_back(&kAvx512Functions);
  if (capability() >= Capability::avx512_bf16) list.push_back(&kAvx512Bf16Functions);
#if defined(SCALEDOT_HAS_AMX)
  if (capability() >= Capability::amx_bf16) list.push_back(&kAmxBf16Functions);
#endif
#elif defined(__aarch64__)
  list.push_back(&kNeonFunctions);
  if (capability() >= Capability::neon_bf16) list.push_back(&kNeonBf16Functions);
#endif
  return list;
}

template <class T>
const FunctionsOf<T>& of(const SimdFunctions& functions) {
  if constexpr (sizeof(T) == 4)
    return functions.f32;
  else
    return functions.f64;
}

// The distance in units in the last place of the exact result.
template <class T>
double ulps(T found, long double exact) {
  const long double spacing = std::ldexp(1.0L, std::ilogb(exact) - (std::numeric_limits<T>::digits - 1));
  return double(std::abs(static_cast<long double>(found) - exact) / spacing);
}

class Simd : public ::testing::TestWithParam<const SimdFunctions*> {
 protected:
  static constexpr int64_t kMostRows = 64;  // of a product: the largest tile_rows

  const SimdFunctions& simd() const { return *GetParam(); }

  template <class T, class Function, class Exact>
  double worst_ulps(Function function, double from, double to, Exact exact) const {
    constexpr int64_t kCount = 1 << 16;
    std::vector<T> x(kCount), y(kCount);
    for (int64_t k = 0; k < kCount; ++k) x[size_t(k)] = T(from + (to - from) * double(k) / double(kCount - 1));
    function(x.data(), y.data(), kCount);
    double worst = 0;
    for (size_t k = 0; k < kCount; ++k)
      if (x[k] != 0) worst = max(worst, ulps(y[k], exact(static_cast<long double>(x[k]))));
    return worst;
  }

  // f of the same number in every lane.
  template <class T, class Function>
  T one(Function function, T x) const {
    std::vector<T> in(64, x), out(64);
    function(in.data(), out.data(), 64);
    for (T y : out) EXPECT_TRUE(y == out[0] || (std::isnan(y) && std::isnan(out[0])));
    return out[0];
  }

  template <class T>
  void check_functions(double lowest, double limit) const {
    const FunctionsOf<T>& f = of<T>(simd());
    const auto exact_exp2 = [](long double x) { return std::exp2(x); };
    const auto exact_tanh = [](long double x) { return std::tanh(x); };
    EXPECT_LT(worst_ulps<T>(f.exp2, -1, 1, exact_exp2), limit);
    EXPECT_LT(worst_ulps<T>(f.exp2, lowest, 0, exact_exp2), limit);
    EXPECT_LT(worst_ulps<T>(f.exp2, 0, 90, exact_exp2), limit);
    for (double range : {1e-30, 1e-4, 0.5, 3.0, 12.0, 1000.0})
      EXPECT_LT(worst_ulps<T>(f.tanh, -range, range, exact_tanh), 4) << range;

    const T infinity = std::numeric_limits<T>::infinity();
    EXPECT_EQ(one<T>(f.exp2, T(0)), T(1));
    EXPECT_EQ(one<T>(f.exp2, -infinity), T(0));
    EXPECT_EQ(one<T>(f.exp2, std::numeric_limits<T>::lowest()), T(0));
    for (double x : {lowest - 0.5, lowest - 0.75, lowest - 12.25}) {
      const T subnormal = one<T>(f.exp2, T(x));  // 0, or exact to the last bit
      if (subnormal != T(0)) {
        EXPECT_NEAR(subnormal, std::exp2(x), std::numeric_limits<T>::denorm_min());
      }
    }
    EXPECT_EQ(one<T>(f.tanh, T(0)), T(0));
    for (T x : {T(-0.0), T(-1e-30), T(-1)}) EXPECT_TRUE(std::signbit(one<T>(f.tanh, x))) << x;
    for (T x : {T(12.5), T(40), std::numeric_limits<T>::max()}) EXPECT_EQ(one<T>(f.tanh, -x), -one<T>(f.tanh, x)) << x;
    EXPECT_EQ(one<T>(f.tanh, infinity), T(1));
    EXPECT_EQ(one<T>(f.tanh, -infinity), T(-1));
    T all_ones;
    std::memset(&all_ones, 0xff, sizeof(T));
    for (T x : {std::numeric_limits<T>::quiet_NaN(), -std::numeric_limits<T>::quiet_NaN(), all_ones}) {
      EXPECT_TRUE(std::isnan(one<T>(f.exp2, x)));
      EXPECT_TRUE(std::isnan(one<T>(f.tanh, x)));
    }
  }

  template <class T>
  void check_reductions() const {
    const FunctionsOf<T>& f = of<T>(simd());
    std::vector<T> x(64);
    for (int k = 0; k < 64; ++k) x[size_t(k)] = T(k * 37 % 64 - 20);
    T sum = 0, highest = x[0];
    for (int k = 0; k < f.lanes; ++k) sum += x[size_t(k)], highest = max(highest, x[size_t(k)]);
    EXPECT_EQ(f.sum(x.data()), sum);  // small integers: exact in any order
    EXPECT_EQ(f.maximum(x.data()), highest);
    for (int lane = 0; lane < f.lanes; ++lane) {
      std::vector<T> peak(64, T(-5));
      peak[size_t(lane)] = T(7);
      EXPECT_EQ(f.maximum(peak.data()), T(7));
      EXPECT_EQ(f.sum(peak.data()), T(7 - 5 * (f.lanes - 1)));
      std::vector<uint8_t> bytes(64, 2);
      bytes[size_t(lane)] = 1;
      std::vector<T> kept(64);
      f.keep_where_equal(bytes.data(), 1, peak.data(), kept.data());
      for (int k = 0; k < f.lanes; ++k) EXPECT_EQ(kept[size_t(k)], k == lane ? T(7) : T(0));
    }
  }

  template <class T>
  void check_load_row() const {
    const FunctionsOf<T>& f = of<T>(simd());
    for (int64_t stride : {1, 3})
      for (int64_t cols : {1, 2, 7, 8, 15, 16, 17, 33})
        for (int64_t bad = -1; bad < cols; ++bad) {
          std::vector<T> from(size_t(cols * stride + 40), T(kNaN)), to(80, T(kNaN));
          for (int64_t d = 0; d < cols; ++d) from[size_t(d * stride)] = T(d + 1);
          if (bad >= 0) from[size_t(bad * stride)] = bad % 2 ? T(kInfinity) : T(kNaN);
          ASSERT_EQ(f.load_row(from.data(), stride, cols, to.data()), bad < 0) << cols << ", " << bad;
          for (int64_t d = 0; d < round_up(cols, 2 * f.lanes); ++d)
            if (d != bad) {
              ASSERT_EQ(to[size_t(d)], d < cols ? T(d + 1) : T(0));
            }
        }
  }

  static void round_to_bfloat16(std::vector<double>& x) {
    for (double& number : x) {
      BFloat16 rounded;
      narrow(number, rounded);
      number = widen(rounded);
    }
  }

  // One product, against a plain sum.
  template <class T>
  void check_product(ProductLayout layout, int64_t rows, int64_t cols, int64_t depth, bool b_transposed,
                     bool accumulate, bool skip) const {
    constexpr int64_t kStride = 160, kRowsAfter = 2;
    Random random{uint64_t(rows * 1000003 + cols * 1009 + depth)};
    std::vector<double> a = random.normals(rows * depth), b = random.normals(depth * cols);
    if (sizeof(T) == 4 && simd().pairs) round_to_bfloat16(a), round_to_bfloat16(b);
    std::vector<T> a_t(a.begin(), a.end()), b_t(size_t(depth * cols)),
        c(size_t((rows + kRowsAfter) * kStride), T(0.25)), scratch(kProductScratch);
    for (int64_t k = 0; k < depth; ++k) {
      const bool hidden = skip && k % 3 == 1;  // a masked position: NaN in b, -0 in a
      for (int64_t i = 0; i < rows && hidden; ++i) a_t[size_t(i * depth + k)] = T(-0.0);
      for (int64_t j = 0; j < cols; ++j)
        b_t[size_t(b_transposed ? j * depth + k : k * cols + j)] = hidden ? T(kNaN) : T(b[size_t(k * cols + j)]);
    }
    of<T>(simd()).multiply({layout, b_transposed, accumulate, rows, cols, depth, kStride, a_t.data(), b_t.data(),
                            c.data(), scratch.data()});
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kStride; ++j) {
        if (j >= round_up(cols, of<T>(simd()).lanes)) {
          ASSERT_EQ(c[size_t(i * kStride + j)], T(0.25)) << "written past the columns";
          continue;
        }
        if (j >= cols) continue;
        double exact = accumulate ? 0.25 : 0, terms = 1;
        for (int64_t k = 0; k < depth; ++k) {
          if (skip && k % 3 == 1) continue;
          const double term = double(T(a[size_t(i * depth + k)])) * double(T(b[size_t(k * cols + j)]));
          exact += term, terms += std::abs(term);
        }
        const double unit_roundoff = double(std::numeric_limits<T>::epsilon()) / 2;
        ASSERT_NEAR(double(c[size_t(i * kStride + j)]), exact, double(depth + 2) * terms * unit_roundoff)
            << rows << " x " << cols << " x " << depth << ", element " << i << ", " << j;
      }
    for (int64_t k = rows * kStride; k < (rows + kRowsAfter) * kStride; ++k)
      ASSERT_EQ(c[size_t(k)], T(0.25)) << "written past the rows";
  }

  template <class T>
  void check_products() const {
    for (ProductLayout layout : {ProductLayout::rows, ProductLayout::columns})
      for (int64_t rows = 1; rows <= kMostRows; ++rows)
        for (int64_t cols : {1, 3, 8, 16, 17, 31, 33, 64, 100, 128})
          for (bool accumulate : {false, true})
            check_product<T>(layout, rows, cols, 1 + (rows * 7 + cols) % 40, rows % 2, accumulate, false);
    for (int64_t cols = 1; cols <= 130; ++cols)
      check_product<T>(ProductLayout::rows, 15, cols, 5, cols % 2, false, false);
    for (ProductLayout layout : {ProductLayout::rows, ProductLayout::columns})
      for (int64_t rows : {1, 6, 14, 31, 56})
        for (int64_t depth : {1, 2, 5, 64, 128})
          for (bool accumulate : {false, true}) check_product<T>(layout, rows, 37, depth, false, accumulate, true);
  }

  // A row's result must not depend on its neighbours.
  template <class T>
  void check_rows_are_independent() const {
    constexpr int64_t kRows = kMostRows, kDepth = 40, kCols = 48;
    Random random(5);
    std::vector<double> a = random.normals(kRows * kDepth), b = random.normals(kDepth * kCols);
    std::vector<T> a_t(a.begin(), a.end()), b_t(b.begin(), b.end()), all(kRows * kCols), some(kRows * kCols),
        scratch(kProductScratch);
    const auto product = [&](int64_t first, int64_t rows, std::vector<T>& c) {
      of<T>(simd()).multiply({ProductLayout::rows, false, false, rows, kCols, kDepth, kCols,
                              a_t.data() + first * kDepth, b_t.data(), c.data(), scratch.data()});
    };
    product(0, kRows, all);
    for (int64_t first = 0; first < kRows; first += 5)
      for (int64_t rows = 1; rows <= kRows - first; rows += 3) {
        product(first, rows, some);
        for (int64_t k = 0; k < rows * kCols; ++k)
          ASSERT_EQ(some[size_t(k)], all[size_t(first * kCols + k)]) << first << ", " << rows;
      }
  }
};

TEST_P(Simd, FloatFunctions) { check_functions<float>(-126, 1.2); }
TEST_P(Simd, DoubleFunctions) { check_functions<double>(-1022, 1.2); }
TEST_P(Simd, FloatReductions) { check_reductions<float>(); }
TEST_P(Simd, DoubleReductions) { check_reductions<double>(); }
TEST_P(Simd, FloatRows) { check_load_row<float>(); }
TEST_P(Simd, DoubleRows) { check_load_row<double>(); }
TEST_P(Simd, FloatProducts) { check_products<float>(); }
TEST_P(Simd, DoubleProducts) { check_products<double>(); }
TEST_P(Simd, FloatRowsAreIndependent) { check_rows_are_independent<float>(); }
TEST_P(Simd, DoubleRowsAreIndependent) { check_rows_are_independent<double>(); }

// Every 16-bit pattern, and roundings between neighbours, against core/number.h.
template <class Storage>
void check_storage(int lanes, void (*widen_some)(const Storage*, float*), void (*narrow_some)(const float*, Storage*)) {
  std::vector<Storage> in(static_cast<size_t>(lanes)), out(static_cast<size_t>(lanes));
  std::vector<float> x(static_cast<size_t>(lanes));
  const auto same = [](float a, float b) { return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b; };
  for (uint32_t first = 0; first < 65536; first += uint32_t(lanes)) {
    for (int k = 0; k < lanes; ++k) in[size_t(k)].bits = uint16_t(first + uint32_t(k));
    widen_some(in.data(), x.data());
    for (int k = 0; k < lanes; ++k)
      ASSERT_TRUE(same(x[size_t(k)], widen(in[size_t(k)]))) << first + uint32_t(k) << ": " << x[size_t(k)];
    for (float shift : {0.0f, 0.25f, 0.5f, 0.75f}) {
      std::vector<float> between = x;
      for (int k = 0; k < lanes; ++k) {
        Storage next = in[size_t(k)];
        ++next.bits;
        const float above = widen(next);
        if (std::isfinite(above)) between[size_t(k)] += (above - x[size_t(k)]) * shift;
      }
      narrow_some(between.data(), out.data());
      for (int k = 0; k < lanes; ++k) {
        Storage expected;
        narrow(between[size_t(k)], expected);
        ASSERT_TRUE(same(widen(out[size_t(k)]), widen(expected))) << between[size_t(k)];
      }
    }
  }
}

TEST_P(Simd, BFloat16ConversionMatchesCore) {
  check_storage(simd().f32.lanes, simd().widen_bfloat16, simd().narrow_bfloat16);
}
TEST_P(Simd, Float16ConversionMatchesCore) {
  check_storage(simd().f32.lanes, simd().widen_float16, simd().narrow_float16);
}

// All 256 patterns.
template <class Byte>
void check_bytes(int lanes, void (*widen_vector)(const Byte*, float*)) {
  std::vector<Byte> in(256);
  std::vector<float> out(256);
  for (int k = 0; k < 256; ++k) std::memset(&in[size_t(k)], k, 1);
  for (int k = 0; k < 256; k += lanes) widen_vector(&in[size_t(k)], &out[size_t(k)]);
  for (int k = 0; k < 256; ++k) {
    const float expected = widen(in[size_t(k)]), found = out[size_t(k)];
    const bool same = std::isnan(expected) ? std::isnan(found) : bits_of_float(expected) == bits_of_float(found);
    ASSERT_TRUE(same) << k << ": " << found << ", should be " << expected;
  }
}

TEST_P(Simd, BytesWidenAsInCore) {
  check_bytes(simd().f32.lanes, simd().widen_e4m3);
  check_bytes(simd().f32.lanes, simd().widen_e5m2);
  check_bytes(simd().f32.lanes, simd().widen_int8);
}

// The bytes end where memory does: another one that is read ends the program.
TEST_P(Simd, FirstBytesReadNoOthers) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), vector = size_t(simd().f32.lanes) * sizeof(float);
  void* const memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  uint8_t* const end = static_cast<uint8_t*>(memory) + page;
  ASSERT_EQ(mprotect(end, page, PROT_NONE), 0);
  for (size_t k = 1; k <= vector; ++k) *(end - k) = uint8_t(k);
  for (size_t bytes = 1; bytes <= vector; ++bytes) {
    std::vector<uint8_t> expected(end - bytes, end), found(vector);
    expected.resize(vector);
    simd().first_bytes(end - bytes, int64_t(bytes), found.data());
    EXPECT_EQ(found, expected) << bytes;
  }
  munmap(memory, 2 * page);
}

std::vector<TileOfRows> cut(const SimdFunctions& simd, const Problem& p, Tiles tiles, int64_t workers) {
  std::vector<TileOfRows> all(size_t(simd.cut_rows(p, tiles, workers, nullptr, 0)));
  simd.cut_rows(p, tiles, workers, all.data(), int64_t(all.size()));
  return all;
}

TEST_P(Simd, EveryRowIsInExactlyOneTile) {
  struct Heads {
    int64_t heads, kv_heads;
  };
  for (Heads heads : {Heads{1, 1}, Heads{3, 3}, Heads{8, 2}, Heads{32, 1}})
    for (int64_t length : {1, 5, 6, 7, 13, 14, 29, 48, 49, 57, 97, 500, 1000, 2500})
      for (int64_t workers : {1, 2, 3, 64, 1000})
        for (Tiles tiles : {Tiles::even, Tiles::forward, Tiles::for_workers}) {
          Problem p = {};
          p.batch = 2, p.heads = heads.heads, p.kv_heads = heads.kv_heads, p.query_length = length;
          std::vector<int> seen(size_t(p.batch * p.heads * length));
          int64_t least = length, most = 0;
          for (const TileOfRows& tile : cut(simd(), p, tiles, workers)) {
            const int64_t rows = tile.end - tile.begin, group = p.heads / p.kv_heads;
            ASSERT_GT(rows, 0);
            ASSERT_LE(rows * tile.heads, simd().tile_rows);
            ASSERT_EQ(tile.first_head / group, (tile.first_head + tile.heads - 1) / group);
            least = std::min(least, rows), most = std::max(most, rows);
            for (int64_t h = tile.first_head; h < tile.first_head + tile.heads; ++h)
              for (int64_t i = tile.begin; i < tile.end; ++i) ++seen[size_t((tile.batch * p.heads + h) * length + i)];
          }
          ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), int64_t(seen.size())) << length << " " << p.heads;
          // Tiles differ by one micro-tile at most, and the last one may be partial.
          if (tiles != Tiles::forward) {
            ASSERT_LT(most - least, 2 * simd().micro_rows) << length << " " << workers;
          }
        }
}

// 8192 rows on 64 cores: every core gets the same number of tiles.
TEST_P(Simd, EveryWorkerGetsTheSameNumberOfTiles) {
  Problem p = {};
  p.batch = p.heads = p.kv_heads = 1;
  for (int64_t length : {4096, 8192, 10000}) {
    p.query_length = length;
    const std::vector<TileOfRows> tiles = cut(simd(), p, Tiles::for_workers, 64);
    EXPECT_EQ(tiles.size() % 64, 0u) << length;
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Simd, ::testing::ValuesIn(available()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace scaledot::testing
