// The tile unit of AMX in software: immintrin.h of this folder gives its functions the names of the intrinsics.
//
// They follow Intel's "Architecture Instruction Set Extensions Programming Reference", chapter "Intel AMX". A thread
// has eight tiles and a configuration, which gives each tile its rows and the bytes of a row. A use that makes
// the CPU fault ends the program here, with a message that begins with "tile unit:".
#pragma once

#include <cstdint>

namespace scaledot {
namespace tile_sim {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

// The operand of ldtilecfg and sttilecfg.
struct Configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

void load_configuration(const void* from);
void store_configuration(void* to);
void release();
void zero(int tile);
// `stride`: bytes from one row in memory to the next.
void load(int tile, const void* from, int64_t stride);
void store(int tile, void* to, int64_t stride);
// sums += a b, where a and b have pairs of bfloat16.
void dot_bfloat16(int sums, int a, int b);

}  // namespace tile_sim
}  // namespace scaledot
