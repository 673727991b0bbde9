// From the products of a consumer to weights, in the registers of a thread; core/mask.h says what a score is.
//
// A thread has elements of two rows, of the warpgroup's 64; element 4n + e belongs to row row(e / 2) and key 8n + 2 (lane % 4) + e % 2 of
// the tile (ptx/wgmma.h).
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/config.h"

namespace scaledot {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Numbers of the problem as kernels use them; in a parameter they cost no registers.
struct Scalars {
  float scale, softcap, masked_score;
  float exponent;  // what a score is multiplied with to be an exponent of 2
  float kept;      // 1 / (1 - dropout_p)
};
template <class C>
Scalars scalars_of(const Problem& p) {
  return {float(p.scale), float(p.softcap), float(p.masked_score),
          C::kGeneral ? kLog2E : float(p.scale * double(kLog2E)), float(1 / (1 - p.dropout_p))};
}

// Where a thread's elements are, from here on in registers.
struct Place {
  int row, col;  // of element 0
};
SCALEDOT_DEVICE Place place_of_thread() {
  const int thread = recomputed(thread_index() % kWarpgroupThreads);
  return {thread / kWarpSize * 16 + thread % kWarpSize / 4, thread % 4 * 2};
}

// What a thread knows of its rows. Rows behind the last one count as that one: they are computed, and not stored.
template <class C>
struct ThreadRows {
  int plane;                       // batch * heads + head
  int first;                       // row of element 0
  int live_begin[2], live_end[2];  // keys
  float slope;                     // general
  int64_t offset;                  // general: of (batch, head) in attn_mask

  SCALEDOT_MEMBER int row(const Problem& p, int half) const {
    return min(first + 8 * half, int(p.query_length) - 1);
  }
};

template <class C>
SCALEDOT_DEVICE ThreadRows<C> thread_rows(const Problem& p, int plane, int first_row) {
  ThreadRows<C> rows = {};
  rows.plane = plane, rows.first = first_row + place_of_thread().row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range live = row_keys(p, rows.row(p, half));
    rows.live_begin[half] = int(live.begin), rows.live_end[half] = int(max<int64_t>(live.end, 0));
  }
  if constexpr (C::kGeneral) {
    const RowMask<float> row = row_mask<float>(p, plane / int(p.heads), plane % int(p.heads), 0);
    rows.slope = row.slope, rows.offset = row.start;
  }
  return rows;
}

// Whether some score of the tile is masked by position for one of the tile's rows, or belongs to no key. A general kernel looks at the
// thread's own rows: it has no registers for the keys that all rows see.
template <class C>
SCALEDOT_DEVICE bool has_masked(const TileKeys& keys, const ThreadRows<C>& rows, int first_key) {
  if constexpr (!C::kGeneral) return tile_has_masked(keys, first_key, C::kKeys);
  return first_key < rows.live_begin[1] || first_key + C::kKeys > rows.live_end[0];
}

// What one row is to keys, counted from first_key (which may be that of the thread's first element).
template <class C>
SCALEDOT_DEVICE RowMask<float, int> mask_of_row(const Problem& p, const ThreadRows<C>& rows, int half, int first_key) {
  const int row = rows.row(p, half);
  return {{rows.live_begin[half] - first_key, rows.live_end[half] - first_key},
          int(row + p.position.diagonal - first_key),
          rows.offset + row * p.attn_mask.row_stride + first_key * p.attn_mask.col_stride,
          rows.slope};
}

// The state of a key, and what is added to its score. element(k) is attn_mask's, asked for only where the row attends by position.
template <class Element>
SCALEDOT_DEVICE uint8_t look_up(const Problem& p, const RowMask<float, int>& row, int k, const Element& element,
                                float& additive) {
  additive = 0;
  return k < row.live.begin || k >= row.live.end ? uint8_t(kMasked) : key_terms(p, row, k, element(k), additive);
}

// Calls body(element) with what loads attn_mask's elements of a row: one of the types that masks mostly have, or any.
template <class Number, class Body>
SCALEDOT_DEVICE void with_elements(const Problem& p, const RowMask<float, int>& row, const Body& body) {
  const TensorView& mask = p.attn_mask;
  const auto of_type = [&](auto type) {
    using Stored = typename decltype(type)::type;
    const Stored* from = static_cast<const Stored*>(mask.data) + row.start;
    body([&](int k) { return float(widen(global_load(from + k * mask.col_stride))); });
  };
  if (!mask.data)
    body([](int) { return 0.0f; });
  else if (mask.dtype == p.dtype)
    of_type(Type<Number>{});
  else if (mask.dtype == DType::float32)
    of_type(Type<float>{});
  else
    body([&](int k) { return global_element<float>(mask.data, mask.dtype, row.start + k * mask.col_stride); });
}

// Whether element (half, k) is masked.
template <class C>
SCALEDOT_DEVICE bool is_masked(const Problem& p, const ThreadRows<C>& rows, int half, int first_key, int k) {
  if constexpr (C::kGeneral) {
    const RowMask<float, int> row = mask_of_row(p, rows, half, first_key);
    float additive;
    const auto element = [&](int at) {
      const TensorView& mask = p.attn_mask;
      return mask.data ? global_element<float>(mask.data, mask.dtype, row.start + at * mask.col_stride) : 0.0f;
    };
    return look_up(p, row, k, element, additive) == kMasked;
  } else {
    return first_key + k < rows.live_begin[half] || first_key + k >= rows.live_end[half];
  }
}

// Calls body(element, key) for the thread's elements of one row; keys are counted from that of its first element.
template <class C, class Body>
SCALEDOT_DEVICE void for_row(float (&s)[C::kKeys / 2], int half, const Body& body) {
#pragma unroll
  for (int n = 0; n < C::kKeys / 8; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) body(s[4 * n + 2 * half + j], 8 * n + j);
}

// Scores in place of products. In a general kernel they are final; otherwise they have still to be multiplied with the scale.
template <class C>
SCALEDOT_DEVICE void finish_scores(const Problem& p, const Scalars& scalars, const ThreadRows<C>& rows, int first_key,
                                   bool has_masked, float (&s)[C::kKeys / 2]) {
  constexpr float kNone = -__builtin_inff();
  first_key += place_of_thread().col;
  if constexpr (!C::kGeneral) {
    if (!has_masked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = rows.live_begin[half] - first_key, end = rows.live_end[half] - first_key;
      for_row<C>(s, half, [&](float& x, int k) {
        if (k < begin || k >= end) x = kNone;
      });
    }
  } else {
#pragma unroll
    for (int e = 0; e < C::kKeys / 2; ++e) s[e] *= scalars.scale;
    if (scalars.softcap > 0)
#pragma unroll
      for (int e = 0; e < C::kKeys / 2; ++e) s[e] = capped(recomputed(s[e]), scalars.softcap);
    if (!has_masked && !p.attn_mask.data && !p.alibi_slopes.data) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowMask<float, int> row = mask_of_row(p, rows, half, first_key);
      with_elements<typename C::Number>(p, row, [&](const auto& element) {
        for_row<C>(s, half, [&](float& x, int k) {
          float additive;
          const uint8_t state = look_up(p, row, k, element, additive);
          x = rounded_add(x, additive);
          if (state == kReplaced) x = scalars.masked_score;
          if (state == kMasked) x = kNone;
        });
      });
    }
  }
}

// The rows' softmax so far. The sum is of this thread's elements only.
template <class C>
struct OnlineRows {
  float maximum[2], sum[2];
};
template <class C>
SCALEDOT_DEVICE OnlineRows<C> no_rows() {
  return {{-__builtin_inff(), -__builtin_inff()}, {0, 0}};
}

// exp2(s c - m c) takes one multiply-add a score: that m c is rounded is the same for all of a row and cancels out. Where the rounding
// is more than weights may be off by, and for the scores of a general kernel, which may be as large as a masked_score of -1e9,
// exp2((s - m) c).
constexpr float kLargeExponent = 8192;

// The weights of one of the thread's rows in place of its scores; returns their sum.
template <class C, bool kFused>
SCALEDOT_DEVICE float weights_of_row(float maximum, float factor, int half, float (&s)[C::kKeys / 2]) {
  const float scaled = maximum * factor;
  float sum = 0;
  for_row<C>(s, half, [&](float& x, int) {
    x = fast_exp2(kFused ? fused_multiply_add(x, factor, -scaled) : rounded_subtract(x, maximum) * factor);
    sum += x;
  });
  return sum;
}

// Turns scores into weights exp(s - maximum); `rescale`: by what all before has to be multiplied.
template <class C>
SCALEDOT_DEVICE void exponentiate(OnlineRows<C>& online, float factor, float (&s)[C::kKeys / 2], float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = online.maximum[half];
    float highest = before;
    for_row<C>(s, half, [&](float x, int) { highest = max(highest, x); });
    highest = max(highest, shuffle_xor(highest, 1));
    highest = max(highest, shuffle_xor(highest, 2));
    const float base = shift(highest), scaled = base * factor;
    rescale[half] = highest == before ? 1.0f : fast_exp2(rounded_subtract(before, base) * factor);
    const bool fused = !C::kGeneral && scaled <= kLargeExponent && scaled >= -kLargeExponent;
    const float sum = fused ? weights_of_row<C, !C::kGeneral>(base, factor, half, s)
                            : weights_of_row<C, false>(base, factor, half, s);
    online.maximum[half] = highest;
    online.sum[half] = online.sum[half] * rescale[half] + sum;
  }
}

// Dropped weights become 0, NaN stays NaN. Keys 16 apart share a counter; counters are drawn one after the other, because all at once
// would take more registers than the sums leave.
template <class C>
SCALEDOT_DEVICE void drop(const Problem& p, const ThreadRows<C>& rows, int first_key, float (&s)[C::kKeys / 2]) {
  constexpr int kCounters = 4;  // of a group of keys: two neighbouring keys, and those 8 further
  static_assert(C::kKeys % kDropoutGroup == 0 && C::kKeys <= 128);
  const int col = place_of_thread().col;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const DropoutRow stream = dropout_row(p, 0, rows.plane, rows.row(p, half));
    uint32_t kept = 0;  // bit 2n + j: element j of group n of 8 keys
#pragma unroll 1
    for (int c = 0; c < C::kKeys / kDropoutGroup * kCounters; ++c) {
      const int group = c / kCounters, parity = c / 2 % 2, j = c % 2;
      const PhiloxWords words = dropout_words(stream, first_key / kDropoutGroup + group, 8 * parity + col + j);
#pragma unroll
      for (int w = 0; w < 4; ++w)
        kept |= uint32_t(words.word[w] >= stream.threshold) << (2 * (8 * group + 2 * w + parity) + j);
    }
    for_row<C>(s, half, [&](float& x, int k) {
      if (!(kept >> (k / 8 * 2 + k % 2) & 1)) x *= 0.0f;
    });
  }
}

// Weights as an operand of the next product.
template <class C>
SCALEDOT_DEVICE void narrow_weights(const float (&s)[C::kKeys / 2], uint32_t (&weights)[C::kKeys / 16][4]) {
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      weights[k][r] = narrow_pair(s[8 * k + 2 * r], s[8 * k + 2 * r + 1], Type<typename C::Number>{});
}

// The whole rows' state: maximum in units of the score.
template <class C>
SCALEDOT_DEVICE RowState<float> whole_row(const Scalars& scalars, const OnlineRows<C>& online, int half) {
  float sum = online.sum[half];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  const float maximum = online.maximum[half];
  return {C::kGeneral ? maximum : maximum * scalars.scale, sum};
}

}  // namespace
}  // namespace scaledot
