// The scores of a tile and their gradients, which every kernel of the backward recomputes.
#pragma once

#include "cuda/generic/backward_plan.cuh"
#include "cuda/generic/scores.cuh"

namespace scaledot {
namespace {

// Bit 4n + e: element [n][e] is masked; is masked or replaced by masked_score.
struct ElementBits {
  uint32_t masked, not_live;
};

// Replaces s by Pd, and dp by dX (if kOnlyScores by dS, 0 where the score was replaced). Stores dS to grad_mask if
// `writes_mask`.
template <class C, bool kOnlyScores, class T>
SCALEDOT_DEVICE ElementBits score_gradients(const Problem& p, const GenericBackwardPlan<T>& plan,
                                            const StackedTile& tile, Range keys, const ScoreOptions<T>& options,
                                            bool writes_mask, T (&s)[ScoreLayout<C, kBackwardColumnWarps>::kTiles][4],
                                            T (&dp)[ScoreLayout<C, kBackwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  ElementBits bits = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    SplitLse<T> lse = {T(0), T(0)};
    T delta = T(0);
    const Storage* grad_weights = nullptr;
    int64_t grad_mask = 0;
    if (row.exists) {
      lse = global_load(plan.rows.lse + row_number(p, tile, row));
      delta = global_load(plan.rows.delta + row_number(p, tile, row));
      if (p.grad_weights.data)
        grad_weights =
            element_ptr<const Storage>(p, p.grad_weights, tile.batch, row.head) + row.i * p.grad_weights.row_stride;
      if (writes_mask) grad_mask = offset(p, p.grad_mask, tile.batch, row.head) + row.i * p.grad_mask.row_stride;
    }
    const uint32_t shown = shown_bits<L>(p, options, tile, row, keys);
    MaskElements<T> elements = {};
    const uint32_t keep_mask = options.drops ? keep_mask_bits<L>(p, tile, row, keys) : ~uint32_t(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n) {
      if (n % kMaskGroups == 0) load_mask_row<L>(p, row, keys, n, elements);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * half + j, k = L::key(n, j);
        const Score<T> x =
            score(p, options, row, keys, k, s[n][e], elements[n % kMaskGroups * 2 + j], shown >> (2 * n + j) & 1);
        const bool masked = x.state == kMasked, keeps = keep_mask >> (2 * n + j) & 1;
        const T weight = weight_exp<C>(rounded_subtract(x.value, lse.offset) - lse.log_sum);
        T grad = dp[n][e];
        if (grad_weights && !masked)
          grad += T(widen(global_load(grad_weights + (keys.begin + k) * p.grad_weights.col_stride)));
        grad = keeps ? grad * options.dropout_scale : T(0);
        const T grad_score = masked ? T(0) : weight * (grad - delta);
        s[n][e] = masked ? T(0) : weight * (keeps ? options.dropout_scale : T(0));
        dp[n][e] = !kOnlyScores ? grad_score * x.slope : x.state == kReplaced ? T(0) : grad_score;
        bits.masked |= uint32_t(masked) << (4 * n + e);
        bits.not_live |= uint32_t(x.state != kLive) << (4 * n + e);
        if (writes_mask && row.exists && k < int(count(keys)) && has_mask(p, keys.begin + k))
          global_store_element(p.grad_mask.data, p.grad_mask.dtype,
                               grad_mask + (keys.begin + k) * p.grad_mask.col_stride, grad_score);
      }
    }
  }
  return bits;
}

// The pipeline stages of the operands of S and dP.
template <class C>
struct BackwardStages {
  using Storage = typename C::Storage;
  using Stage = PanelStage<C, kThreads<C, kBackwardColumnWarps>>;
  Stage query, key, value, grad_output;
  bool pending;

  SCALEDOT_MEMBER void set_keys(const Problem& p, int64_t batch, int64_t kv_head, Range keys) {
    key.set_rows(rows_of_keys<C>(p, p.key, batch, kv_head, keys, p.head_dim));
    value.set_rows(rows_of_keys<C>(p, p.value, batch, kv_head, keys, p.value_dim));
  }
  SCALEDOT_MEMBER void set_query_rows(const Problem& p, const StackedTile& tile) {
    query.set_rows(rows_of_tile<C>(p, p.query, tile, p.head_dim));
    if (p.grad_output.data) grad_output.set_rows(rows_of_tile<C>(p, p.grad_output, tile, p.value_dim));
  }
};

template <class C, class Shared>
SCALEDOT_DEVICE BackwardStages<C> backward_stages(Shared& shared) {
  return {{shared.query, {}, -1}, {shared.key, {}, -1}, {shared.value, {}, -1}, {shared.grad_output, {}, -1}, false};
}

// s = Q K^T and dp = dO V^T.
template <class C, class T>
SCALEDOT_DEVICE void score_products(const Problem& p, BackwardStages<C>& stages,
                                    T (&s)[ScoreLayout<C, kBackwardColumnWarps>::kTiles][4],
                                    T (&dp)[ScoreLayout<C, kBackwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  const int row = L::warp_row() * C::kPitch, key = L::warp_key() * C::kPitch;
  clear(s);
  clear(dp);
  for (int c = 0; c < panels_of(p.head_dim, C::kPanel); ++c) {
    wait_for_panels(stages.query, c, stages.key, c, stages.pending);
    multiply<ALayout::rows, BLayout::by_column>(s, SharedMatrix<Storage>{stages.query.data + row, C::kPitch},
                                                SharedMatrix<Storage>{stages.key.data + key, C::kPitch},
                                                panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
  if (!p.grad_output.data) return;
  for (int c = 0; c < panels_of(p.value_dim, C::kPanel); ++c) {
    wait_for_panels(stages.grad_output, c, stages.value, c, stages.pending);
    multiply<ALayout::rows, BLayout::by_column>(dp, SharedMatrix<Storage>{stages.grad_output.data + row, C::kPitch},
                                                SharedMatrix<Storage>{stages.value.data + key, C::kPitch},
                                                panel_width(p.value_dim, c, C::kPanel), L::kTiles);
  }
}

}  // namespace
}  // namespace scaledot
