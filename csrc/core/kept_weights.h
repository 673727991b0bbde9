// Kept weights: a forward may keep P, the softmax of the scores before dropout, so that its backward need not compute
// the scores again. A kernel's backward may ignore them.
//
// A row of kept_weights has P of the first kept_keys keys: all keys, or whole tiles of kKeptTile. If there is only one
// tile, the row is P up to a factor. Where a mask excludes a key, P is 0. Where positions alone do, it may be anything.
#pragma once

#include "core/mask.h"

namespace scaledot {

constexpr int64_t kKeptTile = 128;  // keys of a tile
constexpr int64_t kKeptUnit = 16;   // columns of a row are a multiple: whole vectors of every instruction set

SCALEDOT_FN int64_t kept_columns(int64_t kept_keys) { return round_up(kept_keys, kKeptUnit); }

SCALEDOT_FN bool keeps_weights(const Problem& p) { return p.kept_weights.data != nullptr; }
SCALEDOT_FN bool keeps_all_weights(const Problem& p) { return keeps_weights(p) && p.kept_keys == p.key_length; }

// ---------------------------------------------------------------------------------------------------- the rule
// Rows and keys, at least. Keeping saves time from 16 on (docs/benchmarks.md); fewer were not measured.
constexpr int64_t kKeptLeastLength = 16;
constexpr int64_t kKeptMostBytes = int64_t(64) << 20;  // of a call

// The sizes that the rule looks at. `element` and `sum`: bytes of an element of an input and of a kept weight.
struct KeptSizes {
  int64_t batch, heads, kv_heads, query_length, key_length, head_dim, value_dim, element, sum;
};

SCALEDOT_FN int64_t kept_bytes(const KeptSizes& s, int64_t kept_keys) {
  return s.batch * s.heads * s.query_length * kept_columns(kept_keys) * s.sum;
}

// How many keys a forward keeps the weights of. What is kept takes at most as many bytes as query, key, value and
// output together, so memory stays linear in the lengths. All keys, or if they do not fit at least half of them.
SCALEDOT_FN int64_t kept_keys_of(const KeptSizes& s) {
  if (s.query_length < kKeptLeastLength || s.key_length < kKeptLeastLength) return 0;
  const int64_t inputs =
      s.batch * (s.heads * s.query_length + s.kv_heads * s.key_length) * (s.head_dim + s.value_dim) * s.element;
  const int64_t most = min(inputs, kKeptMostBytes);
  if (kept_bytes(s, s.key_length) <= most) return s.key_length;
  const int64_t tiles = most / max<int64_t>(kept_bytes(s, kKeptTile), 1), keys = tiles * kKeptTile;
  return 2 * keys >= s.key_length ? keys : 0;
}

// Whether a forward can keep its weights. The gradient of a softcap needs the scores, and a part of a larger attention
// has the softmax of its own keys alone.
SCALEDOT_FN bool can_keep_weights(const Problem& p) {
  return p.softcap == 0 && !p.part.given && !is_packed(p) && !is_quantised(p);
}

// Whether the weights that a forward returned are P itself, stored as kept weights are. Then they serve as these.
SCALEDOT_FN bool returned_weights_serve(const Problem& p) {
  const TensorView& w = p.weights;
  return w.data && can_keep_weights(p) && !averages_weights(p) && p.dropout_p == 0 && w.dtype == p.lse.dtype &&
         w.col_stride == 1 && p.key_length % kKeptUnit == 0;
}
SCALEDOT_FN void keep_returned_weights(Problem& p) {
  if (keeps_weights(p) || !returned_weights_serve(p)) return;
  p.kept_weights = p.weights;
  p.kept_keys = p.key_length;
}

// ----------------------------------------------------------------------------------- the remainder of the output
// delta_i = dO_i . O_i of the backward reads an output that was rounded to 16 bits. Its error e_i changes dS_ij by
// P_ij e_i, and so the gradient of a query by e_i times the mean of its keys, which may be far larger than the
// gradient. So a forward also keeps what rounding took off (Problem::remainder), and delta adds dO_i . remainder_i.
// On a CPU rows of one tile need none: their delta is a sum over the tile. Qiu and Yao, "Why Low-Precision Transformer
// Training Fails", 2025, trace failed training to this error.
SCALEDOT_FN bool has_remainder(DType dtype) { return dtype == DType::bfloat16 || dtype == DType::float16; }

}  // namespace scaledot
