// How a forward saves its softmax (core/saved.h).
//
//   row[j] = exp(S_j - m'), and at the end   row[j] *= exp(m' - m) / l     m': lazy maximum at the tile; m: the last
// If all keys are in one tile, the factor is left to the backward, which computes the sum of such rows itself.
#pragma once

#include "cpu/simd/attention/forward_plan.h"

namespace scaledot {
namespace {

static_assert(kTileKeys % kSavedTile == 0 && kSavedUnit % kLanes<float> == 0 && kSavedUnit % kLanes<double> == 0);

template <class Operand>
class SaveSoftmax {
  using Sum = SumOf<Operand>;

 public:
  explicit SaveSoftmax(const Problem& p) : p_(p), unit_(score_unit<Sum>(p)) {}

  // Row r of a query tile.
  Sum* row(const QueryTile& tile, int64_t r) const {
    return element_ptr<Sum>(p_, p_.saved_softmax, tile.batch, head_of(tile, r)) +
           row_of(tile, r) * p_.saved_softmax.row_stride;
  }

  // Before the first key tile.
  void begin(const ForwardScratch<Operand>& s) const {
    for (int64_t t = 0; t < tiles(); ++t) s.saved_keys[t] = {t * kTileKeys, t * kTileKeys};
  }

  // The number of a tile's keys whose P is saved, counted from the first in `keys`: whole vectors.
  int64_t of_tile(Range keys) const {
    const int64_t all = round_up(count(keys), int64_t(kLanes<Sum>));
    return saves_softmax(p_) ? clamped(saved_columns(p_.saved_keys) - keys.begin, 0, all) : 0;
  }

  // After the rows of key tile `number`, which went to row().
  void add(const QueryTile& tile, int64_t number, Range keys, const ForwardScratch<Operand>& s) const {
    s.saved_keys[number] = {keys.begin, keys.begin + of_tile(keys)};
    for (int64_t r = 0; r < tile_rows(tile); ++r) s.saved_max[number * kTileRows + r] = s.softmax.lazy_max[r];
  }

  // After the last key tile: applies the factors, and clears the keys that the forward left out.
  void finish(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    for (int64_t t = 0; t < tiles(); ++t) clear_around(tile, t, s.saved_keys[t]);
    if (p_.key_length <= kSavedTile) return;
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const Sum normalise = normaliser(state_of(s.softmax, r, unit_)), lazy_max = s.softmax.lazy_max[r];
      for (int64_t t = 0; t < tiles(); ++t) {
        const Range keys = s.saved_keys[t];
        if (count(keys) == 0) continue;
        const Sum taken = s.saved_max[t * kTileRows + r];
        const Sum raised = taken == lazy_max ? Sum(1) : maximum_of(exp2(Vec<Sum>((taken - lazy_max) * unit_.log2)));
        scale_row(row(tile, r), keys, raised * normalise);
      }
    }
  }

 private:
  int64_t tiles() const { return ceil_div(p_.saved_keys, kTileKeys); }

  static void scale_row(Sum* row, Range keys, Sum factor) {
    for (int64_t k = keys.begin; k < keys.end; k += kLanes<Sum>) store(row + k, load(row + k) * Vec<Sum>(factor));
  }

  // Clears what a backward may read of key tile `number`, except `written`.
  void clear_around(const QueryTile& tile, int64_t number, Range written) const {
    const Range range = key_range(p_, tile.rows), all = {number * kTileKeys, (number + 1) * kTileKeys};
    const int64_t begin = max(range.begin / kSavedUnit * kSavedUnit, all.begin);
    const int64_t end = min(saved_columns(min(range.end, p_.saved_keys)), all.end);
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      clear_row(row(tile, r) + begin, min(written.begin, end) - begin);
      clear_row(row(tile, r) + max(written.end, begin), end - max(written.end, begin));
    }
  }

  const Problem& p_;
  const ScoreUnit<Sum> unit_;
};

}  // namespace
}  // namespace scaledot
