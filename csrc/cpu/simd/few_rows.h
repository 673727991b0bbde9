// The forward pass for few query rows over many keys: decoding against a cache. Every key and value is used only once or a
// few times, so packing would cost more than the product; they are read in place, and reading them is all the time it takes.
//
//   for each (plane, chunk of kChunkKeys keys):  m, l, O of the chunk, as in forward.h
//   for each plane:                              chunks merged in order:  w_c = exp(m_c - max m),  O = sum w_c O_c / sum w_c l_c
// The cut into chunks depends on the shape alone, so results do not depend on threads. ("Flash-Decoding", Dao et al. 2023.)
#pragma once

#include "cpu/simd/forward.h"

namespace scaledot {
namespace {

constexpr int kFewRows = 16;  // query rows that share a key head; more are faster through forward.h
constexpr int64_t kChunkKeys = 8 * kTileKeys;

// kLanes numbers of a contiguous row, the last vector of which may be partly there (the rest counts as 0).
template <class T, class Storage>
SCALEDOT_INLINE Vec<T> widen_some(const Storage* from, int64_t available) {
  if (available >= kLanes<T>) return widen_load(from);
  T lanes[kLanes<T>] = {};
  for (int64_t d = 0; d < available; ++d) lanes[d] = widen(from[d]);
  return load(lanes);
}

template <class T>
struct ChunkScratch {
  T* query;   // (kFewRows, head_dim padded)
  T* scores;  // (kFewRows, kTileKeys)
  RowScratch<T> terms;
};

template <class T>
struct FewRowsPlan {
  int64_t rows;        // of a plane
  int64_t chunks;      // of a plane
  int64_t width;       // value_dim padded
  RowState<T>* state;  // (plane, chunk, row)
  T* output;           // (plane, chunk, row, width)
  char* scratch;
  int64_t scratch_bytes;
};

template <class T>
ChunkScratch<T> lay_out_chunk(const Problem& p, Arena& arena) {
  return {take<T>(arena, kFewRows * padded<T>(p.head_dim)), take<T>(arena, kFewRows * kTileKeys),
          lay_out_row<T>(arena)};
}

template <class T>
FewRowsPlan<T> plan_few_rows(const Problem& p, int workers, Arena& arena) {
  FewRowsPlan<T> plan = {};
  plan.rows = p.heads / p.kv_heads * p.query_length;
  plan.chunks = larger<int64_t>(ceil_div(p.key_length, kChunkKeys), 1);
  plan.width = padded<T>(p.value_dim);
  const int64_t parts = p.batch * p.kv_heads * plan.chunks * plan.rows;
  plan.state = take<RowState<T>>(arena, parts);
  plan.output = take<T>(arena, parts * plan.width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_chunk<T>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

template <class Storage, class T>
class FewRows {
 public:
  FewRows(const Problem& p, const FewRowsPlan<T>& plan) : p_(p), plan_(plan) {}

  void run_chunk(int64_t plane, int64_t chunk, int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    const ChunkScratch<T> s = lay_out_chunk<T>(p_, arena);
    const RowTile tile = whole_plane(plane);
    const int64_t part = (plane * plan_.chunks + chunk) * plan_.rows;
    RowState<T>* state = plan_.state + part;
    T* output = plan_.output + part * plan_.width;
    for (int64_t r = 0; r < plan_.rows; ++r) state[r] = empty_row<T>();
    for (int64_t k = 0; k < plan_.rows * plan_.width; ++k) output[k] = T(0);
    for (int64_t r = 0; r < plan_.rows; ++r) {
      const Block<Storage> query = block<Storage>(p_, p_.query, tile.batch, head_of(tile, r), row_of(tile, r));
      widen_row(query.data, query.col_stride, p_.head_dim, s.query + r * padded<T>(p_.head_dim));
    }
    const Range range = intersect(key_range(p_, tile.rows), {chunk * kChunkKeys, (chunk + 1) * kChunkKeys});
    for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) {
      const Range keys = key_tile(p_, t);
      const TileKind kind = tile_kind(p_, tile.rows, keys);
      if (kind != TileKind::skip && !excluded(p_, tile, keys)) attend(tile, keys, kind, s, state, output);
    }
  }

  void merge(int64_t plane) const {
    const RowTile tile = whole_plane(plane);
    const int64_t first = plane * plan_.chunks * plan_.rows;
    for (int64_t r = 0; r < plan_.rows; ++r) {
      RowState<T> total = plan_.state[first + r];
      T* sum = plan_.output + (first + r) * plan_.width;
      for (int64_t c = 1; c < plan_.chunks; ++c) {
        const int64_t part = first + c * plan_.rows + r;
        const RowState<T> state = plan_.state[part];
        if (state.sum == T(0)) continue;
        const T maximum = larger(total.maximum, state.maximum);
        const T keep = exp(shift(total.maximum) - shift(maximum)), add = exp(shift(state.maximum) - shift(maximum));
        const T old = total.sum == T(0) ? T(0) : keep;  // an empty row's factor is meaningless, and may be inf
        total = {maximum, total.sum * old + state.sum * add};
        const T* other = plan_.output + part * plan_.width;
        for (int64_t d = 0; d < plan_.width; d += kLanes<T>)
          store(sum + d, multiply_add(load(other + d), Vec<T>(add), load(sum + d) * Vec<T>(old)));
      }
      const int64_t head = head_of(tile, r), i = row_of(tile, r);
      narrow_row(sum, normaliser(total) * T(1.0 / (1.0 - p_.dropout_p)), p_.value_dim,
                 at<Storage>(p_, p_.output, tile.batch, head) + i * p_.output.row_stride);
      if (p_.lse.data) at<T>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride] = logsumexp(total);
    }
  }

 private:
  RowTile whole_plane(int64_t plane) const {
    const int64_t kv_head = plane % p_.kv_heads, group = p_.heads / p_.kv_heads;
    return {plane / p_.kv_heads, kv_head, kv_head * group, group, {0, p_.query_length}};
  }

  void attend(const RowTile& tile, Range keys, TileKind kind, const ChunkScratch<T>& s, RowState<T>* state,
              T* output) const {
    const TileTerms terms = tile_terms<T>(p_, kind, keys);
    dot_products(tile, keys, s);
    for (int64_t r = 0; r < plan_.rows; ++r) {
      T* row = s.scores + r * kTileKeys;
      load_terms(p_, tile, r, keys, terms, s.terms);
      const T highest = finish_scores(p_, terms, s.terms, count(keys), row);
      raise_maximum(state[r], highest, output + r * plan_.width, plan_.width);
      state[r].sum += exponentiate(terms, s.terms, shift(state[r].maximum), count(keys), row);
      if (p_.dropout_p > 0) {
        load_keep(p_, tile, r, keys, s.terms);
        drop(s.terms, count(keys), row);
      }
    }
    for (int64_t r = 0; r < plan_.rows; r += kValueRows) {
      const int64_t rows = smaller<int64_t>(kValueRows, plan_.rows - r);
      if (rows == kValueRows)
        add_values<kValueRows>(tile, keys, s.scores + r * kTileKeys, output + r * plan_.width);
      else
        for (int64_t one = r; one < r + rows; ++one)
          add_values<1>(tile, keys, s.scores + one * kTileKeys, output + one * plan_.width);
    }
  }

  // S = Q K^T: vectors run along head_dim, one key at a time against all rows. Keys past the last are 0.
  void dot_products(const RowTile& tile, Range keys, const ChunkScratch<T>& s) const {
    const Block<Storage> key = block<Storage>(p_, p_.key, tile.batch, tile.kv_head, keys.begin);
    const int64_t width = padded<T>(p_.head_dim);
    for (int64_t k = 0; k < count(keys); ++k) {
      const Storage* from = key.data + k * key.row_stride;
      for (int64_t r = 0; r < plan_.rows; ++r) {
        const T* query = s.query + r * width;
        Vec<T> even(T(0)), odd(T(0));
        int64_t d = 0;
        for (; d + 2 * kLanes<T> <= p_.head_dim; d += 2 * kLanes<T>) {
          even = multiply_add(widen_load(from + d), load(query + d), even);
          odd = multiply_add(widen_load(from + d + kLanes<T>), load(query + d + kLanes<T>), odd);
        }
        for (; d < p_.head_dim; d += kLanes<T>)
          even = multiply_add(widen_some<T>(from + d, p_.head_dim - d), load(query + d), even);
        s.scores[r * kTileKeys + k] = sum_of(even + odd);
      }
    }
    for (int64_t r = 0; r < plan_.rows; ++r)
      for (int64_t k = count(keys); k % kLanes<T> != 0; ++k) s.scores[r * kTileKeys + k] = T(0);
  }

  // O += P V for kRows rows. Where that meets NaN or inf, it is done again without the terms that are masked (0 * NaN is NaN).
  template <int kRows>
  void add_values(const RowTile& tile, Range keys, const T* weights, T* output) const {
    const Block<Storage> value = block<Storage>(p_, p_.value, tile.batch, tile.kv_head, keys.begin);
    for (int64_t d = 0; d < p_.value_dim; d += kValueVectors * kLanes<T>)
      if (!add_columns<kRows, false>(value, d, count(keys), weights, output))
        add_columns<kRows, true>(value, d, count(keys), weights, output);
  }

  // The columns [d, d + kValueVectors vectors): sums stay in registers while the keys go by. Returns false, and adds nothing, if
  // a sum is not finite and masked terms were not left out.
  template <int kRows, bool kLeaveOutMasked>
  bool add_columns(const Block<Storage>& value, int64_t d, int64_t keys, const T* weights, T* output) const {
    Vec<T> sum[kRows][kValueVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kValueVectors; ++v) sum[r][v] = Vec<T>(T(0));
    const int64_t width = p_.value_dim - d;
    for (int64_t k = 0; k < keys; ++k) {
      const Storage* from = value.data + k * value.row_stride + d;
#pragma GCC unroll 4
      for (int v = 0; v < kValueVectors; ++v) {
        if (v * kLanes<T> >= width) break;
        const Vec<T> x = widen_some<T>(from + v * kLanes<T>, width - v * kLanes<T>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const T w = weights[r * kTileKeys + k];
          if (!kLeaveOutMasked || !is_skip(w)) sum[r][v] = multiply_add(Vec<T>(w), x, sum[r][v]);
        }
      }
    }
    Vec<T> zero(T(0));  // x - x is 0 for finite x, NaN otherwise
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kValueVectors; ++v) zero = zero + (sum[r][v] - sum[r][v]);
    if (!kLeaveOutMasked && !(sum_of(zero) == T(0))) return false;
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kValueVectors && v * kLanes<T> < width; ++v) {
        T* to = output + r * plan_.width + d + v * kLanes<T>;
        store(to, load(to) + sum[r][v]);
      }
    return true;
  }

  static constexpr int kValueRows = 4;     // rows whose sums are kept in registers together,
  static constexpr int kValueVectors = 4;  // and vectors of columns

  const Problem& p_;
  const FewRowsPlan<T>& plan_;
};

template <class Storage>
void run_few_rows(const Problem& p, const Executor& executor) {
  using T = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const FewRowsPlan<T> plan = plan_few_rows<T>(p, executor.workers, arena);
  const FewRows<Storage, T> pass(p, plan);
  const int64_t planes = p.batch * p.kv_heads;
  parallel(executor, planes * plan.chunks,
           [&](int64_t task, int worker) { pass.run_chunk(task / plan.chunks, task % plan.chunks, worker); });
  parallel(executor, planes, [&](int64_t task, int) { pass.merge(task); });
}

}  // namespace
}  // namespace scaledot
