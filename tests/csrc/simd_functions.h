// The functions of csrc/cpu/simd that simd_test.cpp tests: one table of plain functions per instruction set. The files
// that fill a table (simd_default.cpp, simd_avx2.cpp, ...) are compiled with the flags of that set. Like the kernels,
// they use no GoogleTest and no standard library: the linker could keep an inline function compiled for AVX-512 for
// the whole program.
#pragma once

#include "core/number.h"
#include "core/problem.h"

namespace scaledot::testing {

enum class ProductLayout { rows, columns };

// One matrix product: c (rows x cols, rows c_stride apart) (+)= a (rows x depth) b (depth x cols), a and b row-major.
template <class T>
struct Product {
  ProductLayout layout;
  bool b_transposed;  // b is given as (cols x depth), and packed as keys are
  bool accumulate;
  int64_t rows, cols, depth, c_stride;
  const T* a;
  const T* b;
  T* c;
  T* scratch;  // kProductScratch elements
};
constexpr int64_t kProductScratch = 1 << 19;

template <class T>
struct FunctionsOf {
  int lanes;
  // y = f(x) for `count` elements, a multiple of `lanes`.
  void (*exp2)(const T* x, T* y, int64_t count);
  void (*tanh)(const T* x, T* y, int64_t count);
  // Reductions of one vector.
  T (*sum)(const T* x);
  T (*maximum)(const T* x);
  void (*keep_where_equal)(const uint8_t* bytes, uint8_t value, const T* x, T* y);  // x where bytes[k] == value, else 0
  void (*multiply)(const Product<T>& product);
  bool (*load_row)(const T* from, int64_t stride, int64_t cols, T* to);
};

// How rows are cut into tiles: even_tiling(), forward_tiling() and query_tiling_for_workers().
enum class Tiles { even, forward, for_workers };
struct TileOfRows {
  int64_t batch, first_head, heads, begin, end;
};

struct SimdFunctions {
  const char* name;
  bool pairs;  // f32.multiply rounds a and b to bfloat16; their elements must be bfloat16 values
  FunctionsOf<float> f32;
  FunctionsOf<double> f64;
  // One vector of f32.lanes elements.
  void (*widen_bfloat16)(const BFloat16* from, float* to);
  void (*widen_float16)(const Float16* from, float* to);
  void (*widen_e4m3)(const Float8E4M3* from, float* to);
  void (*widen_e5m2)(const Float8E5M2* from, float* to);
  void (*widen_int8)(const Int8* from, float* to);
  void (*narrow_bfloat16)(const float* from, BFloat16* to);
  void (*narrow_float16)(const float* from, Float16* to);
  void (*first_bytes)(const uint8_t* from, int64_t bytes, uint8_t* to);  // to a vector
  int64_t micro_rows, tile_rows;
  // All tiles of a problem's rows, in order. Returns their number; writes at most `room` of them.
  int64_t (*cut_rows)(const Problem& problem, Tiles tiles, int64_t workers, TileOfRows* to, int64_t room);
};

extern const SimdFunctions kDefaultFunctions;
#if defined(__x86_64__)
extern const SimdFunctions kAvx2Functions, kAvx512Functions, kAvx512Bf16Functions;
extern const SimdFunctions kAmxBf16Functions;  // only in a build with SCALEDOT_HAS_AMX
#elif defined(__aarch64__)
extern const SimdFunctions kNeonFunctions, kNeonBf16Functions;
#endif

}  // namespace scaledot::testing
