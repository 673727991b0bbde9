// The forward pass, once, for every instruction set and storage type.
//
//   for each tile of rows:  m = -inf, l = 0, O = 0
//     for each tile of keys that the mask leaves:
//       S = scores(Q K^T)                             (scores.h)
//       m' = max(m, rowmax S)      P = exp(S - m')    l = l exp(m - m') + rowsum P
//       O = O exp(m - m') + drop(P) V
//     output = O / (l (1 - dropout_p))                lse = m + log l
//     weights, if asked for: a second pass over the keys, drop(exp(S - lse)) / (1 - dropout_p)
// Online softmax: Milakov and Gimelshein 2018; tiled attention: Rabe and Staats 2021, Dao et al. 2022.
//
// K^T and V are packed once for each (batch, kv_head) plane, as many planes at a time as kPackBudget allows.
#pragma once

#include "core/arena.h"
#include "core/dispatch.h"
#include "cpu/simd/scores.h"

namespace scaledot {
namespace {

constexpr int64_t kPackBudget = int64_t(32) << 20;  // bytes of packed keys and values

// Sizes of one plane's packed keys and values, in numbers.
template <class T>
struct PackedPlane {
  int64_t key_tile;    // K^T of kTileKeys keys: panels of key columns, head_dim deep
  int64_t value_tile;  // V of kTileKeys keys: panels of value columns, kTileKeys deep
  int64_t tiles;

  explicit PackedPlane(const Problem& p)
      : key_tile(kTileKeys * p.head_dim),
        value_tile(kTileKeys * round_up(p.value_dim, kPanel<T>)),
        tiles(ceil_div(p.key_length, kTileKeys)) {}
};

template <class T>
struct ForwardScratch {
  T* query;   // strips
  T* scores;  // (kTileRows, kTileKeys)
  T* output;  // (kTileRows, value_dim padded)
  RowState<T>* state;
  T* row;
  RowScratch<T> terms;
};

template <class T>
inline int64_t padded(int64_t cols) {
  return round_up(cols, kPanel<T>);
}

template <class T>
ForwardScratch<T> lay_out_forward(const Problem& p, Arena& arena) {
  ForwardScratch<T> s;
  s.query = take<T>(arena, kTileRows * p.head_dim);
  s.scores = take<T>(arena, kTileRows * kTileKeys);
  s.output = take<T>(arena, kTileRows * padded<T>(p.value_dim));
  s.state = take<RowState<T>>(arena, kTileRows);
  s.row = take<T>(arena, padded<T>(larger(p.head_dim, p.value_dim)));
  s.terms = lay_out_row<T>(arena);
  return s;
}

template <class T>
struct ForwardPlan {
  PackedPlane<T> plane;
  int64_t planes_at_once;
  T* keys;
  T* values;
  bool* value_finite;  // one for each tile of values
  ForwardScratch<T> scratch;
  int64_t scratch_bytes;  // of one worker
};

template <class T>
ForwardPlan<T> plan_forward(const Problem& p, int workers, Arena& arena) {
  ForwardPlan<T> plan = {PackedPlane<T>(p), 1, nullptr, nullptr, nullptr, {}, 0};
  const int64_t plane_numbers = plan.plane.tiles * (plan.plane.key_tile + plan.plane.value_tile);
  const int64_t fitting = kPackBudget / larger<int64_t>(plane_numbers * int64_t(sizeof(T)), 1);
  plan.planes_at_once = larger<int64_t>(smaller(fitting, p.batch * p.kv_heads), 1);
  plan.keys = take<T>(arena, plan.planes_at_once * plan.plane.tiles * plan.plane.key_tile);
  plan.values = take<T>(arena, plan.planes_at_once * plan.plane.tiles * plan.plane.value_tile);
  plan.value_finite = take<bool>(arena, plan.planes_at_once * plan.plane.tiles);
  const int64_t start = arena.used;
  plan.scratch = lay_out_forward<T>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

template <class T>
inline T* shifted(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

template <class T>
ForwardScratch<T> scratch_of(const ForwardPlan<T>& plan, int worker) {
  const int64_t bytes = worker * plan.scratch_bytes;
  const ForwardScratch<T>& s = plan.scratch;
  return {shifted(s.query, bytes),
          shifted(s.scores, bytes),
          shifted(s.output, bytes),
          shifted(s.state, bytes),
          shifted(s.row, bytes),
          {shifted(s.terms.additive, bytes), shifted(s.terms.state, bytes), shifted(s.terms.keep, bytes)}};
}

inline Range key_tile(const Problem& p, int64_t tile) {
  return {tile * kTileKeys, smaller((tile + 1) * kTileKeys, p.key_length)};
}

template <class Storage, class T>
class Forward {
 public:
  Forward(const Problem& p, const ForwardPlan<T>& plan) : p_(p), plan_(plan), tiling_(tile_problem(p)) {}

  int64_t tiles() const { return tiles_per_plane(tiling_); }

  void pack(int64_t plane, int64_t slot, int64_t tile, int worker) const {
    const ForwardScratch<T> s = scratch_of(plan_, worker);
    const int64_t batch = plane / p_.kv_heads, head = plane % p_.kv_heads;
    const Range keys = key_tile(p_, tile);
    bool& finite = plan_.value_finite[slot * plan_.plane.tiles + tile];
    finite = true;
    Panels<T> k = key_panels(slot, tile), v = value_panels(slot, tile);
    pack_panels_transposed(block<Storage>(p_, p_.key, batch, head, keys.begin), count(keys), p_.head_dim, s.row, k);
    pack_panels(block<Storage>(p_, p_.value, batch, head, keys.begin), count(keys), p_.value_dim, s.row, v);
    finite = v.finite;
  }

  void run(int64_t plane, int64_t slot, int64_t index, int worker) const {
    const ForwardScratch<T> s = scratch_of(plan_, worker);
    const RowTile tile = row_tile(p_, tiling_, plane, index);
    load_query(tile, s);
    attend(tile, slot, s);
    finish(tile, s);
    if (p_.weights.data) write_weights(tile, slot, s);
  }

 private:
  Panels<T> key_panels(int64_t slot, int64_t tile) const {
    return {plan_.keys + (slot * plan_.plane.tiles + tile) * plan_.plane.key_tile, kPanel<T> * p_.head_dim, true};
  }
  Panels<T> value_panels(int64_t slot, int64_t tile) const {
    const int64_t index = slot * plan_.plane.tiles + tile;
    return {plan_.values + index * plan_.plane.value_tile, kPanel<T> * kTileKeys, plan_.value_finite[index]};
  }

  void load_query(const RowTile& tile, const ForwardScratch<T>& s) const {
    for (int64_t h = 0; h < tile.heads; ++h)
      pack_strips(block<Storage>(p_, p_.query, tile.batch, tile.first_head + h, tile.rows.begin), h * count(tile.rows),
                  count(tile.rows), tile_rows(tile), p_.head_dim, s.row, s.query);
  }

  // Calls body(keys, tile index, kind) for every tile of keys that the mask leaves to these rows.
  template <class Body>
  void for_each_key_tile(const RowTile& tile, const Body& body) const {
    const Range range = key_range(p_, tile.rows);
    for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) {
      const Range keys = key_tile(p_, t);
      const TileKind kind = tile_kind(p_, tile.rows, keys);
      if (kind != TileKind::skip && !excluded(p_, tile, keys)) body(keys, t, kind);
    }
  }

  void dot_products(const RowTile& tile, int64_t slot, int64_t t, Range keys, const ForwardScratch<T>& s) const {
    multiply<Layout::strips>(tile_rows(tile), count(keys), p_.head_dim, s.query, key_panels(slot, t), s.scores,
                             kTileKeys, false);
  }

  void attend(const RowTile& tile, int64_t slot, const ForwardScratch<T>& s) const {
    const int64_t rows = tile_rows(tile), stride = padded<T>(p_.value_dim);
    for (int64_t r = 0; r < rows; ++r) s.state[r] = empty_row<T>();
    for (int64_t k = 0; k < rows * stride; ++k) s.output[k] = T(0);
    for_each_key_tile(tile, [&](Range keys, int64_t t, TileKind kind) {
      const TileTerms terms = tile_terms<T>(p_, kind, keys);
      dot_products(tile, slot, t, keys, s);
      for (int64_t r = 0; r < rows; ++r) {
        T* row = s.scores + r * kTileKeys;
        load_terms(p_, tile, r, keys, terms, s.terms);
        const T highest = finish_scores(p_, terms, s.terms, count(keys), row);
        raise_maximum(s.state[r], highest, s.output + r * stride, stride);
        s.state[r].sum += exponentiate(terms, s.terms, shift(s.state[r].maximum), count(keys), row);
        if (p_.dropout_p > 0) {
          load_keep(p_, tile, r, keys, s.terms);
          drop(s.terms, count(keys), row);
        }
      }
      multiply<Layout::rows>(rows, p_.value_dim, count(keys), s.scores, value_panels(slot, t), s.output, stride, true);
    });
  }

  void finish(const RowTile& tile, const ForwardScratch<T>& s) const {
    const T kept = T(1.0 / (1.0 - p_.dropout_p));
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const int64_t head = head_of(tile, r), i = row_of(tile, r);
      narrow_row(s.output + r * padded<T>(p_.value_dim), normaliser(s.state[r]) * kept, p_.value_dim,
                 at<Storage>(p_, p_.output, tile.batch, head) + i * p_.output.row_stride);
      if (p_.lse.data) at<T>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride] = logsumexp(s.state[r]);
    }
  }

  void write_weights(const RowTile& tile, int64_t slot, const ForwardScratch<T>& s) const {
    const T kept = T(1.0 / (1.0 - p_.dropout_p));
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      Storage* row = weights_row(tile, r);
      for (int64_t j = 0; j < p_.key_length; ++j) narrow(T(0), row[j]);
    }
    for_each_key_tile(tile, [&](Range keys, int64_t t, TileKind kind) {
      const TileTerms terms = tile_terms<T>(p_, kind, keys);
      dot_products(tile, slot, t, keys, s);
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* row = s.scores + r * kTileKeys;
        load_terms(p_, tile, r, keys, terms, s.terms);
        finish_scores(p_, terms, s.terms, count(keys), row);
        exponentiate(terms, s.terms, shift(s.state[r].maximum), count(keys), row);
        if (p_.dropout_p > 0) {
          load_keep(p_, tile, r, keys, s.terms);
          drop(s.terms, count(keys), row);
        }
        normalise(normaliser(s.state[r]) * kept, count(keys), row);
        narrow_row(row, T(1), count(keys), weights_row(tile, r) + keys.begin);
      }
    });
  }

  Storage* weights_row(const RowTile& tile, int64_t r) const {
    return at<Storage>(p_, p_.weights, tile.batch, head_of(tile, r)) + row_of(tile, r) * p_.weights.row_stride;
  }

  const Problem& p_;
  const ForwardPlan<T>& plan_;
  const Tiling tiling_;
};

template <class Storage>
void run_forward(const Problem& p, const Executor& executor) {
  using T = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ForwardPlan<T> plan = plan_forward<T>(p, executor.workers, arena);
  const Forward<Storage, T> pass(p, plan);
  const int64_t planes = p.batch * p.kv_heads, key_tiles = plan.plane.tiles;
  for (int64_t first = 0; first < planes; first += plan.planes_at_once) {
    const int64_t now = smaller(plan.planes_at_once, planes - first);
    parallel(executor, now * key_tiles, [&](int64_t task, int worker) {
      pass.pack(first + task / key_tiles, task / key_tiles, task % key_tiles, worker);
    });
    // The longest tiles of all planes come before the shorter ones.
    parallel(executor, now * pass.tiles(),
             [&](int64_t task, int worker) { pass.run(first + task % now, task % now, task / now, worker); });
  }
}

}  // namespace
}  // namespace scaledot
