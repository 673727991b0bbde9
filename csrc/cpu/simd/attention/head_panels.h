// Panels of keys and values, and the products of a query tile with them. Each KV group is packed once, into a slot;
// every query tile of the KV group reads the slot.
#pragma once

#include "cpu/simd/attention/forward_plan.h"

namespace scaledot {
namespace {

// A query tile's dot products with one tile of keys.
template <class Operand>
struct ScoreTile {
  int64_t number;          // of the key tile
  Range keys;              // those that seen_keys() leaves
  Panels<Operand> values;  // of these keys
  ScoreFlags flags;
  SumOf<Operand>* scores;
};

template <class Operand>
class HeadPanels {
  using Sum = SumOf<Operand>;

 public:
  HeadPanels(const Problem& p, const ForwardPlan<Operand>& plan) : p_(p), plan_(plan) {}

  int64_t key_tiles() const { return plan_.head.tiles; }

  void pack(int64_t kv_group, int64_t slot, int64_t tile, const ForwardScratch<Operand>& s) const {
    const int64_t batch = kv_group / p_.kv_heads, head = kv_group % p_.kv_heads;
    const Range keys = key_tile(p_, tile);
    Panels<Operand> k = key_panels(slot, tile), v = value_panels(slot, tile, true);
    with_storage_of<Operand>(is_quantised(p_) ? DType::bfloat16 : p_.dtype, [&]<class Storage>(Type<Storage>) {
      const auto rows = [&](const TensorView& view, int64_t cols) {
        if constexpr (__is_same(Storage, BFloat16))
          if (is_quantised(p_)) return widened_rows(p_, view, batch, head, keys, cols, s.widened);
        return key_rows<Storage>(p_, view, batch, head, keys);
      };
      pack_panels_transposed<Operand>(rows(p_.key, p_.head_dim), count(keys), p_.head_dim, s.staging, k);
      if (values_stay(keys)) return;
      pack_panels<Operand>(rows(p_.value, p_.value_dim), count(keys), p_.value_dim, s.staging, v);
    });
    plan_.value_finite[place(slot, tile)] = v.finite;
  }

  // The given key tiles that have a key that at least one row of the query tile may attend to, by position.
  Range seen_tiles(const QueryTile& tile, Range key_tiles) const {
    const Range range = key_range(p_, tile.rows);
    return intersect({range.begin / kTileKeys, ceil_div(range.end, int64_t(kTileKeys))}, key_tiles);
  }

  // Computes Q K^T and calls body(ScoreTile) for each key tile with at least one unmasked key. `save`: each tile of
  // scores gets its place in s.weight_tiles.
  template <class Body>
  void for_each_score_tile(const QueryTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<Operand>& s,
                           bool save, const Body& body) const {
    const Range seen = seen_tiles(tile, key_tiles);
    for (int64_t t = seen.begin; t < seen.end; ++t) {
      const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
      if (excluded(p_, tile, keys)) continue;
      const int64_t first = keys.begin - all.begin;
      Sum* const scores = save ? s.weight_tiles + t * kShortTileRows * kRowStride<Sum> : s.scores;
      const Panels<Operand> values =
          values_stay(all) ? values_in_place(tile, all) : value_panels(slot, t, plan_.value_finite[place(slot, t)]);
      multiply<Layout::rows, OnMasked::multiply>(tile_rows(tile), count(keys), depth_of<Operand>(p_.head_dim), s.query,
                                                 key_panels(slot, t).from_column(first), scores, kRowStride<Sum>,
                                                 false);
      body(ScoreTile<Operand>{t, keys, values.from_depth(depth_of<Operand>(first)), score_flags<Sum>(p_, tile, keys),
                              scores});
    }
  }

 private:
  // Whether the values of a tile are not packed: each is used by few rows, and rows of a panel's columns can be read as
  // they lie. No key of the tile may be masked, because then NaN and inf in values would have to be known.
  bool values_stay(Range keys) const {
    if constexpr (kHasBf16Pairs<Operand>) return false;
    const bool plain =
        !has_mask(p_, keys) && !p_.relative_bias.data && !has_blocks(p_) && !is_paged(p_) && !p_.score_program;
    return plan_.slot_tiles == 1 && plain && element_size(p_.value.dtype) == sizeof(Sum) && p_.value.col_stride == 1 &&
           p_.value_dim % kLanes<Sum> == 0 && tile_kind(p_, {0, p_.query_length}, keys) == TileKind::full;
  }
  Panels<Operand> values_in_place(const QueryTile& tile, Range keys) const {
    Operand* const first = element_ptr<Operand>(p_, p_.value, tile.batch, tile.kv_head);
    return {first + keys.begin * p_.value.row_stride, kPanel<Operand>, true, p_.value.row_stride};
  }

  int64_t place(int64_t slot, int64_t tile) const { return slot * plan_.slot_tiles + tile % plan_.slot_tiles; }
  Panels<Operand> key_panels(int64_t slot, int64_t tile) const {
    return {plan_.keys + place(slot, tile) * plan_.head.key_tile, kPanel<Operand> * depth_of<Operand>(p_.head_dim),
            true};
  }
  Panels<Operand> value_panels(int64_t slot, int64_t tile, bool finite) const {
    return {plan_.values + place(slot, tile) * plan_.head.value_tile, kPanel<Operand> * depth_of<Operand>(kTileKeys),
            finite};
  }

  const Problem& p_;
  const ForwardPlan<Operand>& plan_;
};

}  // namespace
}  // namespace scaledot
