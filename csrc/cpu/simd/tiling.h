// Every tile size, chunk size, cache bound and limit of the CPU kernels, each with its reason.
//
// Where no machine is given for a number, it was not recorded.
// Include an instruction-set file (simd/isa) first: the sizes of a register tile depend on kVectorBytes,
// kVectorRegisters, and whether there is a tile unit.
#pragma once

#include "core/philox.h"

namespace scaledot {
namespace {

// ---------------------------------------------------------------------------------------------------- registers
// The micro-kernel (gemm.h) computes a micro-tile of kMicroRows rows x kPanelVectors vectors in registers. It needs
// kMicroRows * kPanelVectors registers for sums, kPanelVectors for B and one for A.
constexpr int kPanelVectors = 2;

#if defined(SCALEDOT_TILE_UNIT)  // isa/amx_bf16.h
constexpr bool kHasTileUnit = true;
#else
constexpr bool kHasTileUnit = false;
#endif
// A tile of the unit (tile_unit.h) has this many rows, and as many columns of four bytes.
constexpr int kUnitSide = 16;

template <int kBytes, int kRegisters, bool kTileUnit = false>
struct RegisterTile;
template <>
struct RegisterTile<16, 16> {  // default: 6 x 2 + 2 + 1 = 15 of 16 registers
  static constexpr int kMicroRows = 6;
  static constexpr int kTileRows = 48;
  static constexpr int kTileKeys = 128;
};
template <>
struct RegisterTile<32, 16> {  // AVX2: 15 of 16 registers
  static constexpr int kMicroRows = 6;
  static constexpr int kTileRows = 96;
  static constexpr int kTileKeys = 128;
};
template <>
struct RegisterTile<16, 32> {  // NEON: 12 x 2 + 2 + 1 = 27 of 32 registers; 14 rows would not divide kTileRows
  static constexpr int kMicroRows = 12;
  static constexpr int kTileRows = 48;
  static constexpr int kTileKeys = 128;
};
template <>
struct RegisterTile<64, 32> {  // AVX-512: 14 x 2 + 2 + 1 = 31 of 32 registers
  static constexpr int kMicroRows = 14;
  static constexpr int kTileRows = 56;
  static constexpr int kTileKeys = 128;
};
template <>
struct RegisterTile<64, 32, true> {  // the tile unit: no row of a full tile is padding; 32 sums are 2 x 2 tiles
  static constexpr int kMicroRows = kUnitSide;
  static constexpr int kTileRows = 128;
  static constexpr int kTileKeys = 256;
};
using Registers = RegisterTile<kVectorBytes, kVectorRegisters, kHasTileUnit>;
constexpr int kMicroRows = Registers::kMicroRows;  // MR: rows of a micro-tile

// ---------------------------------------------------------------------------------------------------- score tiles
// A tile of scores has at most kTileRows x kTileKeys elements and stays in the second-level cache.
constexpr int kTileRows = Registers::kTileRows;
constexpr int kTileKeys = Registers::kTileKeys;
static_assert(kTileRows % kMicroRows == 0, "a full tile is whole micro-tiles");

// Rows of the tiles of a backward, of returned weights and of block masks, and of a forward with few tiles for each
// worker. A short tile divides the work better. A long one reads keys and values half as often: with 96 rows instead
// of 48, a forward with D = 192 to 512 takes 0.93 to 0.95 times as long (AMD EPYC, Zen 4, AVX2).
constexpr int kShortTileRows = kTileRows > 64 ? kTileRows / 2 : kTileRows;
static_assert(kShortTileRows % kMicroRows == 0, "a full tile is whole micro-tiles");
// The tile unit computes so fast that a backward waits for memory. With long tiles there, it takes 0.93 to 0.96 times
// as long (Intel Xeon with AMX).
constexpr int kBackwardTileRows = kHasTileUnit ? kTileRows : kShortTileRows;
static_assert(kTileKeys % kDropoutGroup == 0, "a tile starts at a whole group of dropout words");

constexpr int64_t kCacheLine = 64;  // bytes

// ---------------------------------------------------------------------------------------------------- query tiles
// A forward with fewer than kManyTiles tiles for each worker has short tiles. If a head has more than kTaperFrom of
// them, it tapers them: 1 / kTaperShare of the rows goes into tiles of one micro-tile each, for load balance at the
// tail. If the tiles may not depend on the number of workers, there are many from kManyTilesOfAnyCall on.
constexpr int64_t kManyTiles = 16;
constexpr int64_t kManyTilesOfAnyCall = 1024;
constexpr int64_t kTaperFrom = 8;
constexpr int64_t kTaperShare = 4;

// ---------------------------------------------------------------------------------------------------- forward
// With at least this many KV groups of at most this many packed bytes, a task packs one KV group and attends
// to it at once, while it is in the second-level cache. Otherwise packing is a separate phase, and query tiles are
// tasks.
constexpr int64_t kManyHeads = 64;
constexpr int64_t kSmallHeadBytes = int64_t(512) << 10;
// Such a task may be cut in several, each with a part of the query tiles: 96 KV groups on 64 workers are 192 tasks in
// three rounds. Each packs the keys again, which takes about this share of the time of the whole task. (6 to 13%, 128
// and 512 positions, head_dim 64, bfloat16. Intel Xeon with AMX.)
constexpr double kPackShare = 0.1;

// With at most kFewRows query rows in a KV group, a task packs one key tile at a time. (At 128 rows this takes 0.75 to
// 1.0 times as long as panels of a whole head, which go to memory and back; with more rows packing matters less. Intel
// Xeon with AMX.) Its keys are split until there are kFewRowsTasks tasks, or a split has kSplitKeys keys. All three are
// part of the result: they may not depend on the number of threads.
constexpr int64_t kFewRows = 128;
constexpr int64_t kFewRowsTasks = 64;
constexpr int64_t kSplitKeys = 512;

// Bytes of packed heads and of outputs between key chunks: enough heads for all workers. Stay below glibc's 32 MiB mmap
// threshold; larger blocks are page-faulted on every call.
constexpr int64_t kPackBudget = int64_t(12) << 20;
constexpr int64_t kPackBudgetPerWorker = int64_t(1) << 20;

// Rows of keys or values that are prefetched ahead of the one that is packed or widened. Rows of a head may be far from
// each other in memory, and a square of rows is not read in the order of memory.
constexpr int64_t kPackAhead = 16;

// A KV group is short if its rows of query, key, value and output, and its saved softmax, take at most this many bytes.
// Then the next KV group is prefetched (next_kv_group.h). Longer KV groups gain little (AMD EPYC, Zen 4): they compute
// for longer.
constexpr int64_t kShortKvGroupBytes = int64_t(64) << 10;

// Bytes of P that a worker saves until the last maximum is known, if weights are returned. Otherwise a second pass over
// the keys recomputes them.
constexpr int64_t kWeightTilesBudget = int64_t(1) << 20;

// Bytes of packed keys and values that tasks side by side may share in the last-level cache. If K and V of a head
// exceed this, keys are processed in chunks that fit. Longer chunks would make every tile re-read K and V from DRAM.
constexpr int64_t kSharedCache = int64_t(2) << 20;
constexpr int64_t kFewTiles = 4;  // with this few query tiles, chunking the keys does not pay

// ---------------------------------------------------------------------------------------------------- backward
// Heads are split until there are kWantedTasks tasks, unless the partial sums of all splits exceed kSplitBudget bytes.
constexpr int64_t kWantedTasks = 16;
constexpr int64_t kSplitBudget = int64_t(48) << 20;  // upper bound, in bytes, of all partial sums
constexpr int64_t kQueryTilesPerSplit = 10;          // at least: each split of the rows packs the keys again
constexpr int64_t kQueryTilesPerPartialSum = 16;     // of dK and dV: bounds the rounding error of long sums

// ---------------------------------------------------------------------------------------------------- decode
// Query rows that share a KV head, at most. In a forward this is for the tile unit, and for keys of at least
// kLongKeyBytes in more than 16 bits. It is half of them for keys of at least kLongKeyColumns, or that do not fill
// vectors, and a quarter otherwise (most_decode_rows).
constexpr int64_t kDecodeRows = 32;
constexpr int64_t kLongKeyBytes = 512;
constexpr int64_t kLongKeyColumns = 64;
constexpr int64_t kDecodeSplit = 4 * kTileKeys;  // keys of a task
// Keys of a chunk are read as this many streams side by side. One stream uses far less than the memory bandwidth,
// because the CPU fetches too little ahead; more than four streams is slower again.
constexpr int kDecodeStreams = 4;
constexpr int64_t kDecodeAhead = 2048;  // bytes that rows are prefetched ahead in each stream
constexpr int kPrefetchedBytes = 2;     // of an element, at most
// Rows of 16-bit keys or values are prefetched if they are not neighbours and span at least this many bytes. Rows that
// are neighbours, or in the cache, would take up to 1.3 times as long (AMD EPYC, Zen 3, AVX2). From this size on heads
// take turns, too.
constexpr int64_t kPrefetchFrom = int64_t(4) << 20;
// Where the heads of a key are side by side in memory, at most kTurnHeads of them share a task and take turns with its
// keys, a piece of kPieceBytes at a time. This piece and the next have to stay in the second-level cache. (16 and 32 KB
// are as fast; 64 KB take 1.03 to 1.3 times as long, 128 KB up to 1.3. AMD EPYC, Zen 4.)
constexpr int64_t kTurnHeads = 8;
constexpr int64_t kPieceBytes = int64_t(32) << 10;
constexpr int64_t kTasksPerWorker = 4;                     // at least; otherwise fewer heads share a task
constexpr int kDecodeRowBlock = 4;                         // query rows whose sums are in registers together, at most
constexpr int kDecodeValueVectors = kVectorRegisters / 2;  // vectors of P V sums in registers
constexpr int kLaneSums = 8;       // vectors of sums in registers, with vectors along the rows (row_lanes.h)
constexpr int64_t kShortSum = 32;  // columns of a sum there

// ---------------------------------------------------------------------------------------------------- key lists
// A tile has at most kListHeads query heads that share a list, and as many rows as make kListQueries queries with them.
// Products are computed for kListPiece keys with all heads at a time; the next keys are on their way from memory.
// (128 heads of 576 and 512 columns on the tile unit: 0.79 of the time with 64, 0.61 with 32. Intel Xeon with AMX.)
constexpr int64_t kListHeads = 128;
constexpr int64_t kListQueries = 256;
constexpr int64_t kListPiece = 32;
// On the tile unit: queries as above, so that scores stay in the first caches, and how many blocks of kUnitColumns
// columns are copied ahead.
constexpr int64_t kListTileQueries = 16;
constexpr int64_t kListCopiesAhead = 2;
// With fewer than kListHeadsAtOnce heads a key is used too seldom for each time that it is fetched. Then the rows of a
// tile visit the keys in at most kListBlocks blocks; a block has kListBlockBytes bytes or more. (With 16 query and KV
// heads, lists of 512 of 8,192 keys and D = 128, a forward takes 1.6 times as long without blocks. AMD EPYC, Zen 3.)
constexpr int64_t kListHeadsAtOnce = 4;
constexpr int64_t kListBlockBytes = int64_t(128) << 10;
constexpr int64_t kListBlocks = 64;
// Each split of a backward clears and adds sums for all keys. So its rows visit a key this often, at least, on average.
// (Lists of 32 of 8,192 keys, 512 rows, in one split instead of 16: 0.17 to 0.2 of the time. Intel Xeon with AMX.)
constexpr int64_t kListVisitsPerSplit = 2;
constexpr int64_t kListSplitBudget = int64_t(192) << 20;  // upper bound, in bytes, of all sums of dK and dV

// ---------------------------------------------------------------------------------------------------- stores
// A result of at least this many bytes is too large to stay cached: use non-temporal stores, which do not read the
// lines first. (Measured for the gradient of a mask: 1.18 instead of 1.29 times the time without that gradient.)
constexpr int64_t kStreamBytes = int64_t(4) << 20;

}  // namespace
}  // namespace scaledot
