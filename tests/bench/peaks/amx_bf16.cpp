#include "cpu/simd/isa/amx_bf16.h"

#include "loops.h"

namespace scaledot::bench {
namespace {

// One tdpbf16ps adds 32 products to each of 16 x 16 sums. Four of them are independent.
constexpr double kFlops = 4 * 2.0 * 32 * 16 * 16;

double tile_products(int64_t rounds) {
  float sums[kUnitRows][kUnitRows];
  begin_tiles();
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kUnitRowBytes);
  end_tiles();
  return double(sums[0][0]);
}

}  // namespace

extern const ArithmeticLoop kAmxBfloat16 = {"bf16 tdpbf16ps", kFlops, tile_products};

}  // namespace scaledot::bench
