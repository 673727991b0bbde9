// Packed sequences: a block derives the problem of its sequence, in shared memory after its tiles, and works on
// that. The cu_seq arrays are read on the device only, so the host never waits for them. The grid is large enough for
// sequences of the greatest length; blocks without rows or keys return at once.
#pragma once

#include "core/varlen.h"
#include "cuda/generic/config.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

// Bytes of shared memory that a kernel with `Shared` takes.
template <class C, class Shared>
constexpr int64_t kSharedBytes = int64_t(sizeof(Shared)) + (C::kPacked ? int64_t(sizeof(Problem)) : 0);

// Copies a problem to shared memory. All threads of a block; a barrier has to follow.
template <int kBlockThreads>
SCALEDOT_DEVICE void copy_problem(const Problem& from, Problem& to) {
  constexpr int kWord = 8, kWords = int(sizeof(Problem)) / kWord;
  static_assert(sizeof(Problem) % kWord == 0);
  for (int k = thread_index(); k < kWords; k += kBlockThreads)
    __builtin_memcpy(reinterpret_cast<char*>(&to) + k * kWord, reinterpret_cast<const char*>(&from) + k * kWord, kWord);
}

// The problem of a block that works on KV group `kv_group`. For a packed problem this is the problem
// of one sequence, written to `to` (the end of the tiles' shared memory), and kv_group becomes the pair's number
// within it.
template <class C, int kBlockThreads>
SCALEDOT_DEVICE const Problem& problem_of_block(const Problem& given, int64_t& kv_group, void* to) {
  if constexpr (C::kPacked) {
    Problem& mine = *static_cast<Problem*>(to);
    copy_problem<kBlockThreads>(given, mine);
    barrier();
    if (thread_index() == 0) narrow_to_sequence(given, kv_group / given.kv_heads, mine);
    barrier();
    kv_group %= given.kv_heads;
    return mine;
  } else {
    return given;
  }
}

// Whether a tile of the grid is past the last row of its sequence.
template <class C>
SCALEDOT_DEVICE bool is_empty(const StackedTile& tile) {
  return C::kPacked && tile.rows.begin >= tile.rows.end;
}

// The number of rows that per-row results have (row_number in scores.cuh counts them).
SCALEDOT_FN int64_t row_count(const Problem& p) {
  return p.heads * (is_packed(p) ? p.packed.total_q : p.batch * p.query_length);
}

}  // namespace
}  // namespace scaledot
