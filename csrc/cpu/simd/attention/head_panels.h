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

// Q K^T of a query tile and a key tile. On the tile unit it is computed block by block, between the rows of the softmax
// of the key tile before. Neither depends on the other, so the CPU runs the unit and the vector units side by side.
template <class Operand>
class ScoreProduct {
  using Sum = SumOf<Operand>;
  static constexpr int64_t kRows = 2 * kUnitSide;

 public:
  ScoreProduct() = default;
  ScoreProduct(int64_t rows, int64_t cols, int64_t depth, const Operand* query, const Panels<Operand>& keys,
               Sum* scores)
      : rows_(rows),
        cols_(cols),
        depth_(depth),
        query_(query),
        keys_(keys),
        scores_(scores),
        panels_(ceil_div(cols, int64_t(kPanel<Operand>))),
        blocks_(kComputesAhead<Operand> ? ceil_div(rows, kRows) : 1) {}

  // Computes blocks until the fraction done / all is reached; all blocks of a panel first, while it is cached.
  void advance(int64_t done, int64_t all) {
    if constexpr (kComputesAhead<Operand>)
      for (; computed_ < blocks_ * panels_ * done / all; ++computed_)
        compute_block(computed_ % blocks_, computed_ / blocks_);
  }
  void finish() {
    if constexpr (kComputesAhead<Operand>)
      advance(1, 1);
    else if (blocks_ > 0)
      multiply<Layout::rows, OnMasked::multiply>(rows_, cols_, depth_, query_, keys_, scores_, kRowStride<Sum>, false);
  }

 private:
  void compute_block(int64_t block, int64_t panel) const {
    const int64_t row = block * kRows, column = panel * kPanel<Operand>;
    multiply<Layout::rows, OnMasked::multiply>(min(rows_ - row, kRows), min<int64_t>(cols_ - column, kPanel<Operand>),
                                               depth_, query_ + row * kRowStride<Operand>, keys_.from_column(column),
                                               scores_ + row * kRowStride<Sum> + column, kRowStride<Sum>, false);
  }

  int64_t rows_, cols_, depth_;
  const Operand* query_;
  Panels<Operand> keys_;
  Sum* scores_;
  int64_t panels_ = 0, blocks_ = 0, computed_ = 0;
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

  // Computes Q K^T and calls body(ScoreTile, next) for each key tile with at least one unmasked key. `next` is the
  // product of the key tile after it, which body() may advance. `save`: each tile of scores gets its place in
  // s.weight_tiles.
  template <class Body>
  void for_each_score_tile(const QueryTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<Operand>& s,
                           bool save, const Body& body) const {
    const Range seen = seen_tiles(tile, key_tiles);
    int64_t visited = 0;
    ScoreProduct<Operand> product = {};
    const auto next_tile = [&](int64_t t) {  // the first from t on that is not excluded
      ScoreTile<Operand> found = {seen.end, {0, 0}, {}, {}, nullptr};
      for (; t < seen.end; ++t) {
        const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
        if (excluded(p_, tile, keys)) continue;
        const int64_t first = keys.begin - all.begin;
        Sum* scores = save            ? s.weight_tiles + t * kShortTileRows * kRowStride<Sum>
                      : visited++ % 2 ? s.next_scores
                                      : s.scores;
        product = {tile_rows(tile),
                   count(keys),
                   depth_of<Operand>(p_.head_dim),
                   s.query,
                   key_panels(slot, t).from_column(first),
                   scores};
        const Panels<Operand> values =
            values_stay(all) ? values_in_place(tile, all) : value_panels(slot, t, plan_.value_finite[place(slot, t)]);
        found = {t, keys, values.from_depth(depth_of<Operand>(first)), score_flags<Sum>(p_, tile, keys), scores};
        break;
      }
      return found;
    };
    for (ScoreTile<Operand> now = next_tile(seen.begin); now.number < seen.end;) {
      product.finish();
      product = {};
      const ScoreTile<Operand> after = next_tile(now.number + 1);
      body(now, product);
      now = after;
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
