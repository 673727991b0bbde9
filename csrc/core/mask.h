// All mask semantics, for every device and kernel. A score is computed in this order:
//
//   x = scale * dot(query[i], key[j])
//   s = softcap ? softcap * tanh(x / softcap) : x                     (or a score program: core/score_program.h)
//   s = s - slope[head] * |distance|                          distance = j - (i + diagonal)        (alibi_slopes)
//   s = s + relative_bias[head, clamp(distance, low, high) - low]               (low, high: Problem::relative_range)
//   s = s + attn_mask[i, j]                                        (floating attn_mask, from key mask_begin on)
//   s = attn_mask[i, j] ? s : masked_score                          (boolean attn_mask, from key mask_begin on)
//   s = attends(i, j) ? s : -inf                                         (is_causal, window: by position alone)
//   s = block_allows(i, j) ? s : -inf                                                  (block_mask: block_mask.h)
//
// A key that a mask scores -inf is "masked": its weight is exactly 0, and NaN or inf in it does not reach that row. (A
// score of -inf that comes from an inf in query or key is not masked: NaN and inf in live inputs are passed on.)
//
// Kernels use four functions of this file:
//   attends(i, j)   key_range(rows)   tile_kind(rows x keys)   row_terms(row x keys)
#pragma once

#include "core/block_mask.h"
#include "core/math.h"
#include "core/number.h"

namespace scaledot {

// ---------------------------------------------------------------------------------------------------- positions
// The keys that row i attends to by position. Both ends are non-decreasing in i: key_range and tile_kind rely on it.
SCALEDOT_FN Range row_keys(const Problem& p, int64_t i) {
  const PositionMask& m = p.position;
  const int64_t aligned = i + m.diagonal;
  return intersect({aligned - m.window_left, aligned + m.window_right + 1}, {0, p.key_length});
}

SCALEDOT_FN bool attends(const Problem& p, int64_t i, int64_t j) {
  const Range keys = row_keys(p, i);
  return keys.begin <= j && j < keys.end;
}

// From the first key that any of the rows attends to, to the last.
SCALEDOT_FN Range key_range(const Problem& p, Range rows) {
  return {row_keys(p, rows.begin).begin, row_keys(p, rows.end - 1).end};
}

// By position alone.
SCALEDOT_FN TileKind tile_kind(const Problem& p, Range rows, Range keys) {
  const Range first = row_keys(p, rows.begin), last = row_keys(p, rows.end - 1);
  if (last.end <= keys.begin || first.begin >= keys.end) return TileKind::skip;
  const bool full = last.begin <= keys.begin && keys.end <= first.end;
  return full ? TileKind::full : TileKind::partial;
}

// ---------------------------------------------------------------------------------------------------- distances
// The distances of a problem's scores, as far as a window leaves them. For a packed problem: those that any sequence
// may have.
SCALEDOT_FN DistanceRange distances(const Problem& p) {
  const int64_t longest = max(p.query_length, p.key_length);
  const int64_t low = is_packed(p) ? 1 - longest : 1 - p.query_length - p.position.diagonal;
  const int64_t high = is_packed(p) ? longest - 1 : p.key_length - 1 - p.position.diagonal;
  return {max(low, -p.position.window_left), min(high, p.position.window_right)};
}

// Leaves out the entries of relative_bias, and of its gradient, that no score reads.
SCALEDOT_FN void trim_relative_bias(Problem& p) {
  if (!p.relative_bias.data) return;
  const auto [low, high] = p.relative_range;
  const DistanceRange used = distances(p);
  const int64_t first = min(max(used.low, low), high);
  p.relative_range = {first, max(min(used.high, high), first)};
  const auto skip = [&, low = low](TensorView& view) {
    if (view.data) view.data = static_cast<char*>(view.data) + (first - low) * element_size(view.dtype);
  };
  skip(p.relative_bias);
  skip(p.grad_relative_bias);
}

// ---------------------------------------------------------------------------------------------------- one row
// Whether attn_mask is floating.
SCALEDOT_FN bool adds_mask(const Problem& p) { return p.attn_mask.data && p.attn_mask.dtype != DType::boolean; }

// Whether attn_mask has an element for key j, or for any of the keys.
SCALEDOT_FN bool has_mask(const Problem& p, int64_t j) { return p.attn_mask.data && j >= p.mask_begin; }
SCALEDOT_FN bool has_mask(const Problem& p, Range keys) { return has_mask(p, keys.end - 1); }
// The number of the first of the keys that has one, counted from keys.begin; of all keys if none has.
SCALEDOT_FN int64_t first_masked(const Problem& p, Range keys) {
  return min(max<int64_t>(p.mask_begin - keys.begin, 0), keys.end - keys.begin);
}
// The number that stands for the element of a key without one.
template <class T>
SCALEDOT_FN T neutral_element(const Problem& p) {
  return adds_mask(p) ? T(0) : T(1);
}

// Which of the two arrays of row_terms() a problem needs.
struct MaskUse {
  bool additive;  // alibi_slopes, relative_bias or a floating attn_mask
  bool boolean;   // a boolean attn_mask
};

SCALEDOT_FN MaskUse mask_use(const Problem& p) {
  const bool adds = adds_mask(p);
  return {p.alibi_slopes.data || p.relative_bias.data || adds, p.attn_mask.data && !adds};
}
// For these keys alone.
SCALEDOT_FN MaskUse mask_use(const Problem& p, Range keys) {
  const bool has = has_mask(p, keys), adds = has && adds_mask(p);
  return {p.alibi_slopes.data || p.relative_bias.data || adds, has && !adds};
}

// Whether False in a boolean attn_mask excludes its key (score -inf, weight 0). Otherwise the key scores masked_score.
SCALEDOT_FN bool masked_is_excluded(const Problem& p) { return p.masked_score == -__builtin_inf(); }

// Whether a boolean attn_mask gives keys masked_score.
SCALEDOT_FN bool replaces_scores(const Problem& p) { return mask_use(p).boolean && !masked_is_excluded(p); }
// Whether d score / d (scale * dot product) can differ from 1.
SCALEDOT_FN bool has_slopes(const Problem& p) { return p.softcap > 0 || p.score_program || replaces_scores(p); }

// Whether several scores share an element of grad_mask, so that their gradients are summed.
SCALEDOT_FN bool grad_mask_is_broadcast(const Problem& p) {
  const TensorView& m = p.grad_mask;
  if (!m.head_stride && p.heads != 1) return true;
  if (is_packed(p)) return false;
  bool broadcast = (!m.row_stride && p.query_length != 1) || (!m.col_stride && p.key_length - p.mask_begin != 1);
  for (int d = 0; d < p.batch_dims; ++d) broadcast |= !m.batch_stride[d] && p.batch_sizes[d] != 1;
  return broadcast;
}

// Elements from the first of grad_mask to the last.
SCALEDOT_FN int64_t grad_mask_extent(const Problem& p) {
  const TensorView& m = p.grad_mask;
  int64_t last =
      (p.heads - 1) * m.head_stride + (p.query_length - 1) * m.row_stride + (p.key_length - 1) * m.col_stride;
  for (int d = 0; d < p.batch_dims; ++d) last += (p.batch_sizes[d] - 1) * m.batch_stride[d];
  return last + 1;
}

// The state of a key for a row.
enum : uint8_t {
  kMasked = 0,    // score -inf
  kLive = 1,      // score as computed
  kReplaced = 2,  // score masked_score, and no gradient flows to the dot product
};

// Where the keys of a row, whose distances are origin, origin + 1, ..., are beyond relative_range: those before `begin`
// have its first entry, those from `end` on its last one.
SCALEDOT_FN Range unclamped_keys(const Problem& p, int64_t origin, int64_t keys) {
  const auto [low, high] = p.relative_range;
  const int64_t begin = max<int64_t>(min(low - origin, keys), 0);
  return {begin, max(min(high + 1 - origin, keys), begin)};
}

// Adds relative_bias at the distances origin, origin + 1, ... to additive[0], additive[1], ...
template <class T>
SCALEDOT_FN void add_relative_bias(const Problem& p, int64_t batch, int64_t head, int64_t origin, int n, T* additive) {
  const auto [low, high] = p.relative_range;
  const Range within = unclamped_keys(p, origin, n);
  const int64_t start = offset(p, p.relative_bias, batch, head);
  const auto add = [&, low = low, high = high](const auto* entries) {
    const auto first = entries[0], last = entries[high - low];
    for (int64_t k = 0; k < within.begin; ++k) additive[k] += T(first);
    for (int64_t k = within.begin; k < within.end; ++k) additive[k] += T(entries[origin + k - low]);
    for (int64_t k = within.end; k < n; ++k) additive[k] += T(last);
  };
  if (p.relative_bias.dtype == DType::float64)
    add(static_cast<const double*>(p.relative_bias.data) + start);
  else
    add(static_cast<const float*>(p.relative_bias.data) + start);
}

// The mask terms of row i for the keys [keys.begin, keys.end), element k belonging to key keys.begin + k:
//   additive[k]  is added to the capped score: -slope * |distance| + relative_bias + attn_mask; written if
//                mask_use(p, keys).additive
//   state[k]     kMasked, kLive or kReplaced. Pass nullptr unless the mask is boolean or the block mask hides some of
//                the keys: additive masks mark masked keys by -inf themselves, and row_keys() has the keys that
//                positions mask.
// Plain loops over k, which vectorise. Each runs only if the problem has that mask.
template <class T>
SCALEDOT_FN void row_terms(const Problem& p, int64_t batch, int64_t head, int64_t i, Range keys, T* additive,
                           uint8_t* state) {
  const int n = int(keys.end - keys.begin);
  const MaskUse use = mask_use(p, keys);
  if (use.additive) {
    const T slope = p.alibi_slopes.data ? load_element<T>(p.alibi_slopes.data, p.alibi_slopes.dtype,
                                                          offset(p, p.alibi_slopes, batch, head))
                                        : T(0);
    const int64_t origin = keys.begin - (i + p.position.diagonal);
    for (int k = 0; k < n; ++k) {
      const T distance = T(origin + k);
      additive[k] = slope == T(0) ? T(0) : -slope * (distance < T(0) ? -distance : distance);
    }
    if (p.relative_bias.data) add_relative_bias(p, batch, head, origin, n, additive);
  }
  const TensorView& mask = p.attn_mask;
  const int64_t start =
      mask.data ? offset(p, mask, batch, head) + i * mask.row_stride + keys.begin * mask.col_stride : 0;
  const int first = int(first_masked(p, keys));
  // Contiguous keys have a separate loop, which vectorises.
  const auto for_each = [&](const auto* data, const auto& body) {
    if (mask.col_stride == 1)
      for (int k = first; k < n; ++k) body(k, data[k]);
    else
      for (int k = first; k < n; ++k) body(k, data[k * mask.col_stride]);
  };
  if (adds_mask(p)) {
    const auto add = [&](const auto* data) {
      for_each(data + start, [&](int k, auto bias) { additive[k] += T(widen(bias)); });
    };
    switch (mask.dtype) {
      case DType::float32: add(static_cast<const float*>(mask.data)); break;
      case DType::float64: add(static_cast<const double*>(mask.data)); break;
      case DType::bfloat16: add(static_cast<const BFloat16*>(mask.data)); break;
      default: add(static_cast<const Float16*>(mask.data)); break;
    }
  }
  if (!state) return;

  const Range live = row_keys(p, i);
  const int live_begin = int(min<int64_t>(max<int64_t>(live.begin - keys.begin, 0), n));
  const int live_end = int(max<int64_t>(min<int64_t>(live.end - keys.begin, n), live_begin));
  for (int k = 0; k < live_begin; ++k) state[k] = kMasked;
  for (int k = live_begin; k < live_end; ++k) state[k] = kLive;
  for (int k = live_end; k < n; ++k) state[k] = kMasked;
  if (has_blocks(p)) mask_by_blocks(p, batch, head, i, keys, state);
  if (use.boolean) {
    const uint8_t otherwise = masked_is_excluded(p) ? kMasked : kReplaced;
    for_each(static_cast<const uint8_t*>(mask.data) + start, [&](int k, uint8_t allowed) {
      const uint8_t masked = state[k] == kLive ? otherwise : uint8_t(kMasked);
      state[k] = allowed ? state[k] : masked;
    });
  }
  if (use.additive)  // but masked_score replaces a score of -inf too
    for (int k = 0; k < n; ++k)
      state[k] = additive[k] == -T(__builtin_inf()) && state[k] == kLive ? uint8_t(kMasked) : state[k];
}

// ---------------------------------------------------------------------------------------------------- one key
// row_terms() for a GPU thread, which holds a few scores of a row. RowMask has what does not depend on the key;
// key_terms() gives the terms of one key. A caller with relative_bias computes what is added itself, and calls
// key_state(). Index is the type of key numbers: from 0, or in 32 bits from the first key of a tile.
template <class T, class Index = int64_t>
struct RowMask {
  struct {
    Index begin, end;
  } live;         // row_keys
  Index aligned;  // i + diagonal
  int64_t start;  // of the row in attn_mask, in elements
  T slope;
};

template <class T>
SCALEDOT_FN RowMask<T> row_mask(const Problem& p, int64_t batch, int64_t head, int64_t i) {
  const Range live = row_keys(p, i);
  RowMask<T> row = {{live.begin, live.end}, i + p.position.diagonal, 0, T(0)};
  if (p.attn_mask.data) row.start = offset(p, p.attn_mask, batch, head) + i * p.attn_mask.row_stride;
  if (p.alibi_slopes.data)
    row.slope = load_element<T>(p.alibi_slopes.data, p.alibi_slopes.dtype, offset(p, p.alibi_slopes, batch, head));
  return row;
}

// The term that alibi_slopes adds to the capped score of key j.
template <class T, class Index>
SCALEDOT_FN T alibi_bias(const RowMask<T, Index>& row, Index j) {
  const T distance = T(j - row.aligned);
  return row.slope == T(0) ? T(0) : -row.slope * (distance < T(0) ? -distance : distance);
}

// The entry of relative_bias for key j of the row, counted from the first.
template <class T, class Index>
SCALEDOT_FN int64_t relative_entry(const Problem& p, const RowMask<T, Index>& row, Index j) {
  const auto [low, high] = p.relative_range;
  return min(max(int64_t(j) - int64_t(row.aligned), low), high) - low;
}

// The state of key j for the row. `additive`: all that is added to its score, if `adds`; `element`: attn_mask at
// start + j * col_stride, neutral_element() if has_mask(p, j) is false, any value if there is no attn_mask.
template <class T, class Index>
SCALEDOT_FN uint8_t key_state(const Problem& p, const RowMask<T, Index>& row, Index j, T element, bool adds,
                              T additive) {
  if (j < row.live.begin || j >= row.live.end) return kMasked;
  const MaskUse use = mask_use(p);
  // A constant of the call: computed first, it is a select on a GPU and not a branch for every key.
  const uint8_t otherwise = masked_is_excluded(p) ? kMasked : kReplaced;
  if (use.boolean && element == T(0)) return otherwise;
  return adds && additive == -T(__builtin_inf()) ? kMasked : kLive;
}

// Both, for a problem without relative_bias.
template <class T, class Index>
SCALEDOT_FN uint8_t key_terms(const Problem& p, const RowMask<T, Index>& row, Index j, T element, T& additive) {
  additive = alibi_bias(row, j);
  if (adds_mask(p)) additive += element;
  return key_state(p, row, j, element, p.alibi_slopes.data || adds_mask(p), additive);
}

// ---------------------------------------------------------------------------------------------------- one score
// V is a scalar or a vector type with tanh(V) and a constructor from a scalar.
//
//   capped(x)       = softcap * tanh(x / softcap)
//   capped'(x)      = 1 - (capped(x) / softcap)^2
template <class V, class T>
SCALEDOT_FN V capped(V x, T softcap) {
  return V(softcap) * tanh(x * V(T(1) / softcap));
}
template <class V, class T>
SCALEDOT_FN V capped_slope(V capped_score, T softcap) {
  const V ratio = capped_score * V(T(1) / softcap);
  return V(T(1)) - ratio * ratio;
}

}  // namespace scaledot
