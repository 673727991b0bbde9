// The gradient of relative_bias: dS, summed over the scores that have the same distance (core/mask.h).
//
//   dBias[e] = sum of dS[i, j] where clamp(distance(i, j), low, high) = low + e
//
// dS is 0 where the score was replaced.
//
// A tile's diagonals are summed first, in scratch memory, and then added to the sums of the task: shorter sums have
// smaller errors, and distances are clamped once a tile. Each task has its own sums for each of its query heads. At
// the end they are added up in order.
#pragma once

#include "core/arena.h"
#include "cpu/simd/attention/query_tiles.h"

namespace scaledot {
namespace {

constexpr int kTileDiagonals = kTileRows + kTileKeys;  // of a tile of scores, at most

template <class Sum>
class RelativeGradient {
 public:
  // `splits`: how many tasks of the backward share a KV group.
  RelativeGradient(const Problem& p, int64_t splits, Arena& arena)
      : p_(p), wanted_(p.grad_relative_bias.data), splits_(splits), entries_(wanted_ ? relative_entries(p) : 0) {
    sums_ = take<Sum>(arena, p.batch * p.heads * splits * entries_);
  }

  bool wanted() const { return wanted_; }

  void clear(const Executor& executor) const {
    parallel(executor, p_.batch * p_.heads,
             [&](int64_t task, int) { clear_row(sums_ + task * splits_ * entries_, splits_ * entries_); });
  }

  // Adds dS of row r of a tile, for these keys. Rows have to come in order. `split`: the number of the caller among the
  // tasks that share the KV group; `diagonals`: its memory for kTileDiagonals sums.
  void add(const QueryTile& tile, int64_t r, Range keys, int64_t split, const Sum* grad_scores, Sum* diagonals) const {
    const int64_t last = count(tile.rows) - 1, i = r % (last + 1), n = count(keys);
    if (i == 0) clear_row(diagonals, last + n);
    Sum* sums = diagonals + last - i;  // the last row begins with the smallest distance
    int64_t k = 0;
    for (; k + kLanes<Sum> <= n; k += kLanes<Sum>) store(sums + k, load(sums + k) + load(grad_scores + k));
    for (; k < n; ++k) sums[k] += grad_scores[k];
    if (i == last) add_diagonals(tile, head_of(tile, r), keys, split, diagonals);
  }

  // Writes the sums of all tasks to grad_relative_bias.
  void finish(const Executor& executor) const {
    parallel(executor, ceil_div(entries_, kEntriesOfTask), [&](int64_t task, int) {
      const Range part = {task * kEntriesOfTask, min(entries_, (task + 1) * kEntriesOfTask)};
      for_each_head([&](Sum* to, int64_t) { clear_row(to + part.begin, count(part)); });
      for_each_head([&](Sum* to, int64_t head) {
        for (int64_t split = 0; split < splits_; ++split) {
          const Sum* from = sums_ + (head * splits_ + split) * entries_;
          for (int64_t e = part.begin; e < part.end; ++e) to[e] += from[e];
        }
      });
    });
  }

 private:
  static constexpr int64_t kEntriesOfTask = 1024;

  // Calls body(row of grad_relative_bias, number of the head) for all query heads of all batch entries, in order.
  template <class Body>
  void for_each_head(const Body& body) const {
    for (int64_t k = 0; k < p_.batch * p_.heads; ++k)
      body(element_ptr<Sum>(p_, p_.grad_relative_bias, k / p_.heads, k % p_.heads), k);
  }

  // The diagonals of one head's rows, from the smallest distance on.
  SCALEDOT_NOINLINE void add_diagonals(const QueryTile& tile, int64_t head, Range keys, int64_t split,
                                       const Sum* diagonals) const {
    const auto [low, high] = p_.relative_range;
    const int64_t first = keys.begin - (tile.rows.end - 1 + p_.position.diagonal);
    const int64_t size = count(tile.rows) - 1 + count(keys);
    const Range within = unclamped_keys(p_, first, size);
    Sum* sums = sums_ + ((tile.batch * p_.heads + head) * splits_ + split) * entries_;
    if (within.begin > 0) sums[0] += sum_row(diagonals, within.begin);
    if (within.end < size) sums[high - low] += sum_row(diagonals + within.end, size - within.end);
    for (int64_t k = within.begin; k < within.end; ++k) sums[first + k - low] += diagonals[k];
  }

  static Sum sum_row(const Sum* from, int64_t n) {
    Vec<Sum> sums(Sum(0));
    int64_t k = 0;
    for (; k + kLanes<Sum> <= n; k += kLanes<Sum>) sums = sums + load(from + k);
    Sum sum = sum_of(sums);
    for (; k < n; ++k) sum += from[k];
    return sum;
  }

  const Problem& p_;
  const bool wanted_;
  const int64_t splits_, entries_;
  Sum* sums_;  // (batch, head, split, entry)
};

}  // namespace
}  // namespace scaledot
