// Packed keys and values, and the products of a query tile with them. Pairs (batch, kv head) are packed once, each into
// a slot; every query tile of the pair reads the slot.
#pragma once

#include "cpu/simd/attention/forward_plan.h"

namespace scaledot {
namespace {

// A query tile's dot products with one tile of keys.
template <class E>
struct ScoreTile {
  int64_t number;          // of the key tile
  Range keys;              // those that seen_keys() leaves
  PackedPanels<E> values;  // of these keys
  ScoreFlags flags;
  SumOf<E>* scores;
};

template <class E>
class PackedHeads {
  using T = SumOf<E>;

 public:
  PackedHeads(const Problem& p, const ForwardPlan<E>& plan) : p_(p), plan_(plan) {}

  int64_t key_tiles() const { return plan_.head.tiles; }

  void pack(int64_t kv_index, int64_t slot, int64_t tile, const ForwardScratch<E>& s) const {
    const int64_t batch = kv_index / p_.kv_heads, head = kv_index % p_.kv_heads;
    const Range keys = key_tile(p_, tile);
    PackedPanels<E> k = key_panels(slot, tile), v = value_panels(slot, tile, true);
    with_storage_of<E>(is_quantised(p_) ? DType::bfloat16 : p_.dtype, [&]<class Storage>(Type<Storage>) {
      const auto rows = [&](const TensorView& view, int64_t cols) {
        if constexpr (__is_same(Storage, BFloat16))
          if (is_quantised(p_)) return widened_rows(p_, view, batch, head, keys, cols, s.widened);
        return key_rows<Storage>(p_, view, batch, head, keys);
      };
      pack_panels_transposed<E>(rows(p_.key, p_.head_dim), count(keys), p_.head_dim, s.staging, k);
      pack_panels<E>(rows(p_.value, p_.value_dim), count(keys), p_.value_dim, s.staging, v);
    });
    plan_.value_finite[slot * plan_.head.tiles + tile] = v.finite;
  }

  // Of the given key tiles, those with a key that at least one row of the query tile may attend to, by position.
  Range seen_tiles(const QueryTile& tile, Range key_tiles) const {
    const Range range = key_range(p_, tile.rows);
    return intersect({range.begin / kTileKeys, ceil_div(range.end, int64_t(kTileKeys))}, key_tiles);
  }

  // Computes Q K^T and calls body(ScoreTile) for each key tile with at least one unmasked key. `save`: each tile of
  // scores gets its place in s.saved.
  template <class Body>
  void for_each_score_tile(const QueryTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<E>& s, bool save,
                           const Body& body) const {
    const Range seen = seen_tiles(tile, key_tiles);
    for (int64_t t = seen.begin; t < seen.end; ++t) {
      const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
      if (excluded(p_, tile, keys)) continue;
      const int64_t first = keys.begin - all.begin;
      T* scores = save ? s.saved + t * kShortTileRows * kRowStride<T> : s.scores;
      multiply<Layout::rows, OnMasked::multiply>(tile_rows(tile), count(keys), depth_of<E>(p_.head_dim), s.query,
                                                 key_panels(slot, t).from_column(first), scores, kRowStride<T>, false);
      const PackedPanels<E> values = value_panels(slot, t, plan_.value_finite[slot * plan_.head.tiles + t]);
      body(ScoreTile<E>{t, keys, values.from_depth(depth_of<E>(first)), score_flags<T>(p_, tile, keys), scores});
    }
  }

 private:
  PackedPanels<E> key_panels(int64_t slot, int64_t tile) const {
    return {plan_.keys + (slot * plan_.head.tiles + tile) * plan_.head.key_tile, kPanel<E> * depth_of<E>(p_.head_dim),
            true};
  }
  PackedPanels<E> value_panels(int64_t slot, int64_t tile, bool finite) const {
    return {plan_.values + (slot * plan_.head.tiles + tile) * plan_.head.value_tile, kPanel<E> * depth_of<E>(kTileKeys),
            finite};
  }

  const Problem& p_;
  const ForwardPlan<E>& plan_;
};

}  // namespace
}  // namespace scaledot
