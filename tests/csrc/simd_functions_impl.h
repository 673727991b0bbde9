// Fills a SimdFunctions from the instruction set whose header was included before this one.
#pragma once

#include "cpu/simd/attention/scores.h"
#include "simd_functions.h"

namespace scaledot::testing {
namespace {

template <class T, Vec<T> (*kFunction)(Vec<T>)>
void map(const T* x, T* y, int64_t count) {
  for (int64_t k = 0; k < count; k += kLanes<T>) store(y + k, kFunction(load(x + k)));
}

// A row-major matrix as elements of the operands: unchanged, or rounded to bfloat16.
template <class Element, class T>
const Element* as_elements(const T* from, int64_t count, Element* to) {
  for (int64_t k = 0; k < count; ++k) narrow(from[k], to[k]);
  return to;
}

template <class Operand, Layout kLayout, class T>
void multiply_as(const Product<T>& p) {
  using Element = ElementOf<Operand>;
  constexpr int64_t kRows = 16 * 1024, kMatrix = 128 * 1024;
  Element* rows = reinterpret_cast<Element*>(p.scratch);
  Operand* packed_a = reinterpret_cast<Operand*>(p.scratch + kRows);
  Operand* packed_b = reinterpret_cast<Operand*>(p.scratch + kRows + kMatrix);
  Element* scratch = reinterpret_cast<Element*>(p.scratch + kRows + 2 * kMatrix);
  const int64_t depth = depth_of<Operand>(p.depth);
  Panels<Operand> b = {packed_b, depth * kPanel<Operand>, true};
  const Element* b_elements = as_elements(p.b, p.depth * p.cols, scratch);
  if (p.b_transposed)
    pack_panels_transposed<Operand>(RowBlock<Element>{b_elements, p.depth, 1, kUnbounded, 0}, p.cols, p.depth, rows, b);
  else
    pack_panels<Operand>(RowBlock<Element>{b_elements, p.cols, 1, kUnbounded, 0}, p.depth, p.cols, rows, b);
  const Element* a_elements = as_elements(p.a, p.rows * p.depth, scratch);
  if constexpr (kLayout == Layout::rows) {
    pack_rows<Operand>(RowBlock<Element>{a_elements, p.depth, 1, kUnbounded, 0}, p.rows, p.depth, packed_a);
  } else {
    Element* columns = reinterpret_cast<Element*>(packed_a);  // kElements rows along the depth, side by side
    for (int64_t k = 0; k < depth * kElements<Operand>; ++k)
      for (int64_t i = 0; i < p.rows; ++i)
        columns[k / kElements<Operand> * kElements<Operand> * kColumnStride<Operand> + i * kElements<Operand> +
                k % kElements<Operand>] = k < p.depth ? a_elements[i * p.depth + k] : Element{};
  }
  multiply<kLayout, OnMasked::skip>(p.rows, p.cols, depth, static_cast<const Operand*>(packed_a), b, p.c, p.c_stride,
                                    p.accumulate);
}

template <class Operand, class T>
void multiply_product(const Product<T>& p) {
  switch (p.layout) {
    case ProductLayout::rows: multiply_as<Operand, Layout::rows>(p); break;
    case ProductLayout::columns: multiply_as<Operand, Layout::columns>(p); break;
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
bool load_one_row(const T* from, int64_t stride, int64_t cols, T* to) {
  Finite<T> finite;
  load_row(from, stride, cols, to, finite);
  return finite.all();
}

template <class Storage>
void widen_vector(const Storage* from, float* to) {
  store(to, widen_load(from));
}
template <class Storage>
void narrow_vector(const float* from, Storage* to) {
  narrow_store(to, load(from));
}

inline int64_t cut_rows(const Problem& p, Tiles tiles, int64_t workers, TileOfRows* to, int64_t room) {
  const QueryTiling tiling = tiles == Tiles::for_workers ? query_tiling_for_workers(p, workers)
                             : tiles == Tiles::even      ? even_tiling(p)
                                                         : forward_tiling(p, workers);
  const int64_t of_plane = tiles_per_head(tiling), all = p.batch * p.kv_heads * of_plane;
  for (int64_t k = 0; k < min(all, room); ++k) {
    const QueryTile tile = query_tile(p, tiling, k / of_plane, k % of_plane);
    to[k] = {tile.batch, tile.first_head, tile.heads, tile.rows.begin, tile.rows.end};
  }
  return all;
}

template <class T, class Operand>
constexpr FunctionsOf<T> functions_of() {
  return {kLanes<T>,
          map<T, exp2<T>>,
          map<T, tanh<T>>,
          sum_vector<T>,
          maximum_vector<T>,
          keep_where_equal<T>,
          multiply_product<Operand, T>,
          load_one_row<T>};
}

void store_first_bytes(const uint8_t* from, int64_t bytes, uint8_t* to) {
  const auto vector = first_elements<Native<uint8_t>>(from, bytes);
  __builtin_memcpy(to, &vector, sizeof(vector));
}

// `Single`: the operand of products in float32.
template <class Single = float>
constexpr SimdFunctions simd_functions(const char* name) {
  return {name,
          kElements<Single> > 1,
          functions_of<float, Single>(),
          functions_of<double, double>(),
          widen_vector<BFloat16>,
          widen_vector<Float16>,
          widen_vector<Float8E4M3>,
          widen_vector<Float8E5M2>,
          widen_vector<Int8>,
          narrow_vector<BFloat16>,
          narrow_vector<Float16>,
          store_first_bytes,
          kMicroRows,
          kTileRows,
          cut_rows};
}

}  // namespace
}  // namespace scaledot::testing
