#if defined(__x86_64__)
#include "cpu/simd/isa/amx_bf16.h"
#include "simd_functions_impl.h"
// Bf16Pair's operand, and its product on the tile unit.
#include "cpu/simd/tile_unit.h"

namespace scaledot::testing {
namespace {

void multiply_with_unit(const Product<float>& product) {
  begin_tiles();
  multiply_product<Bf16Pair>(product);
  end_tiles();
}

constexpr SimdFunctions with_unit(SimdFunctions functions) {
  functions.f32.multiply = multiply_with_unit;
  return functions;
}

}  // namespace

extern const SimdFunctions kAmxBf16Functions = with_unit(simd_functions<Bf16Pair>("amx_bf16"));

}  // namespace scaledot::testing
#endif
