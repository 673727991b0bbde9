// Results that a forward saves for its backward. It may save P, the softmax of the scores before dropout, so that its
// backward need not compute the scores again. A kernel's backward may ignore them.
//
// A row of saved_softmax has P of the first saved_keys keys: all keys, or whole tiles of kSavedTile. If there is only
// one tile, the row is P up to a factor. Where a mask excludes a key, P is 0. Where positions alone do, it may be
// anything.
#pragma once

#include "core/mask.h"

namespace scaledot {

constexpr int64_t kSavedTile = 128;  // keys of a tile
constexpr int64_t kSavedUnit = 16;   // columns of a row are a multiple: whole vectors of every instruction set

SCALEDOT_FN int64_t saved_columns(int64_t saved_keys) { return round_up(saved_keys, kSavedUnit); }

SCALEDOT_FN bool saves_softmax(const Problem& p) { return p.saved_softmax.data != nullptr; }
SCALEDOT_FN bool saves_whole_softmax(const Problem& p) { return saves_softmax(p) && p.saved_keys == p.key_length; }

// ---------------------------------------------------------------------------------------------------- the rule
// Rows and keys, at least. Saving gains time from 16 on (docs/benchmarks/zen4.md); fewer were not measured.
constexpr int64_t kSavedLeastLength = 16;
constexpr int64_t kSavedMostBytes = int64_t(64) << 20;  // of a call

// The sizes that the rule looks at. `element` and `sum`: bytes of an element of an input and of a saved weight.
struct SavedSizes {
  int64_t batch, heads, kv_heads, query_length, key_length, head_dim, value_dim, element, sum;
};

SCALEDOT_FN int64_t saved_softmax_bytes(const SavedSizes& s, int64_t saved_keys) {
  return s.batch * s.heads * s.query_length * saved_columns(saved_keys) * s.sum;
}

// The number of keys whose weights a forward saves. They take at most as many bytes as query, key, value and
// output together, so memory stays linear in the lengths. All keys, or if they do not fit at least half of them.
SCALEDOT_FN int64_t saved_keys_of(const SavedSizes& s) {
  if (s.query_length < kSavedLeastLength || s.key_length < kSavedLeastLength) return 0;
  const int64_t inputs =
      s.batch * (s.heads * s.query_length + s.kv_heads * s.key_length) * (s.head_dim + s.value_dim) * s.element;
  const int64_t most = min(inputs, kSavedMostBytes);
  if (saved_softmax_bytes(s, s.key_length) <= most) return s.key_length;
  const int64_t tiles = most / max<int64_t>(saved_softmax_bytes(s, kSavedTile), 1), keys = tiles * kSavedTile;
  return 2 * keys >= s.key_length ? keys : 0;
}

// Whether a forward can save its softmax. The gradient of a softcap or of a score program needs the scores, and a part
// of a larger attention has the softmax of its own keys alone. Kernels for key lists save nothing.
SCALEDOT_FN bool can_save_softmax(const Problem& p) {
  return p.softcap == 0 && !p.score_program && !has_key_lists(p) && !p.part.given && !is_packed(p) && !is_quantised(p);
}

// Whether a recorded call of this kind may save its softmax (ops/sdpa/saved.cpp). Its forward then sums in the same
// order whether it is recorded or not, so its results have the same bits.
SCALEDOT_FN bool may_save_softmax(const Problem& p) {
  const bool pays = p.dropout_p > 0 || adds_mask(p) || p.head_dim != p.value_dim;
  return pays && can_save_softmax(p) && min(p.query_length, p.key_length) >= kSavedLeastLength;
}

// Whether the weights that a forward returned are P itself, stored as the saved softmax is. The backward then uses them
// as such.
SCALEDOT_FN bool returned_weights_are_softmax(const Problem& p) {
  const TensorView& w = p.weights;
  return w.data && can_save_softmax(p) && !averages_weights(p) && p.dropout_p == 0 && w.dtype == p.lse.dtype &&
         w.col_stride == 1 && p.key_length % kSavedUnit == 0;
}
SCALEDOT_FN void use_returned_weights(Problem& p) {
  if (saves_softmax(p) || !returned_weights_are_softmax(p)) return;
  p.saved_softmax = p.weights;
  p.saved_keys = p.key_length;
}

// ----------------------------------------------------------------------------------- the low part of the output
// delta_i = dO_i . O_i of the backward reads an output that was rounded to 16 bits. Its error e_i changes dS_ij by
// P_ij e_i, and so the gradient of a query by e_i times the mean of its keys, which may be far larger than the
// gradient. So a forward also saves what rounding took off (Problem::output_low), and delta adds dO_i . output_low_i.
// On a CPU rows of one tile need none: their delta is a sum over the tile. Qiu and Yao, "Why Low-Precision Transformer
// Training Fails", 2025, trace failed training to this error.
SCALEDOT_FN bool has_output_low(DType dtype) { return dtype == DType::bfloat16 || dtype == DType::float16; }

}  // namespace scaledot
