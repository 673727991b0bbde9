// The forward pass, once, for every instruction set and operand type.
//
//   for each query tile:  m = -inf, l = 0, O = 0
//     for each key tile with an unmasked key:
//       S = scores(Q K^T)                             (scores.h)
//       m' = max(m, rowmax S)      P = exp(S - m')    l = l exp(m - m') + rowsum P      (softmax.h)
//       O = O exp(m - m') + drop(P) V
//     output = O / (l (1 - dropout_p))                lse = m + log l
// If K and V of a head exceed kSharedCache, keys are processed in chunks that fit; m, l and O are saved between chunks.
// Online softmax: Milakov and Gimelshein 2018; tiled attention: Rabe and Staats 2021, Dao et al. 2022.
#pragma once

#include "cpu/simd/attention/next_kv_group.h"
#include "cpu/simd/attention/returned_weights.h"
#include "cpu/simd/attention/save_softmax.h"

namespace scaledot {
namespace {

template <class Operand>
class Forward {
  using Sum = SumOf<Operand>;

 public:
  // Key tiles that follow each other. `first`: m, l and O begin with them; `last`: the results are written after them.
  struct KeyChunk {
    Range tiles;
    bool first, last;
  };

  Forward(const Problem& p, const ForwardPlan<Operand>& plan)
      : p_(p),
        plan_(plan),
        heads_(p, plan),
        weights_(p, plan, heads_),
        save_softmax_(p),
        tiling_(plan.tiling),
        width_(padded<Sum>(p.value_dim)) {}

  int64_t key_tiles() const { return heads_.key_tiles(); }
  int64_t query_tiles() const { return tiles_per_head(tiling_); }
  // Tiles of rows, of all heads together.
  int64_t average_tiles() const { return tiling_.row_tiles + tiling_.micro_tiles; }

  // The query tile of task `number` of `KV groups` KV groups. A group has one head for each worker, as far as
  // they fit into the shared cache, so a worker often meets the keys that its own cache still has. Within a group the
  // longest tiles come first. Tapered tiles come last.
  struct KvGroupTile {
    int64_t kv_group, index;
  };
  KvGroupTile task(int64_t number, int64_t kv_groups) const {
    const int64_t whole = tiling_.row_tiles * tiling_.head_tiles, rest = number - kv_groups * whole;
    if (rest >= 0) return {rest % kv_groups, whole + rest / kv_groups};
    const int64_t fitting = kSharedCache * plan_.chunks / max<int64_t>(plan_.head.bytes(), 1);
    const int64_t most = clamped(fitting, 1, plan_.workers);
    const int64_t first = number / (most * whole) * most, group = min(most, kv_groups - first),
                  within = number - first * whole;
    return {first + within % group, within / group};
  }

  void pack(int64_t kv_group, int64_t slot, int64_t tile, int worker) const {
    heads_.pack(kv_group, slot, tile, scratch(worker));
  }

  // Query tile `index` of a KV group against one chunk of the keys. The chunks of a tile have to come in order.
  // `first_row`: of the KV group or of its split, in the partial sums.
  void attend_chunk(int64_t kv_group, int64_t slot, int64_t index, const KeyChunk& chunk, int64_t first_row,
                    int worker) const {
    const QueryTile tile = query_tile(p_, tiling_, kv_group, index);
    ForwardScratch<Operand> s = scratch(worker);
    if (plan_.chunks > 1) {
      const int64_t head = tile.first_head - tile.kv_head * (p_.heads / p_.kv_heads);
      const int64_t row = first_row + head * p_.query_length + tile.rows.begin;
      s.softmax = from_row(plan_.partial.softmax, row);
      s.output = plan_.partial.output + row * width_;
    }
    attend_tile(tile, slot, chunk, s);
  }
  void attend_chunk(int64_t kv_group, int64_t slot, int64_t index, int64_t chunk, int worker) const {
    const Range tiles = {key_tiles() * chunk / plan_.chunks, key_tiles() * (chunk + 1) / plan_.chunks};
    const KeyChunk keys = {tiles, tiles.begin == 0, tiles.end == key_tiles()};
    attend_chunk(kv_group, slot, index, keys, plan_.partial.first_row(slot, 0), worker);
  }

  // One part of the query tiles of a KV group against one split of its keys, which are packed a slot at a time.
  void attend_split(int64_t kv_group, int64_t part, int64_t split, int64_t splits, int worker) const {
    const Range queries = {query_tiles() * part / plan_.group_parts, query_tiles() * (part + 1) / plan_.group_parts};
    const Range all = {key_tiles() * split / splits, key_tiles() * (split + 1) / splits};
    const Range seen = key_range(p_, {0, p_.query_length});
    int64_t begin = all.begin;
    do {  // once even if there are no keys
      const Range tiles = {begin, min(begin + plan_.slot_tiles, all.end)};
      for (int64_t t = tiles.begin; t < tiles.end; ++t)
        if (count(intersect(key_tile(p_, t), seen)) > 0) heads_.pack(kv_group, worker, t, scratch(worker));
      for (int64_t index = queries.begin; index < queries.end; ++index)
        attend_chunk(kv_group, worker, index, {tiles, begin == all.begin, tiles.end == all.end && splits == 1},
                     plan_.partial.first_row(kv_group, split), worker);
      begin = tiles.end;
    } while (begin < all.end);
  }

  // Tile `number` of the rows, of all heads of a batch entry, and the mean of their weights. The KV groups of the batch
  // entry are packed from `slot` on.
  void attend_all_heads(int64_t batch, int64_t slot, int64_t number, int worker) const {
    const ForwardScratch<Operand> s = scratch(worker);
    QueryTile tile = query_tile(p_, tiling_, batch * p_.kv_heads, number * tiling_.head_tiles);
    weights_.begin_mean(tile, s);
    for (int64_t kv_head = 0; kv_head < p_.kv_heads; ++kv_head)
      for (int64_t k = 0; k < tiling_.head_tiles; ++k) {
        tile = query_tile(p_, tiling_, batch * p_.kv_heads + kv_head, number * tiling_.head_tiles + k);
        attend_tile(tile, slot + kv_head, {{0, key_tiles()}, true, true}, s);
      }
    weights_.end_mean(tile, s);
  }

 private:
  ForwardScratch<Operand> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_forward<Operand>(p_, arena);
  }

  // A query tile against a chunk of the keys.
  SCALEDOT_NOINLINE void attend_tile(const QueryTile& tile, int64_t slot, const KeyChunk& chunk,
                                     const ForwardScratch<Operand>& s) const {
    if (const Range seen = heads_.seen_tiles(tile, chunk.tiles); count(seen) > 0) {
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        pack_rows<Operand>(block<Storage>(p_, p_.query, tile), tile_rows(tile), p_.head_dim, s.query);
      });
      prefetch_mask(p_, tile, seen_keys(p_, tile, key_tile(p_, seen.begin)));
    }
    const bool has_weights =
        p_.dropout_p > 0 ? accumulate<true>(tile, slot, chunk, s) : accumulate<false>(tile, slot, chunk, s);
    if (!chunk.last) return;
    with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) { write_output<Storage>(tile, s); });
    if (p_.weights.data) weights_.write(tile, slot, has_weights, s);
    if (saves_softmax(p_)) save_softmax_.finish(tile, s);
  }

  // Updates m, l and O. Returns whether s.weight_tiles has all these key tiles.
  template <bool kDropout>
  bool accumulate(const QueryTile& tile, int64_t slot, const KeyChunk& chunk, const ForwardScratch<Operand>& s) const {
    const int64_t rows = tile_rows(tile);
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    RowTerms<Sum> terms = s.terms;
    bool begun = !chunk.first, save = s.weight_tiles != nullptr;
    for (int64_t r = 0; r < rows && !begun; ++r) reset(s.softmax, r);
    for (int64_t t = 0; save && t < chunk.tiles.end; ++t) s.pending_keys[t] = {0, 0};
    if (saves_softmax(p_)) save_softmax_.begin(s);
    heads_.for_each_score_tile(tile, slot, chunk.tiles, s, s.weight_tiles != nullptr, [&](const ScoreTile<Operand>& v) {
      Operand* weights = s.weights;
      if constexpr (!kHasBf16Pairs<Operand>) weights = v.scores;
      const int64_t saved_keys = save_softmax_.of_tile(v.keys);
      for (int64_t r = 0; r < rows; ++r) {
        Sum* scores = v.scores + r * kRowStride<Sum>;
        Operand* line = weights + r * kRowStride<Operand>;
        load_terms(p_, tile, r, v.keys, v.flags, kNextKeys, terms, r > 0);
        finish_scores<Sum>(p_, v.flags, terms, v.keys, scores, nullptr);
        Sum* const saved_row = saved_keys > 0 ? save_softmax_.row(tile, r) + v.keys.begin : nullptr;
        softmax_row<Operand, kDropout>({v.flags, terms, v.keys, scores, line, save, saved_row, saved_keys}, unit,
                                       s.softmax, r, s.output + r * width_, width_);
        if (!v.values.finite) mark_masked(v.flags, terms, v.keys, reinterpret_cast<ElementOf<Operand>*>(line), 1);
        if (save) s.pending_max[v.number * kShortTileRows + r] = s.softmax.lazy_max[r];
      }
      if (saved_keys > 0) save_softmax_.add(tile, v.number, v.keys, s);
      multiply<Layout::rows, OnMasked::skip>(rows, p_.value_dim, depth_of<Operand>(count(v.keys)), weights, v.values,
                                             s.output, width_, begun);
      begun = true;
      save = save && v.values.finite;  // weights with marks are not what is returned
      if (save) s.pending_keys[v.number] = v.keys;
    });
    if (!begun) clear_row(s.output, rows * width_);
    return save;
  }

  template <class Storage>
  void write_output(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    const Sum factor = Sum(dropout_scale(p_) * cache_scale(p_, p_.v_scale, tile.batch, tile.kv_head));
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    int64_t r = 0;
    for (int64_t head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
      Sum* lse = element_ptr<Sum>(p_, p_.lse, tile.batch, head);
      for (int64_t i = tile.rows.begin; i < tile.rows.end; ++i, ++r) {
        const RowState<Sum> state = state_of(s.softmax, r, unit);
        write_output_row<Storage>(p_, tile.batch, head, i, s.output + r * width_, output_factor(state, factor));
        if (lse) lse[i * p_.lse.row_stride] = logsumexp(state);
      }
    }
  }

  const Problem& p_;
  const ForwardPlan<Operand>& plan_;
  const HeadPanels<Operand> heads_;
  const ReturnedWeights<Operand> weights_;
  const SaveSoftmax<Operand> save_softmax_;
  const QueryTiling tiling_;
  const int64_t width_;
};

template <class Operand>
void forward_pass(const Problem& p, const Executor& executor) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ForwardPlan<Operand> plan = plan_forward<Operand>(p, executor.workers, arena);
  const Forward<Operand> pass(p, plan);
  const int64_t kv_groups = p.batch * p.kv_heads, key_tiles = pass.key_tiles(), query_tiles = pass.query_tiles();
  if (plan.group_tasks) {
    // The last parts come first: with causality they take longest.
    const int64_t splits = plan.partial.splits, parts = plan.group_parts;
    parallel(executor, kv_groups * splits * parts, [&](int64_t task, int worker) {
      const int64_t later = task / (kv_groups * splits), kv_group = task / splits % kv_groups;
      prefetch_kv_group(p, Pass::forward, kv_group + executor.workers);
      pass.attend_split(kv_group, parts - 1 - later, task % splits, splits, worker);
    });
    parallel(executor, splits > 1 ? kv_groups * plan.partial.rows : 0, [&](int64_t row, int) {
      merge_splits(p, plan.partial, row / plan.partial.rows, row % plan.partial.rows);
    });
    return;
  }
  // Each round takes as many KV groups as there are slots: it packs them, then attends to them.
  for (int64_t first = 0; first < kv_groups; first += plan.slots) {
    const int64_t now = min(plan.slots, kv_groups - first);
    parallel(executor, now * key_tiles, [&](int64_t task, int worker) {
      pass.pack(first + task / key_tiles, task / key_tiles, task % key_tiles, worker);
    });
    if (plan.average_tasks) {
      const int64_t batches = now / p.kv_heads;
      parallel(executor, batches * pass.average_tiles(), [&](int64_t task, int worker) {
        const int64_t batch = task % batches;
        pass.attend_all_heads(first / p.kv_heads + batch, batch * p.kv_heads, task / batches, worker);
      });
      continue;
    }
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk)
      parallel(executor, now * query_tiles, [&](int64_t number, int worker) {
        const auto [kv_group, index] = pass.task(number, now);
        pass.attend_chunk(first + kv_group, kv_group, index, chunk, worker);
      });
  }
}

}  // namespace
}  // namespace scaledot
