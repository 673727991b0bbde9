// Fills a SimdFunctions from the instruction set whose header was included before this one.
#pragma once

#include "cpu/simd/pack.h"
#include "simd_functions.h"

namespace scaledot::testing {
namespace {

template <class T, Vec<T> (*kFunction)(Vec<T>)>
void map(const T* x, T* y, int64_t count) {
  for (int64_t k = 0; k < count; k += kLanes<T>) store(y + k, kFunction(load(x + k)));
}

template <Layout kLayout, class T>
void multiply_as(const Product<T>& p) {
  T* row = p.scratch;
  T* packed_a = row + 1024;
  T* packed_b = packed_a + 128 * 1024;
  Panels<T> b = {packed_b, p.depth * kPanel<T>, true};
  if (p.b_transposed)
    pack_panels_transposed(Block<T>{p.b, p.depth, 1}, p.cols, p.depth, row, b);
  else
    pack_panels(Block<T>{p.b, p.cols, 1}, p.depth, p.cols, row, b);
  if constexpr (kLayout == Layout::strips)
    pack_strips(Block<T>{p.a, p.depth, 1}, 0, p.rows, p.rows, p.depth, row, packed_a);
  else
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t k = 0; k < p.depth; ++k)
        packed_a[kLayout == Layout::rows ? i * kTileKeys + k : k * kTileKeys + i] = p.a[i * p.depth + k];
  multiply<kLayout>(p.rows, p.cols, p.depth, static_cast<const T*>(packed_a), b, p.c, p.c_stride, p.accumulate);
}

template <class T>
void multiply_product(const Product<T>& p) {
  switch (p.layout) {
    case ProductLayout::strips: multiply_as<Layout::strips>(p); break;
    case ProductLayout::rows: multiply_as<Layout::rows>(p); break;
    case ProductLayout::columns: multiply_as<Layout::columns>(p); break;
  }
}

template <class T>
T sum_vector(const T* x) {
  return sum_of(load(x));
}
template <class T>
T maximum_vector(const T* x) {
  return maximum_of(load(x));
}
template <class T>
void keep_where_equal(const uint8_t* bytes, uint8_t value, const T* x, T* y) {
  store(y, select(bytes_equal<T>(bytes, value), load(x), Vec<T>(T(0))));
}
template <class T>
bool widen_one_row(const T* from, int64_t stride, int64_t cols, T* to) {
  return widen_row(from, stride, cols, to);
}

template <class Storage>
void widen_vector(const Storage* from, float* to) {
  store(to, widen_load(from));
}
template <class Storage>
void narrow_vector(const float* from, Storage* to) {
  narrow_store(to, load(from));
}

template <class T>
constexpr FunctionsOf<T> functions_of() {
  return {kLanes<T>,         map<T, exp<T>>,      map<T, expm1<T>>,    map<T, tanh<T>>, sum_vector<T>,
          maximum_vector<T>, keep_where_equal<T>, multiply_product<T>, widen_one_row<T>};
}

constexpr SimdFunctions simd_functions(const char* name) {
  return {name,
          functions_of<float>(),
          functions_of<double>(),
          widen_vector<BFloat16>,
          widen_vector<Float16>,
          narrow_vector<BFloat16>,
          narrow_vector<Float16>};
}

}  // namespace
}  // namespace scaledot::testing
