// Packed sequences: a block makes the problem of its own sequence, in shared memory behind its tiles, and works on that. cu_seq_q and
// its like are read on the device only, so nothing waits for it. The grid has room for sequences of the greatest length; blocks that
// find no rows or keys are done at once.
#pragma once

#include "core/varlen.h"
#include "cuda/generic/config.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

// Bytes of shared memory that a kernel with `Shared` takes.
template <class C, class Shared>
constexpr int64_t kSharedBytes = int64_t(sizeof(Shared)) + (C::kPacked ? int64_t(sizeof(Problem)) : 0);

// The problem of a block that has to do with plane (batch, kv_head), and from then on the number of that plane in it. `behind`: where
// the shared memory of the tiles ends.
template <class C, int kBlockThreads>
SCALEDOT_DEVICE const Problem& problem_of_block(const Problem& given, int64_t& plane, void* behind) {
  if constexpr (C::kPacked) {
    Problem& mine = *static_cast<Problem*>(behind);
    constexpr int kWord = 8, kWords = int(sizeof(Problem)) / kWord;
    static_assert(sizeof(Problem) % kWord == 0);
    for (int k = thread_index(); k < kWords; k += kBlockThreads)
      __builtin_memcpy(static_cast<char*>(behind) + k * kWord, reinterpret_cast<const char*>(&given) + k * kWord,
                       kWord);
    barrier();
    if (thread_index() == 0) narrow_to_sequence(given, plane / given.kv_heads, mine);
    barrier();
    plane %= given.kv_heads;
    return mine;
  } else {
    return given;
  }
}

// Whether a tile of the grid is past the last row of its sequence.
template <class C>
SCALEDOT_DEVICE bool is_empty(const RowTile& tile) {
  return C::kPacked && tile.rows.begin >= tile.rows.end;
}

// Rows that results per row are kept for (row_number).
SCALEDOT_FN int64_t row_count(const Problem& p) {
  return p.heads * (is_packed(p) ? p.packed.total_q : p.batch * p.query_length);
}

}  // namespace
}  // namespace scaledot
