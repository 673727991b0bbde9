// From S^T and dP^T to Pd^T and dX^T, in the registers of a warpgroup.
//
// A thread holds scores of two keys, 16 warp + lane / 4 and 8 further, and 16 rows: element 4n + 2h + j belongs to key h and row
// 8n + 2 (lane % 4) + j. Bit 4n + 2h + j of a mask of elements says something of it.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/backward_rows.cuh"

namespace scaledot {
namespace {

constexpr int kScores = kBackwardRows / 2;  // that a thread holds

struct KeyLane {
  int warp, group, quad;  // key 16 warp + group, rows 2 quad

  SCALEDOT_MEMBER int key(int half) const { return 16 * warp + group + 8 * half; }
  SCALEDOT_MEMBER int row(int n, int j) const { return 8 * n + 2 * quad + j; }
};
SCALEDOT_DEVICE KeyLane key_lane() {
  const int thread = thread_index_anew(), lane = thread % kWarpSize;
  return {thread / kWarpSize % 4, lane / 4, lane % 4};
}

// Elements that are not live. `first_key`: of the warpgroup in the tile of keys.
SCALEDOT_DEVICE uint32_t outside_band(const Band& band, const KeyLane& lane, int first_key) {
  uint32_t outside = 0;
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      outside |= uint32_t(!in_band(band, lane.row(n, e % 2), first_key + lane.key(e / 2))) << (4 * n + e);
  return outside;
}

// P from S, where scores are products: P = 2^(scale / log 2 S - lse2).
template <bool kMasked>
SCALEDOT_DEVICE void weights_of_products(float (&s)[kScores], const RowTerms* terms, float scale2, const KeyLane& lane,
                                         uint32_t masked) {
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float lse2 = shared_load(&terms[lane.row(n, j)].lse2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = s[4 * n + 2 * half + j];
        x = fast_exp2(x * scale2 - lse2);
        if (kMasked && masked >> (4 * n + 2 * half + j) & 1) x = 0;
      }
    }
}

// dS from P and dP.
template <bool kMasked>
SCALEDOT_DEVICE void gradients_of_products(const float (&s)[kScores], float (&dp)[kScores], const RowTerms* terms,
                                           const KeyLane& lane, uint32_t masked) {
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float delta = shared_load(&terms[lane.row(n, j)].delta);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = 4 * n + 2 * half + j;
        dp[e] = kMasked && masked >> e & 1 ? 0.0f : s[e] * (dp[e] - delta);
      }
    }
}

// Which weights of a warpgroup's 64 keys dropout keeps: bit w of kept[16 row + lane] for key 16w + lane. Every thread draws the words of half a
// row; a barrier of the warpgroup makes them known.
SCALEDOT_DEVICE void draw_dropout(const Problem& p, uint8_t* kept, int batch, int head, int first_row,
                                  int64_t first_key) {
  const int thread = thread_index() % kWarpgroupThreads, row = thread / 2, first = thread % 2 * 8;
  const DropoutRow stream = dropout_row(p, batch, head, first_row + row);
  uint32_t bits[2] = {0, 0};
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const PhiloxWords words = dropout_words(stream, first_key / kDropoutGroup, first + k);
    uint32_t here = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) here |= uint32_t(words.word[w] >= stream.threshold) << w;
    bits[k / 4] |= here << (k % 4 * 8);
  }
  shared_store(reinterpret_cast<uint32_t*>(kept + row * kDropoutLanes + first), bits[0]);
  shared_store(reinterpret_cast<uint32_t*>(kept + row * kDropoutLanes + first + 4), bits[1]);
}

// What scores of any kind need of the problem.
SCALEDOT_DEVICE TileTerms<float> general_terms(const Problem& p, bool masks) {
  return {float(p.scale),
          float(p.softcap),
          float(p.masked_score),
          float(1.0 / (1.0 - p.dropout_p)),
          p.softcap > 0,
          masks,
          p.attn_mask.data || p.alibi_slopes.data,
          p.dropout_p > 0};
}

// Pd and dX from S and dP, for scores of any kind; dMask = dS on the way. `kept`: draw_dropout's, or nullptr.
template <class C>
SCALEDOT_DEVICE void general_scores(const Problem& p, const TileTerms<float>& tile, float (&s)[kScores],
                                    float (&dp)[kScores], const RowTerms* terms, const RowPosition* positions,
                                    const uint8_t* kept, int row_count, Range keys, int first_key,
                                    const KeyLane& lane) {
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = lane.row(n, j);
      const RowTerms t = shared_load(terms + r);
      const RowPosition position = shared_load(positions + r);
      ThreadRow<float> row = {};
      row.there = r < row_count;
      row.live_begin = int(larger<int64_t>(position.live_begin - keys.begin, 0));
      row.live_end = row.there ? int(smaller<int64_t>(position.live_end - keys.begin, count(keys))) : 0;
      row.mask = {{position.live_begin, position.live_end}, position.aligned, position.mask_start, position.slope};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = 4 * n + 2 * half + j, k = first_key + lane.key(half);
        const Score<float> x = score(p, tile, row, keys, k, s[e]);
        const bool masked = x.state == kMasked;
        const bool keeps = !kept || shared_load(kept + r * kDropoutLanes + lane.group + 8 * half) >> lane.warp & 1;
        const float weight = fast_exp2((rounded_subtract(x.value, t.offset) - t.log_sum) * kLog2E);
        const float grad = keeps ? dp[e] * tile.kept : 0.0f;
        const float grad_score = masked ? 0.0f : weight * (grad - t.delta);
        s[e] = masked ? 0.0f : weight * (keeps ? tile.kept : 0.0f);
        dp[e] = grad_score * x.slope;
        if (p.grad_mask.data && row.there && k < int(count(keys)))
          global_store_element(p.grad_mask.data, p.grad_mask.dtype,
                               position.grad_mask_start + (keys.begin + k) * p.grad_mask.col_stride, grad_score);
      }
    }
}

// 64 keys x 64 rows of sums, narrowed: an operand of four products of depth 16 (wgmma.h).
template <class Storage>
SCALEDOT_DEVICE void narrow_scores(const float (&x)[kScores], uint32_t (&a)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int e = 8 * k + r / 2 * 4 + r % 2 * 2;
      a[k][r] = narrow_pair(x[e], x[e + 1], Type<Storage>{});
    }
}

// The same to shared memory, a row of 128 bytes for every key.
SCALEDOT_DEVICE void store_scores(void* to, const uint32_t (&a)[4][4], const KeyLane& lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      shared_store(reinterpret_cast<uint32_t*>(static_cast<char*>(to) +
                                               swizzled_byte(lane.key(r % 2), 32 * k + r / 2 * 16 + 4 * lane.quad)),
                   a[k][r]);
}

}  // namespace
}  // namespace scaledot
