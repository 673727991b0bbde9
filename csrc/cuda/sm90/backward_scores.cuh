// From S^T and dP^T to Pd^T and dX^T, in the registers of a warpgroup.
//
// Element 4n + 2h + j of a thread belongs to key key(h) and row row(n, j) of its Sm90BackwardLayout (backward_tiles.h).
// It has bit 4n + 2h + j in a set of elements.
#pragma once

#include "cuda/generic/scores.cuh"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/backward_plan.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_DEVICE Sm90BackwardLayout backward_layout(int warpgroup, int row_part = 0) {
  return backward_layout_of<C>(thread_index_volatile(), warpgroup, row_part);
}

// The elements that are masked by position: !in_band(). For each of the thread's keys, its rows in the band are
// neighbours, so an element takes two comparisons with constants.
template <class C>
SCALEDOT_DEVICE uint32_t outside_band(const LiveBand& band, const Sm90BackwardLayout& layout) {
  const int first = layout.row(0, 0);
  uint32_t outside = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = layout.key(half), begin = key - first - band.high;
    const int end = key < band.keys ? min(key - first - band.low + 1, band.rows - first) : 0;
#pragma unroll
    for (int n = 0; n < C::kScores / 4; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) outside |= uint32_t(8 * n + j < begin || 8 * n + j >= end) << (4 * n + 2 * half + j);
  }
  return outside;
}

// Calls body(e, x) for each element e of a thread, with the number x of its row. `numbers`: of Sm90TileStatistics.
template <int kCount, class Body>
SCALEDOT_DEVICE void for_each_row_number(const float* numbers, const Sm90BackwardLayout& layout, const Body& body) {
  using Four = AlignedVector<float, 4>;
  const Four* mine = reinterpret_cast<const Four*>(numbers + layout.first_row) + layout.quad;
#pragma unroll
  for (int n = 0; n < kCount / 4; n += 2) {
    const Four four = shared_load(mine + 2 * n);  // of rows row(n, 0), row(n, 1), row(n + 1, 0) and row(n + 1, 1)
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) body(4 * (n + k / 2) + 2 * half + k % 2, four.x[k]);
  }
}

// P from S, if scores are plain products: P = 2^(scale / log 2 S - lse2).
template <bool kMasked, int kCount>
SCALEDOT_DEVICE void weights_of_products(float (&s)[kCount], const float* lse2, float scale2,
                                         const Sm90BackwardLayout& layout, uint32_t masked) {
  for_each_row_number<kCount>(lse2, layout, [&](int e, float row_lse2) {
    s[e] = flushed_exp2(s[e] * scale2 - row_lse2);
    if (kMasked && masked >> e & 1) s[e] = 0;
  });
}

// dS from P and dP.
template <bool kMasked, int kCount>
SCALEDOT_DEVICE void gradients_of_products(const float (&s)[kCount], float (&dp)[kCount], const float* delta,
                                           const Sm90BackwardLayout& layout, uint32_t masked) {
  for_each_row_number<kCount>(delta, layout, [&](int e, float row_delta) {
    dp[e] = kMasked && masked >> e & 1 ? 0.0f : s[e] * (dp[e] - row_delta);
  });
}

// Which weights of a warpgroup's 64 keys dropout keeps: bit w of keep_mask[16 row + lane] is for key 16w + lane and a
// row of the tile. The threads divide the words of the warpgroup's rows among them; a barrier of the warpgroup must
// follow. `first_key`: of the warpgroup, in the problem.
template <class C>
SCALEDOT_DEVICE void draw_dropout(const Problem& p, uint8_t* keep_mask, int first_row, int batch, int head,
                                  int tile_row, int64_t first_key) {
  constexpr int kWords = C::kScoreRows * kDropoutLanes / kWarpgroupThreads;  // of a thread, neighbours
  const int first = thread_index() % kWarpgroupThreads * kWords, row = first_row + first / kDropoutLanes;
  const DropoutRow stream = dropout_row(p, batch, head, tile_row + row);
#pragma unroll 1
  for (int lane = first % kDropoutLanes; lane < first % kDropoutLanes + kWords; lane += 4) {
    uint32_t bits = 0;
#pragma unroll 2  // each counter is a chain of dependent products
    for (int k = 0; k < 4; ++k) {
      const PhiloxWords words = dropout_words(stream, first_key / kDropoutGroup, lane + k);
#pragma unroll
      for (int w = 0; w < 4; ++w) bits |= uint32_t(words.word[w] >= stream.threshold) << (8 * k + w);
    }
    shared_store(reinterpret_cast<uint32_t*>(keep_mask + row * kDropoutLanes + lane), bits);
  }
}

// The options of general scores.
SCALEDOT_DEVICE ScoreOptions<float> general_options(const Problem& p, bool masks) {
  return {.scale = float(p.scale),
          .softcap = float(p.softcap),
          .masked_score = float(p.masked_score),
          .dropout_scale = float(dropout_scale(p)),
          .caps = p.softcap > 0,
          .drops = p.dropout_p > 0,
          .masks = masks,
          .looks_up = p.attn_mask.data || p.alibi_slopes.data};
}

// Groups of 8 rows whose mask elements a thread loads at a time: as many as there are registers for.
constexpr int kMaskRowGroups = 1;
using MaskRowElements =
    float[4 * kMaskRowGroups];  // [4n + 2j + h]: of row(n, j), from the first of these on, and key(h)

// Loads attn_mask's elements before the first of them is used: otherwise each would wait for memory. Those of keys that
// a row may not attend to by position are not loaded. `row`: the first row, in `positions`.
SCALEDOT_DEVICE void load_mask_rows(const Problem& p, const Sm90RowPosition* positions, int row, int row_count,
                                    Range keys, const Sm90BackwardLayout& layout, MaskRowElements& elements) {
  const TensorView& mask = p.attn_mask;
  if (!mask.data) return;
  with_elements<float>(mask.data, mask.dtype, [&](const auto& from) {
#pragma unroll
    for (int e = 0; e < 4 * kMaskRowGroups; ++e) {
      const int r = row + e / 4 * 8 + e / 2 % 2;
      const int64_t key = keys.begin + layout.key(e % 2);
      const Sm90RowPosition position = shared_load(positions + r);
      const bool attends = r < row_count && key < keys.end && key >= position.live_begin && key < position.live_end;
      elements[e] = attends ? from(position.mask_start + key * mask.col_stride) : 0.0f;
    }
  });
}

// Pd and dX from S and dP, for general scores. Also stores dMask = dS. `keep_mask`: from draw_dropout, or nullptr.
template <class C>
SCALEDOT_DEVICE void general_scores(const Problem& p, const ScoreOptions<float>& options, float (&s)[C::kScores],
                                    float (&dp)[C::kScores], const Sm90RowStatistics* statistics,
                                    const Sm90RowPosition* positions, const uint8_t* keep_mask, int row_count,
                                    Range keys, const Sm90BackwardLayout& layout) {
  // From here on rows count from the warpgroup's first one, so that their numbers are constants.
  statistics += layout.first_row, positions += layout.first_row, row_count -= layout.first_row;
  if (keep_mask) keep_mask += layout.first_row * kDropoutLanes;
  const int rows_of_quad = 2 * layout.quad;
  static_assert(C::kScores / 4 % kMaskRowGroups == 0);
  MaskRowElements elements = {};
#pragma unroll
  for (int n = 0; n < C::kScores / 4; ++n) {
    if (n % kMaskRowGroups == 0) load_mask_rows(p, positions, rows_of_quad + 8 * n, row_count, keys, layout, elements);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = rows_of_quad + 8 * n + j;
      const Sm90RowStatistics t = shared_load(statistics + r);
      const Sm90RowPosition position = shared_load(positions + r);
      ThreadRow<float> row = {};
      row.exists = r < row_count;
      row.live_begin = int(max<int64_t>(position.live_begin - keys.begin, 0));
      row.live_end = row.exists ? int(min<int64_t>(position.live_end - keys.begin, count(keys))) : 0;
      row.mask = {{position.live_begin, position.live_end}, position.aligned, position.mask_start, position.slope};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = 4 * n + 2 * half + j, k = layout.key(half);
        const float element = elements[n % kMaskRowGroups * 4 + 2 * j + half];
        const Score<float> x = score(p, options, row, keys, k, s[e], element);
        const bool masked = x.state == kMasked;
        const bool keeps =
            !keep_mask || shared_load(keep_mask + r * kDropoutLanes + layout.group + 8 * half) >> layout.warp & 1;
        const float weight = flushed_exp2((rounded_subtract(x.value, t.offset) - t.log_sum) * float(kLog2e));
        const float grad = keeps ? dp[e] * options.dropout_scale : 0.0f;
        const float grad_score = masked ? 0.0f : weight * (grad - t.delta);
        s[e] = masked ? 0.0f : weight * (keeps ? options.dropout_scale : 0.0f);
        dp[e] = grad_score * x.slope;
        if (p.grad_mask.data && row.exists && k < int(count(keys)))
          global_store_element(p.grad_mask.data, p.grad_mask.dtype,
                               position.grad_mask_start + (keys.begin + k) * p.grad_mask.col_stride, grad_score);
      }
    }
  }
}

// 64 keys x 2 kCount rows of an accumulator, narrowed: a register operand of products of depth 16 (wgmma.h).
template <class Storage, int kCount>
SCALEDOT_DEVICE void narrow_scores(const float (&x)[kCount], uint32_t (&a)[kCount / 8][4]) {
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int e = 8 * k + r / 2 * 4 + r % 2 * 2;
      a[k][r] = narrow_pair(x[e], x[e + 1], Type<Storage>{});
    }
}

// Stores such an operand to a tile in shared memory, in panels of 64 rows with 128 bytes for every key. The matrices of
// stmatrix are 8 keys x 8 rows: 1 and 3 have the last 8 of the warp's 16 keys, 2 and 3 the last 8 of 16 rows.
template <class C>
SCALEDOT_DEVICE void store_scores(void* to, const uint32_t (&a)[C::kScores / 8][4], const Sm90BackwardLayout& layout) {
  const int lane = lane_index(), key = layout.first_key + 16 * layout.warp + lane % 16;
  char* panel = static_cast<char*>(to) + layout.first_row / kPanelCols * C::kKeys * 128 + key * 128;
  const int first = layout.first_row % kPanelCols * 2 + lane / 16 * 16;
#pragma unroll
  for (int k = 0; k < C::kScores / 8; ++k) stmatrix_x4(panel + ((first + k * 32) ^ key % 8 * 16), a[k]);
}

}  // namespace
}  // namespace scaledot
