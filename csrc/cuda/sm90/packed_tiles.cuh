// Which tiles belong to which packed sequence. The lengths are read on the device only, so the host never waits for
// them. A small kernel counts the tiles of each sequence, in a backward the first one. A block finds the sequence of
// its tile by bisection.
//
// Copies read the rows of all sequences as one tensor. So the last tile of a sequence has rows of the next one.
#pragma once

#include "core/varlen.h"
#include "cuda/generic/packed.cuh"
#include "cuda/ptx/memory.h"

namespace scaledot {
namespace {

constexpr int kCountThreads = 256;

struct Sm90CountShared {
  int64_t tiles[kCountThreads];
};

// starts[b]: how many tiles the sequences before b have, of tiles_of(b) each; starts[sequences]: how many all have.
// `most`: an upper bound on it. One block, whose threads take a range of sequences each. cu_seq is not validated, so
// the numbers are clamped.
template <class TilesOf>
SCALEDOT_DEVICE void store_tile_starts(int64_t sequences, const TilesOf& tiles_of, int most, int* starts) {
  auto& shared = *static_cast<Sm90CountShared*>(shared_memory());
  const int thread = thread_index();
  const int64_t share = ceil_div(sequences, kCountThreads);
  const int64_t begin = min(thread * share, sequences), end = min(begin + share, sequences);
  int64_t tiles = 0;
  for (int64_t b = begin; b < end; ++b) tiles += tiles_of(b);
  shared_store(&shared.tiles[thread], tiles);
  barrier();
  tiles = 0;
  const int others = begin < end ? thread : int(ceil_div(sequences, max<int64_t>(share, 1)));  // threads with sequences
  for (int t = 0; t < others; ++t) tiles += shared_load(&shared.tiles[t]);
  const auto store = [&](int64_t b) { global_store(starts + b, int(min<int64_t>(tiles, most))); };
  for (int64_t b = begin; b < end; ++b) {
    store(b);
    tiles += tiles_of(b);
  }
  if (thread == kCountThreads - 1) store(sequences);
}

// The last sequence with starts[b] <= tile, so that it has the tile. 0 <= tile < starts[count].
SCALEDOT_DEVICE int sequence_of_tile(const int* starts, int64_t count, int tile) {
  int low = 0, high = int(count);  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (global_load(starts + middle) <= tile ? low : high) = middle;
  }
  return low;
}

}  // namespace
}  // namespace scaledot
