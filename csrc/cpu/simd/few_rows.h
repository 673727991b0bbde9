// The forward pass for few query rows over many keys: decoding against a cache. Every key and value is used only once or a
// few times, so packing would cost more than the product; they are read in place, and reading them is all the time it takes.
//
//   for each (plane, chunk of kChunkKeys keys):  m, l, O of the chunk, as in forward.h
//   for each row of a plane:                     chunks merged in order:  w_c = exp(m_c - max m),  O = sum w_c O_c / sum w_c l_c
// The cut into chunks depends on the shape alone, so results do not depend on threads. ("Flash-Decoding", Dao et al. 2023.)
#pragma once

#include "cpu/simd/forward.h"
#include "cpu/simd/kernel.h"

namespace scaledot {
namespace {

constexpr int kFewRows = 8;  // query rows that share a key head; more are faster through forward.h
constexpr int64_t kChunkKeys = 4 * kTileKeys;

// kLanes numbers of a contiguous row, the last vector of which may be partly there (the rest counts as 0).
template <class T, class Storage>
SCALEDOT_INLINE Vec<T> widen_some(const Storage* from, int64_t available) {
  if (available >= kLanes<T>) return widen_load(from);
  T lanes[kLanes<T>] = {};
  for (int64_t d = 0; d < available; ++d) lanes[d] = widen(from[d]);
  return load(lanes);
}

// The order in which a tile's keys are read: as kStreams runs of neighbours, a key of each in turn. What the CPU fetches ahead of a
// single run of reads is far less than the memory can give.
constexpr int kStreams = 8;
struct Streams {
  int64_t run;

  explicit Streams(int64_t keys) : run(ceil_div(keys, int64_t(kStreams))) {}
  int64_t keys() const { return run * kStreams; }
  int64_t key(int64_t n) const { return n % kStreams * run + n / kStreams; }  // may lie past the last key
};

template <class T>
struct ChunkScratch {
  T* query;   // (kFewRows, head_dim padded)
  T* scores;  // (kFewRows, kTileKeys)
  T* sums;    // (kFewRows, value_dim padded): P V of a tile
  RowTerms<T> terms;
};

template <class T>
struct FewRowsPlan {
  int64_t rows;            // of a plane
  int64_t chunks;          // of a plane
  int64_t width;           // value_dim padded
  SoftmaxRows<T> softmax;  // (plane, chunk, row)
  T* output;               // (plane, chunk, row, width)
  char* scratch;
  int64_t scratch_bytes;
};

template <class T>
ChunkScratch<T> lay_out_chunk(const Problem& p, Arena& arena) {
  return {take<T>(arena, kFewRows * padded<T>(p.head_dim)), take<T>(arena, kFewRows * kTileKeys),
          take<T>(arena, kFewRows * padded<T>(p.value_dim)), lay_out_row<T>(arena)};
}

template <class T>
FewRowsPlan<T> plan_few_rows(const Problem& p, int workers, Arena& arena) {
  FewRowsPlan<T> plan = {};
  plan.rows = p.heads / p.kv_heads * p.query_length;
  plan.chunks = larger<int64_t>(ceil_div(p.key_length, kChunkKeys), 1);
  plan.width = padded<T>(p.value_dim);
  const int64_t parts = p.batch * p.kv_heads * plan.chunks * plan.rows;
  plan.softmax = lay_out_softmax<T>(arena, parts);
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
  FewRows(const Problem& p, const FewRowsPlan<T>& plan) : p_(p), plan_(plan), unit_(unit_of<T>(p)) {}

  void run_chunk(int64_t plane, int64_t chunk, int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    const ChunkScratch<T> s = lay_out_chunk<T>(p_, arena);
    const RowTile tile = whole_plane(plane);
    const int64_t part = (plane * plan_.chunks + chunk) * plan_.rows;
    T* output = plan_.output + part * plan_.width;
    for (int64_t r = 0; r < plan_.rows; ++r) reset(plan_.softmax, part + r);
    for (int64_t k = 0; k < plan_.rows * plan_.width; ++k) output[k] = T(0);
    Finite<T> unused;
    for (int64_t r = 0; r < plan_.rows; ++r) {
      const Block<Storage> query = block<Storage>(p_, p_.query, tile.batch, head_of(tile, r), row_of(tile, r));
      load_row(query.data, query.col_stride, p_.head_dim, s.query + r * padded<T>(p_.head_dim), unused);
    }
    const Range range = intersect(key_range(p_, tile.rows), {chunk * kChunkKeys, (chunk + 1) * kChunkKeys});
    for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) {
      const Range keys = key_tile(p_, t);
      const TileKind kind = tile_kind(p_, tile.rows, keys);
      if (kind != TileKind::skip && !excluded(p_, tile, keys)) attend(tile, keys, kind, s, part, output);
    }
  }

  void merge(int64_t plane, int64_t r) const {
    const RowTile tile = whole_plane(plane);
    const int64_t first = plane * plan_.chunks * plan_.rows;
    const Parts at_row = {plan_.softmax, first + r};
    RowState<T> total = at_row.state(0);  // of chunks so far, in the unit of scores
    T* sum = plan_.output + (first + r) * plan_.width;
    for (int64_t c = 1; c < plan_.chunks; ++c) {
      const RowState<T> state = at_row.state(c * plan_.rows);
      if (state.sum == T(0)) continue;
      const T maximum = larger(total.maximum, state.maximum);
      const T keep = factor(total, maximum), add = factor(state, maximum);
      total = {maximum, total.sum * keep + state.sum * add};
      const T* other = plan_.output + (first + c * plan_.rows + r) * plan_.width;
      for (int64_t d = 0; d < plan_.width; d += kLanes<T>)
        store(sum + d, multiply_add(load(other + d), Vec<T>(add), load(sum + d) * Vec<T>(keep)));
    }
    total.maximum *= unit_.natural;
    const int64_t head = head_of(tile, r), i = row_of(tile, r);
    narrow_row(sum, normaliser(total) * T(1.0 / (1.0 - p_.dropout_p)), p_.value_dim,
               at<Storage>(p_, p_.output, tile.batch, head) + i * p_.output.row_stride);
    if (p_.lse.data) at<T>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride] = logsumexp(total);
  }

 private:
  struct Parts {
    const SoftmaxRows<T>& softmax;
    int64_t first;
    RowState<T> state(int64_t part) const {
      return {softmax.reference[first + part], sum_of(load(softmax.sum + (first + part) * kLanes<T>))};
    }
  };

  // What sums under state.maximum are multiplied by under another; 0 for an empty row, where the exponential may be anything.
  T factor(const RowState<T>& state, T maximum) const {
    if (state.sum == T(0)) return T(0);
    return exp2(Vec<T>((shift(state.maximum) - shift(maximum)) * unit_.log2)).v[0];
  }

  RowTile whole_plane(int64_t plane) const {
    const int64_t kv_head = plane % p_.kv_heads, group = p_.heads / p_.kv_heads;
    return {plane / p_.kv_heads, kv_head, kv_head * group, group, {0, p_.query_length}};
  }

  void attend(const RowTile& tile, Range keys, TileKind kind, const ChunkScratch<T>& s, int64_t part, T* output) const {
    const TileTerms terms = tile_terms<T>(p_, kind, keys);
    RowTerms<T> row = s.terms;
    dot_products(tile, keys, s);
    for (int64_t r = 0; r < plan_.rows; ++r) {
      T* scores = s.scores + r * kTileKeys;
      T* sums = output + r * plan_.width;
      load_terms(p_, tile, r, keys, terms, kNextKeys, row);
      finish_scores<T>(p_, terms, row, keys, scores, nullptr);
      if (p_.dropout_p > 0)
        softmax_row<T, true>(terms, row, keys, unit_, plan_.softmax, part + r, scores, scores, false, sums,
                             plan_.width);
      else
        softmax_row<T, false>(terms, row, keys, unit_, plan_.softmax, part + r, scores, scores, false, sums,
                              plan_.width);
    }
    const KeyRows<Storage> value = key_rows<Storage>(p_, p_.value, tile.batch, tile.kv_head, keys);
    for (int64_t r = 0; r < plan_.rows;) {
      const int64_t rows = plan_.rows - r >= kTogether ? kTogether : 1;
      const auto mark = [&] {
        for (int64_t one = r; one < r + rows; ++one) {
          load_terms(p_, tile, one, keys, terms, kNextKeys, row);
          mark_masked(terms, row, keys, s.scores + one * kTileKeys, 1);
        }
      };
      if (rows == 1)
        add_values<1>(value, count(keys), s.scores + r * kTileKeys, s.sums, output + r * plan_.width, mark);
      else
        add_values<kTogether>(value, count(keys), s.scores + r * kTileKeys, s.sums, output + r * plan_.width, mark);
      r += rows;
    }
  }

  // S = Q K^T: vectors run along head_dim, kLanes scores at a time, of as many keys if there is a row, of fewer keys if there are more.
  void dot_products(const RowTile& tile, Range keys, const ChunkScratch<T>& s) const {
    const KeyRows<Storage> key = key_rows<Storage>(p_, p_.key, tile.batch, tile.kv_head, keys);
    for (int64_t r = 0; r < plan_.rows;) {
      const T* query = s.query + r * padded<T>(p_.head_dim);
      if (plan_.rows - r >= kTogether) {
        dot_rows<kTogether>(key, count(keys), query, s.scores + r * kTileKeys);
        r += kTogether;
      } else {
        dot_rows<1>(key, count(keys), query, s.scores + r * kTileKeys);
        ++r;
      }
    }
  }

  template <int kRows>
  void dot_rows(const KeyRows<Storage>& key, int64_t keys, const T* query, T* scores) const {
    constexpr int kKeys = kLanes<T> / kRows;
    const int64_t cols = p_.head_dim, width = padded<T>(cols);
    const Streams streams(keys);
    for (int64_t n = 0; n < streams.keys(); n += kKeys) {
      const Storage* from[kKeys];  // past the last key that key again: those scores are not looked at
      for (int i = 0; i < kKeys; ++i) from[i] = key.row(smaller(streams.key(n + i), keys - 1));
      Vec<T> sum[kLanes<T>];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<T>; ++i) sum[i] = Vec<T>(T(0));
      const auto add = [&](int64_t d, const auto& widened) {
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
          const Vec<T> x = widened(from[i] + d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            sum[r * kKeys + i] = multiply_add(x, load(query + r * width + d), sum[r * kKeys + i]);
        }
      };
      int64_t d = 0;
      for (; d + kLanes<T> <= cols; d += kLanes<T>) add(d, [](const Storage* x) { return widen_load(x); });
      if (d < cols) add(d, [&](const Storage* x) { return widen_some<T>(x, cols - d); });
      Vec<T> square[kLanes<T>];  // a copy: sums that a function takes by reference would live in memory
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<T>; ++i) square[i] = sum[i];
      T lanes[kLanes<T>];
      store(lanes, sums_of(square));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<T>; ++i) scores[i / kKeys * kTileKeys + streams.key(n + i % kKeys)] = lanes[i];
    }
  }

  // O += P V for kRows rows. Where that meets NaN or inf, masked terms are marked and left out (0 * NaN is NaN).
  template <int kRows, class Mark>
  void add_values(const KeyRows<Storage>& value, int64_t keys, const T* weights, T* sums, T* output,
                  const Mark& mark) const {
    const int64_t size = kRows * plan_.width;
    sum_values<kRows, false>(value, keys, weights, sums);
    Finite<T> finite;
    for (int64_t d = 0; d < size; d += kLanes<T>) finite.add(load(sums + d));
    if (!finite.all()) {
      mark();
      sum_values<kRows, true>(value, keys, weights, sums);
    }
    for (int64_t d = 0; d < size; d += kLanes<T>) store(output + d, load(output + d) + load(sums + d));
  }

  // sums = P V, a group of keys at a time: they come into the first-level cache with the first columns.
  template <int kRows, bool kLeaveOutMasked>
  void sum_values(const KeyRows<Storage>& value, int64_t keys, const T* weights, T* sums) const {
    constexpr int kVectors = 8 / kRows;  // sums that registers hold
    const int64_t cols = p_.value_dim;
    const Streams streams(keys);
    clear_row(sums, kRows * plan_.width);
    KeyGroup<kRows> group;
    for (int64_t n = 0; n < streams.keys(); n += kGroup) {
      group.keys = smaller(kGroup, streams.keys() - n);
      for (int64_t i = 0; i < group.keys; ++i) {
        const int64_t k = streams.key(n + i);
        group.value[i] = value.row(smaller(k, keys - 1));
        for (int r = 0; r < kRows; ++r) group.weight[i][r] = k < keys ? weights[r * kTileKeys + k] : kSkip<T>;
      }
      int64_t d = 0;
      for (; d + kVectors * kLanes<T> <= cols; d += kVectors * kLanes<T>)
        add_columns<kRows, kVectors, kLeaveOutMasked>(group, d, sums, [](const Storage* x) { return widen_load(x); });
      for (; d < cols; d += kLanes<T>)
        add_columns<kRows, 1, kLeaveOutMasked>(group, d, sums,
                                               [&](const Storage* x) { return widen_some<T>(x, cols - d); });
    }
  }

  static constexpr int64_t kGroup = 2 * kStreams;
  template <int kRows>
  struct KeyGroup {
    int64_t keys;
    const Storage* value[kGroup];
    T weight[kGroup][kRows];
  };

  template <int kRows, int kVectors, bool kLeaveOutMasked, class Widen>
  SCALEDOT_INLINE void add_columns(const KeyGroup<kRows>& group, int64_t d, T* sums, const Widen& widened) const {
    const int64_t width = plan_.width;
    Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width + d + v * kLanes<T>);
    for (int64_t i = 0; i < group.keys; ++i) {
      const T* weight = group.weight[i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> x = widened(group.value[i] + d + v * kLanes<T>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          if (!kLeaveOutMasked || !is_skip(weight[r])) sum[r][v] = multiply_add(Vec<T>(weight[r]), x, sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * width + d + v * kLanes<T>, sum[r][v]);
  }

  static constexpr int kTogether = kLanes<T> < 4 ? kLanes<T> : 4;  // rows whose sums are kept in registers together

  const Problem& p_;
  const FewRowsPlan<T>& plan_;
  const Unit<T> unit_;
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
  parallel(executor, planes * plan.rows, [&](int64_t task, int) { pass.merge(task / plan.rows, task % plan.rows); });
}

// The row of the table, but for why_not(), which begins with the instruction set.
const char* few_rows_why_not(const Problem& p, Pass pass) {
  if (pass == Pass::backward) return "it has no backward";
  if (p.heads / p.kv_heads * p.query_length > kFewRows) return "more than 8 query rows share a key head";
  if (p.weights.data) return "return_weights is set";
  if (p.key.col_stride != 1 || p.value.col_stride != 1) return "the last stride of key or value is not 1";
  return nullptr;
}

int64_t few_rows_workspace(const Problem& p, Pass, int workers) {
  Arena arena = {nullptr, 0};
  PlainOperands::with_types(
      p, [&](auto, auto operand) { plan_few_rows<typename decltype(operand)::type>(p, workers, arena); });
  return arena.used;
}

void few_rows_forward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype, [&](auto storage) { run_few_rows<typename decltype(storage)::type>(p, executor); });
}

constexpr Kernel few_rows_kernel(const char* name, const char* (*why_not)(const Problem&, Pass)) {
  return {name, why_not, few_rows_workspace, few_rows_forward, nullptr};
}

}  // namespace
}  // namespace scaledot
