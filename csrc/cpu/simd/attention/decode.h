// The forward pass for few query rows over many keys: decoding with a KV cache.
//
// Every key and value is used a few times, so packing would cost more than the product. They are read in place. With
// one row, reading them takes all the time.
//
//   for each KV group, for each split of kDecodeSplit keys:   m, l, O of the split, as in forward.h
//   for each row of a KV group:   the sum of the splits       (partial_sums.h)
// The kernels are called "..._decode".
#pragma once

#include "cpu/cpu.h"
#include "cpu/simd/attention/decode_backward.h"

namespace scaledot {
namespace {

// The part of the decode kernel that does not depend on the storage type of keys and values.
template <class Sum>
class DecodeWeights {
 protected:
  DecodeWeights(const Problem& p, const DecodePlan<Sum>& plan) : p_(p), plan_(plan) {}

  // Scores of a row to weights, for the key tiles of `span`. Sums so far, which are in `output`, are rescaled.
  SCALEDOT_NOINLINE void weigh_row(const QueryTile& tile, int64_t r, Range span, const DecodeScratch<Sum>& s,
                                   int64_t first_row, Sum* output) const {
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    const Sum before = plan_.softmax.lazy_max[first_row + r];
    for_each_tile(p_, span, [&](Range keys) {
      p_.dropout_p > 0 ? weigh<true>(tile, unit, r, span, keys, s, first_row)
                       : weigh<false>(tile, unit, r, span, keys, s, first_row);
    });
    follow_lazy_max(before, plan_.softmax.lazy_max[first_row + r], unit, output + r * plan_.width, plan_.width);
  }

  SCALEDOT_RARE void mark_masked_weights(const QueryTile& tile, Range span, const DecodeScratch<Sum>& s) const {
    RowTerms<Sum> row = s.terms;
    for (int64_t r = 0; r < plan_.rows; ++r)
      for_each_tile(p_, span, [&](Range keys) {
        const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
        load_terms(p_, tile, r, keys, flags, kNextKeys, row);
        mark_masked(flags, row, keys, s.scores + r * kDecodeSplit + keys.begin - span.begin, 1);
      });
  }

  const Problem& p_;
  const DecodePlan<Sum>& plan_;

 private:
  // Scores of row r to weights. If the lazy maximum is raised, the weights of the earlier tiles of `span` are rescaled.
  template <bool kDropout>
  void weigh(const QueryTile& tile, const ScoreUnit<Sum>& unit, int64_t r, Range span, Range keys,
             const DecodeScratch<Sum>& s, int64_t first_row) const {
    const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
    RowTerms<Sum> row = s.terms;
    const int64_t before = keys.begin - span.begin;
    Sum *const first = s.scores + r * kDecodeSplit, *const scores = first + before;
    load_terms(p_, tile, r, keys, flags, kNextKeys, row);
    finish_scores_outlined<Sum>(p_, flags, row, keys, scores, nullptr);
    softmax_row<Sum, kDropout>({flags, row, keys, scores, scores, false, nullptr, 0}, unit, plan_.softmax,
                               first_row + r, first, before);
  }
};

// `Products`: DecodeProducts, or the same on another unit.
template <class Products, class Sum>
class Decode : public DecodeWeights<Sum> {
  using Base = DecodeWeights<Sum>;
  using Base::p_, Base::plan_;

 public:
  Decode(const Problem& p, const DecodePlan<Sum>& plan)
      : Base(p, plan), keys_(p, plan.at_once, p.key, p.head_dim), values_(p, plan.at_once, p.value, p.value_dim) {}

  // m, l and O of one split of the keys, for the KV groups of a turn. A single split is the result.
  void attend_split(int64_t first_group, int64_t split, int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    DecodeHead<Sum> heads[kTurnHeads];
    for (int64_t h = 0; h < plan_.at_once.turns; ++h) heads[h] = begin(first_group + h, split, arena);
    Products::begin_task();
    // Heads that take turns see the same tiles.
    for_each_span(p_, heads[0].tile, split, [&](Range span) { attend(heads, span); });
    Products::end_task();
    for (int64_t h = 0; h < plan_.at_once.turns && plan_.splits == 1; ++h)
      for (int64_t r = 0; r < plan_.rows; ++r) merge_splits(p_, plan_, first_group + h, r);
  }

 private:
  DecodeHead<Sum> begin(int64_t kv_group, int64_t split, Arena& arena) const {
    const int64_t first = plan_.first_row(kv_group, split);
    const DecodeHead<Sum> head = {all_rows(p_, kv_group), lay_out_decode<Sum>(p_, plan_.at_once, arena), first,
                                  plan_.output + first * plan_.width};
    for (int64_t r = 0; r < plan_.rows; ++r) reset(plan_.softmax, first + r);
    clear_row(head.output, plan_.rows * plan_.width);
    load_decode_rows<Sum>(p_, p_.query, head.tile, p_.head_dim, plan_.at_once, head.scratch.sums);
    keys_.order(head.scratch.sums, head.scratch.query);
    return head;
  }

  // Adds whole key tiles to m, l and O of the split.
  void attend(const DecodeHead<Sum>* heads, Range keys) const {
    keys_.dot_products(heads, keys);
    for (int64_t h = 0; h < plan_.at_once.turns; ++h)
      for (int64_t r = 0; r < plan_.rows; ++r)
        this->weigh_row(heads[h].tile, r, keys, heads[h].scratch, heads[h].first_row, heads[h].output);
    values_.sum_values(heads, keys);
    for (int64_t h = 0; h < plan_.at_once.turns; ++h) add_sums(heads[h], keys);
  }

  // O += P V. If the product is not finite, it is computed again without the masked terms (0 * NaN is NaN).
  void add_sums(const DecodeHead<Sum>& head, Range keys) const {
    const int64_t size = plan_.rows * plan_.width;
    const Sum* sums = head.scratch.sums;
    Finite<Sum> finite;
    for (int64_t d = 0; d < size; d += kLanes<Sum>) finite.add(load(sums + d));
    if (!finite.all()) {
      this->mark_masked_weights(head.tile, keys, head.scratch);
      values_.sum_live_values(head, keys);
    }
    add_row(sums, size, head.output);
  }

  const Products keys_, values_;
};

template <class Products, class Sum>
void decode_pass(const Problem& p, const Executor& executor) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const DecodePlan<Sum> plan = plan_decode<Sum>(p, executor.workers, arena);
  const Decode<Products, Sum> pass(p, plan);
  const int64_t kv_groups = p.batch * p.kv_heads;
  // Where heads are side by side, all of them follow each other with a split: its pages are visited once.
  const int64_t together = heads_are_together(p) ? p.kv_heads / plan.at_once.turns : 1;
  parallel(executor, kv_groups / plan.at_once.turns * plan.splits, [&](int64_t task, int worker) {
    const int64_t first = task / (together * plan.splits) * together + task % together;
    pass.attend_split(first * plan.at_once.turns, task / together % plan.splits, worker);
  });
  if (plan.splits == 1) return;
  parallel(executor, kv_groups * plan.rows,
           [&](int64_t task, int) { merge_splits(p, plan, task / plan.rows, task % plan.rows); });
}

template <Capability kLeast>
const char* why_not_decode_at(const Problem& p, Pass pass) {
  if (const char* reason = why_below(kLeast)) return reason;
  if (pass == Pass::backward)
    if (const char* reason = why_no_decode_backward(p)) return reason;
  if (has_key_lists(p)) return "there are key_indices";
  if (p.row_invariant) return "row_invariant is on, and its sums have an order of their own";
  if (const int64_t most = most_decode_rows(p, pass); p.heads / p.kv_heads * p.query_length > most) {
    static_assert(kDecodeRows == 32);
    return most == 32   ? "more than 32 query rows share a KV head"
           : most == 16 ? "more than 16 query rows share a KV head"
                        : "more than 8 query rows share a KV head";
  }
  if (p.score_program) return "there is a score function";
  if (p.weights.data) return "return_weights is set";
  if (saves_softmax(p)) return "the softmax is saved for the backward";
  if (p.key.col_stride != 1 || p.value.col_stride != 1) return "the last stride of key or value is not 1";
  return nullptr;
}

}  // namespace
}  // namespace scaledot
