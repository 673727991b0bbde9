// From the products of a consumer of the forward to weights, in the registers of a thread. core/mask.h defines a score.
//
// A thread holds elements of two of the warpgroup's 64 rows. Element 4n + e belongs to row row(e / 2) and key
// 8n + 2 (lane % 4) + e % 2 of the tile (ptx/wgmma.h).
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/forward_tiles.h"

namespace scaledot {
namespace {

// Constants of the problem, as float. As a kernel parameter they take no registers.
struct ScoreScalars {
  float scale, softcap, masked_score;
  float exponent;  // a weight is exp2((s - maximum) * exponent), for scores s as finish_scores leaves them
  float dropout_scale;
};
template <class C>
ScoreScalars scalars_of(const Problem& p) {
  constexpr float kLog2eFloat = float(kLog2e);
  return {float(p.scale), float(p.softcap), float(p.masked_score),
          C::kGeneral ? kLog2eFloat : float(p.scale * double(kLog2eFloat)), float(dropout_scale(p))};
}

// The row and column of a thread's element 0 in the warpgroup's accumulator.
struct FragmentOrigin {
  int row, col;
};
SCALEDOT_DEVICE FragmentOrigin fragment_origin() {
  const int thread = opt_barrier(thread_index() % kWarpgroupThreads);
  return {thread / kWarpSize * 16 + thread % kWarpSize / 4, thread % 4 * 2};
}

// The thread's two rows. Rows past the last one are computed like the last one, and not stored.
template <class C>
struct Sm90ThreadRows {
  int batch_head;                  // batch * heads + head
  int first;                       // row of element 0
  int live_begin[2], live_end[2];  // the keys that each row may attend to by position
  // Only in general kernels:
  float slope;     // ALiBi
  int64_t offset;  // of (batch, head) in attn_mask

  SCALEDOT_MEMBER int row(const Problem& p, int half) const { return min(first + 8 * half, int(p.query_length) - 1); }
};

template <class C>
SCALEDOT_DEVICE Sm90ThreadRows<C> sm90_thread_rows(const Problem& p, int batch_head, int first_row) {
  Sm90ThreadRows<C> rows = {};
  rows.batch_head = batch_head, rows.first = first_row + fragment_origin().row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range live = row_keys(p, rows.row(p, half));
    rows.live_begin[half] = int(live.begin), rows.live_end[half] = int(max<int64_t>(live.end, 0));
  }
  if constexpr (C::kGeneral) {
    const RowMask<float> row = row_mask<float>(p, batch_head / int(p.heads), batch_head % int(p.heads), 0);
    rows.slope = row.slope, rows.offset = row.start;
  }
  return rows;
}

// Whether some score of the key tile is masked by position for one of the query tile's rows, or is past the last key. A
// general kernel looks at the thread's own rows, because it has no registers for the range of keys that all rows share.
template <class C>
SCALEDOT_DEVICE bool has_masked(const Sm90KeyTiles& keys, const Sm90ThreadRows<C>& rows, int first_key) {
  if constexpr (!C::kGeneral) return tile_has_masked(keys, first_key, C::kKeys);
  return first_key < rows.live_begin[1] || first_key + C::kKeys > rows.live_end[0];
}

// The mask of one row, for keys counted from first_key.
template <class C>
SCALEDOT_DEVICE RowMask<float, int> mask_of_row(const Problem& p, const Sm90ThreadRows<C>& rows, int half,
                                                int first_key) {
  const int row = rows.row(p, half);
  return {{rows.live_begin[half] - first_key, rows.live_end[half] - first_key},
          int(row + p.position.diagonal - first_key),
          rows.offset + row * p.attn_mask.row_stride + first_key * p.attn_mask.col_stride,
          rows.slope};
}

// The state of key k, and in `additive` what is added to its score. `element`: of attn_mask.
SCALEDOT_DEVICE uint8_t key_state(const Problem& p, const RowMask<float, int>& row, int k, float element,
                                  float& additive) {
  additive = 0;
  return k < row.live.begin || k >= row.live.end ? uint8_t(kMasked) : key_terms(p, row, k, element, additive);
}

// Elements of attn_mask that a thread loads at a time: as many as there are registers for. Element i is that of key
// mask_key(i), counted from the thread's first one, as in for_each_key.
template <class C>
constexpr int kMaskElements = C::kValueDim == 128  ? 16
                              : C::kValueDim < 128 ? 8
                                                   : 4;
SCALEDOT_HOST_DEVICE constexpr int mask_key(int i) { return i / 2 * 8 + i % 2; }

// Loads elements `first`, first + 1, ... of a row before the first of them is used: otherwise each would wait for
// memory. Those of keys that the row may not attend to by position are not loaded.
template <class C>
SCALEDOT_DEVICE void load_mask_row(const Problem& p, const RowMask<float, int>& row, int first,
                                   float (&elements)[kMaskElements<C>]) {
  const TensorView& mask = p.attn_mask;
  if (!mask.data) return;
  with_elements<float>(mask.data, mask.dtype, [&](const auto& from) {
    const bool whole = row.live.begin <= 0 && row.live.end > mask_key(C::kKeys / 4 - 1);
    if (mask.col_stride == 1 && whole && from.pairs_at(row.start)) {
#pragma unroll
      for (int i = 0; i < kMaskElements<C>; i += 2)
        from.load_pair(row.start + mask_key(first + i), elements[i], elements[i + 1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kMaskElements<C>; ++i) {
      const int k = mask_key(first + i);
      elements[i] = k < row.live.begin || k >= row.live.end ? 0.0f : from(row.start + k * mask.col_stride);
    }
  });
}

// Whether element (half, k) is masked.
template <class C>
SCALEDOT_DEVICE bool is_masked(const Problem& p, const Sm90ThreadRows<C>& rows, int half, int first_key, int k) {
  if constexpr (C::kGeneral) {
    const RowMask<float, int> row = mask_of_row(p, rows, half, first_key);
    const TensorView& mask = p.attn_mask;
    const bool loads = mask.data && k >= row.live.begin && k < row.live.end;
    const float element = loads ? global_element<float>(mask.data, mask.dtype, row.start + k * mask.col_stride) : 0.0f;
    float additive;
    return key_state(p, row, k, element, additive) == kMasked;
  } else {
    return first_key + k < rows.live_begin[half] || first_key + k >= rows.live_end[half];
  }
}

// Calls body(element, key) for the thread's elements of one row. Keys are counted from the thread's first one.
template <class C, class Body>
SCALEDOT_DEVICE void for_each_key(float (&s)[C::kKeys / 2], int half, const Body& body) {
#pragma unroll
  for (int n = 0; n < C::kKeys / 8; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) body(s[4 * n + 2 * half + j], 8 * n + j);
}

// Replaces the scores of elements `first`, first + 1, ... of a row by those with the mask and ALiBi.
template <class C>
SCALEDOT_DEVICE void apply_mask_row(const Problem& p, const ScoreScalars& scalars, const RowMask<float, int>& row,
                                    int half, int first, float (&s)[C::kKeys / 2]) {
  constexpr float kNone = -__builtin_inff();
  float elements[kMaskElements<C>] = {};
  load_mask_row<C>(p, row, first, elements);
  const auto with_mask = [&](const auto& score_of) {
#pragma unroll
    for (int i = 0; i < kMaskElements<C>; ++i) {
      const int n = (first + i) / 2, k = mask_key(first + i);
      float& x = s[4 * n + 2 * half + i % 2];
      x = score_of(x, k, elements[i], k >= row.live.begin && k < row.live.end);
    }
  };
  // The usual masks have loops of their own, with a few instructions for a score.
  if (p.alibi_slopes.data || !p.attn_mask.data)
    with_mask([&](float x, int k, float element, bool) {
      float additive;
      const uint8_t state = key_state(p, row, k, element, additive);
      x = rounded_add(x, additive);
      return state == kMasked ? kNone : state == kReplaced ? scalars.masked_score : x;
    });
  else if (adds_mask(p))
    with_mask([&](float x, int, float element, bool attends) {
      return attends && element != kNone ? rounded_add(x, element) : kNone;
    });
  else
    with_mask([&](float x, int, float element, bool attends) {
      return !attends ? kNone : element == 0 ? scalars.masked_score : x;
    });
}

// Replaces products by scores. In a general kernel they are final; otherwise the factor `scale` is left to
// exponentiate.
template <class C>
SCALEDOT_DEVICE void finish_scores(const Problem& p, const ScoreScalars& scalars, const Sm90ThreadRows<C>& rows,
                                   int first_key, bool has_masked, float (&s)[C::kKeys / 2]) {
  constexpr float kNone = -__builtin_inff();
  first_key += fragment_origin().col;
  if constexpr (!C::kGeneral) {
    if (!has_masked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = rows.live_begin[half] - first_key, end = rows.live_end[half] - first_key;
      for_each_key<C>(s, half, [&](float& x, int k) {
        if (k < begin || k >= end) x = kNone;
      });
    }
  } else {
#pragma unroll
    for (int e = 0; e < C::kKeys / 2; ++e) s[e] *= scalars.scale;
    if (scalars.softcap > 0)
#pragma unroll
      for (int e = 0; e < C::kKeys / 2; ++e) s[e] = capped(opt_barrier(s[e]), scalars.softcap);
    if (!has_masked && !p.attn_mask.data && !p.alibi_slopes.data) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowMask<float, int> row = mask_of_row(p, rows, half, first_key);
#pragma unroll
      for (int first = 0; first < C::kKeys / 4; first += kMaskElements<C>)
        apply_mask_row<C>(p, scalars, row, half, first, s);
    }
  }
}

// The softmax of the thread's two rows so far. The sum covers this thread's elements only.
template <class C>
struct OnlineSoftmax {
  float maximum[2], sum[2];
};
template <class C>
SCALEDOT_DEVICE OnlineSoftmax<C> empty_softmax() {
  return {{-__builtin_inff(), -__builtin_inff()}, {0, 0}};
}

// A weight is exp2((s - m) c). As exp2(s c - m c) it takes one multiply-add; the rounding of m c is the same for a
// whole row and cancels out in the normalised weights. That form is used up to this exponent. Beyond it the rounding
// exceeds what weights may be off by. A general kernel never uses it: its scores may be as large as a masked_score of
// -1e9.
constexpr float kLargeExponent = 8192;

// Replaces the scores of the thread's rows by weights, and adds them to `sum`. Both rows in one loop: their sums do not
// wait for each other.
template <class C, bool kFused>
SCALEDOT_DEVICE void exp2_rows(const float (&maximum)[2], float factor, float (&s)[C::kKeys / 2], float (&sum)[2]) {
  const float scaled[2] = {maximum[0] * factor, maximum[1] * factor};
#pragma unroll
  for (int e = 0; e < C::kKeys / 2; ++e) {
    const int half = e / 2 % 2;
    s[e] = flushed_exp2(kFused ? fma(s[e], factor, -scaled[half]) : rounded_subtract(s[e], maximum[half]) * factor);
    sum[half] += s[e];
  }
}

// exponentiate() of a general kernel, whose registers do not suffice for two rows at a time.
template <class C>
SCALEDOT_DEVICE void exponentiate_by_row(OnlineSoftmax<C>& online, float factor, float (&s)[C::kKeys / 2],
                                         float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = online.maximum[half];
    float highest = before, sum = 0;
    for_each_key<C>(s, half, [&](float x, int) { highest = fast_max(highest, x); });
    highest = fast_max(highest, shuffle_xor(highest, 1));
    highest = fast_max(highest, shuffle_xor(highest, 2));
    const float base = shift(highest);
    rescale[half] = highest == before ? 1.0f : flushed_exp2(rounded_subtract(before, base) * factor);
    for_each_key<C>(s, half, [&](float& x, int) {
      x = flushed_exp2(rounded_subtract(x, base) * factor);
      sum += x;
    });
    online.maximum[half] = highest;
    online.sum[half] = online.sum[half] * rescale[half] + sum;
  }
}

// Updates the rows' maxima, and replaces scores by weights exp(s - maximum). `rescale`: the factors by which earlier
// sums must be multiplied. A NaN score does not change the maximum; its weight is NaN, and so is the row's sum.
template <class C>
SCALEDOT_DEVICE void exponentiate(OnlineSoftmax<C>& online, float factor, float (&s)[C::kKeys / 2],
                                  float (&rescale)[2]) {
  if constexpr (C::kGeneral) return exponentiate_by_row<C>(online, factor, s, rescale);
  float highest[2] = {online.maximum[0], online.maximum[1]}, base[2], sum[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < C::kKeys / 2; ++e) highest[e / 2 % 2] = fast_max(highest[e / 2 % 2], s[e]);
  bool fused = true;  // for both rows, so that there is one branch
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    highest[half] = fast_max(highest[half], shuffle_xor(highest[half], 1));
    highest[half] = fast_max(highest[half], shuffle_xor(highest[half], 2));
    const float before = online.maximum[half];
    base[half] = shift(highest[half]);
    rescale[half] = highest[half] == before ? 1.0f : flushed_exp2(rounded_subtract(before, base[half]) * factor);
    online.maximum[half] = highest[half];
    fused &= base[half] * factor <= kLargeExponent && base[half] * factor >= -kLargeExponent;
  }
  if (fused)
    exp2_rows<C, true>(base, factor, s, sum);
  else
    exp2_rows<C, false>(base, factor, s, sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) online.sum[half] = online.sum[half] * rescale[half] + sum[half];
}

// Dropped weights become 0; NaN stays NaN. Keys 16 apart share a counter. Two counters are drawn at a time: each is a
// chain of dependent products, and more of them would take more registers than the accumulators leave.
template <class C>
SCALEDOT_DEVICE void apply_dropout(const Problem& p, const Sm90ThreadRows<C>& rows, int first_key,
                                   float (&s)[C::kKeys / 2]) {
  constexpr int kCounters = 4;  // of a group of keys for one thread: two neighbouring keys, and the two 8 further on
  static_assert(C::kKeys % kDropoutGroup == 0 && C::kKeys <= 128);
  const int col = fragment_origin().col;
  const int batch = rows.batch_head / int(p.heads), head = rows.batch_head % int(p.heads);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DropoutRow stream = dropout_row(p, batch, head, rows.row(p, half));
    uint32_t keep_mask = 0;  // bit 2n + j: element j of group n of 8 keys
#pragma unroll 2
    for (int c = 0; c < C::kKeys / kDropoutGroup * kCounters; ++c) {
      const int group = c / kCounters, parity = c / 2 % 2, j = c % 2;
      const PhiloxWords words = dropout_words(stream, first_key / kDropoutGroup + group, 8 * parity + col + j);
#pragma unroll
      for (int w = 0; w < 4; ++w)
        keep_mask |= uint32_t(words.word[w] >= stream.threshold) << (2 * (8 * group + 2 * w + parity) + j);
    }
    for_each_key<C>(s, half, [&](float& x, int k) {
      if (!(keep_mask >> (k / 8 * 2 + k % 2) & 1)) x *= 0.0f;
    });
  }
}

// Weights as the register operand of the next product.
template <class C>
SCALEDOT_DEVICE void narrow_weights(const float (&s)[C::kKeys / 2], uint32_t (&weights)[C::kKeys / 16][4]) {
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      weights[k][r] = narrow_pair(s[8 * k + 2 * r], s[8 * k + 2 * r + 1], Type<typename C::Storage>{});
}

// The state of a whole row, from the four threads that share it; the maximum in units of the score.
template <class C>
SCALEDOT_DEVICE RowState<float> reduce_row(const ScoreScalars& scalars, const OnlineSoftmax<C>& online, int half) {
  float sum = online.sum[half];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  const float maximum = online.maximum[half];
  return {C::kGeneral ? maximum : maximum * scalars.scale, sum};
}

}  // namespace
}  // namespace scaledot
