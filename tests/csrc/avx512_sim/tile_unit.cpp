#include "tile_unit.h"

#include <immintrin.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace scaledot {
namespace tile_sim {
namespace {

[[noreturn]] void fault(const char* why) {
  std::fprintf(stderr, "tile unit: %s\n", why);
  std::abort();
}
void require(bool holds, const char* otherwise) {
  if (!holds) fault(otherwise);
}

struct Tile {
  uint8_t bytes[kMostRows][kMostBytes];
};
struct State {
  Configuration configuration;
  Tile tiles[kTiles];
};
thread_local State state = {};  // of this thread; a thread begins without a configuration

int rows_of(int tile) { return state.configuration.rows[tile]; }
int bytes_of(int tile) { return state.configuration.row_bytes[tile]; }

void require_configured(int tile) {
  require(0 <= tile && tile < kTiles, "there is no such tile");
  require(state.configuration.palette == 1, "used without a configuration");
  require(rows_of(tile) > 0 && bytes_of(tile) > 0, "the configuration leaves out this tile");
}

bool all_zero(const uint8_t* bytes, size_t count) {
  for (size_t k = 0; k < count; ++k)
    if (bytes[k] != 0) return false;
  return true;
}

// ---------------------------------------------------------------------------------------------------- bfloat16
// The registers of a row's sums; those of even and odd elements are taken apart until the end.
struct Row {
  __m256 low, high;
};

__m256i load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
__m256 first_of_pairs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
__m256 second_of_pairs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))));
}

void add_products(Row& sums, __m256 factor, __m256 low, __m256 high) {
  sums.low = _mm256_fmadd_ps(factor, low, sums.low);
  sums.high = _mm256_fmadd_ps(factor, high, sums.high);
}

// temp = 0;  temp[even], temp[odd] += a b, pair by pair;  sums += temp[even] + temp[odd]
__attribute__((noinline)) void dot_rows(Tile& sums, const Tile& a, const Tile& b, int rows, int pairs) {
  for (int i = 0; i < rows; ++i) {
    Row even = {_mm256_setzero_ps(), _mm256_setzero_ps()}, odd = even;
    for (int k = 0; k < pairs; ++k) {
      int32_t pair;
      std::memcpy(&pair, &a.bytes[i][k * 4], sizeof pair);
      const __m256i factor = _mm256_set1_epi32(pair), low = load_words(b.bytes[k]), high = load_words(b.bytes[k] + 32);
      add_products(even, first_of_pairs(factor), first_of_pairs(low), first_of_pairs(high));
      add_products(odd, second_of_pairs(factor), second_of_pairs(low), second_of_pairs(high));
    }
    float* const to = reinterpret_cast<float*>(sums.bytes[i]);
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_add_ps(even.low, odd.low)));
    _mm256_storeu_ps(to + 8, _mm256_add_ps(_mm256_loadu_ps(to + 8), _mm256_add_ps(even.high, odd.high)));
  }
}

// Clears all elements outside a tile's rows and columns.
void clear_outside(int tile) {
  for (int i = 0; i < kMostRows; ++i) {
    const int used = i < rows_of(tile) ? bytes_of(tile) : 0;
    std::memset(state.tiles[tile].bytes[i] + used, 0, size_t(kMostBytes - used));
  }
}

}  // namespace

void load_configuration(const void* from) {
  Configuration wanted;
  std::memcpy(&wanted, from, sizeof wanted);
  if (wanted.palette == 0) return release();
  require(wanted.palette == 1, "the palette is neither 0 nor 1");
  require(wanted.start_row == 0, "the start row is not 0");
  require(all_zero(wanted.reserved, sizeof wanted.reserved), "a reserved byte is not 0");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = wanted.rows[tile], bytes = wanted.row_bytes[tile];
    require(tile < kTiles || (rows == 0 && bytes == 0), "there is no such tile");
    require(rows <= kMostRows, "a tile has more than 16 rows");
    require(bytes <= kMostBytes, "a row has more than 64 bytes");
    require((rows == 0) == (bytes == 0), "a tile has rows without bytes, or bytes without rows");
  }
  state = {};
  state.configuration = wanted;
}

void store_configuration(void* to) { std::memcpy(to, &state.configuration, sizeof state.configuration); }

void release() { state = {}; }

void zero(int tile) {
  require_configured(tile);
  state.tiles[tile] = {};
}

void load(int tile, const void* from, int64_t stride) {
  require_configured(tile);
  for (int i = 0; i < rows_of(tile); ++i)
    std::memcpy(state.tiles[tile].bytes[i], static_cast<const char*>(from) + i * stride, size_t(bytes_of(tile)));
  clear_outside(tile);
}

void store(int tile, void* to, int64_t stride) {
  require_configured(tile);
  for (int i = 0; i < rows_of(tile); ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, state.tiles[tile].bytes[i], size_t(bytes_of(tile)));
}

void dot_bfloat16(int sums, int a, int b) {
  for (int tile : {sums, a, b}) {
    require_configured(tile);
    require(bytes_of(tile) % 4 == 0, "a row of a factor or sum is not a multiple of 4 bytes");
  }
  require(sums != a && sums != b && a != b, "the three tiles of a product are not distinct");
  require(rows_of(sums) == rows_of(a), "the sums and the left factor differ in their rows");
  require(bytes_of(sums) == bytes_of(b), "the sums and the right factor differ in their columns");
  require(bytes_of(a) == 4 * rows_of(b), "the columns of the left factor are not the rows of the right one");
  // The unit's own rounding: to nearest even, subnormal numbers are 0, no exceptions, whatever MXCSR says.
  constexpr unsigned kNoExceptions = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  const unsigned own = _mm_getcsr();
  _mm_setcsr(kNoExceptions | kFlushToZero | kDenormalsAreZero);
  dot_rows(state.tiles[sums], state.tiles[a], state.tiles[b], rows_of(a), bytes_of(a) / 4);
  _mm_setcsr(own);
  clear_outside(sums);
}

}  // namespace tile_sim
}  // namespace scaledot
