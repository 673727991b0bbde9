// AVX-512 with AVX512_BF16, and the tile unit: AMX_TILE, AMX_BF16. Vectors are those of avx512_bf16.h. The product on
// the unit is in tile_unit.h.
#pragma once

#define SCALEDOT_TILE_UNIT  // read by tiling.h: tiles of scores are whole tiles of the unit
#include "cpu/simd/isa/avx512_bf16.h"

namespace scaledot {
namespace {

constexpr int kUnitTiles = 8, kUnitRows = 16, kUnitRowBytes = 64;

// The operand of ldtilecfg.
struct UnitConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(UnitConfiguration) == 64);

constexpr UnitConfiguration full_tiles() {
  UnitConfiguration result = {};
  result.palette = 1;
  for (int tile = 0; tile < kUnitTiles; ++tile) result.row_bytes[tile] = kUnitRowBytes, result.rows[tile] = kUnitRows;
  return result;
}
alignas(64) constexpr UnitConfiguration kFullTiles = full_tiles();

// The unit's state is this thread's, from begin_tiles() to end_tiles(). A thread without tile state is cheaper to
// switch, and others in the thread, such as oneDNN, configure the unit themselves. (Two functions: a destructor would
// bring in symbols of exception handling, and kernels do not throw.)
inline void begin_tiles() { _tile_loadconfig(&kFullTiles); }
inline void end_tiles() { _tile_release(); }

}  // namespace
}  // namespace scaledot
