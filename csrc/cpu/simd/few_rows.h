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

// The order in which a run of keys is read: as kStreams parts of neighbours, a key of each at every step. What the CPU fetches ahead of
// a single run of reads is far less than the memory can give; of more and shorter parts it fetches less again.
constexpr int kStreams = 4;
struct Streams {
  int64_t steps;  // keys in a part

  explicit Streams(int64_t keys) : steps(ceil_div(keys, int64_t(kStreams))) {}
  int64_t key(int64_t step, int64_t stream) const { return stream * steps + step; }  // may lie past the last key
};

template <class T>
struct ChunkScratch {
  T* query;   // (kFewRows, head_dim padded)
  T* scores;  // (kFewRows, kChunkKeys)
  T* sums;    // (kFewRows, value_dim padded): P V of a run of keys
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
  return {take<T>(arena, kFewRows * padded<T>(p.head_dim)), take<T>(arena, kFewRows * kChunkKeys),
          take<T>(arena, kFewRows * padded<T>(p.value_dim)), lay_out_row<T>(arena)};
}

template <class T>
FewRowsPlan<T> plan_few_rows(const Problem& p, int workers, Arena& arena) {
  FewRowsPlan<T> plan = {};
  plan.rows = p.heads / p.kv_heads * p.query_length;
  plan.chunks = max<int64_t>(ceil_div(p.key_length, kChunkKeys), 1);
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
    Range run = {0, 0};  // of neighbouring tiles, of each of which some row sees some key
    for_each_tile(p_, range, [&](Range keys) {
      if (excluded(p_, tile, keys)) return;
      if (run.end != keys.begin && count(run) > 0) attend(tile, run, s, part, output);
      run = {run.end == keys.begin ? run.begin : keys.begin, keys.end};
    });
    if (count(run) > 0) attend(tile, run, s, part, output);
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
      const T maximum = max(total.maximum, state.maximum);
      const T keep = factor(total, maximum), add = factor(state, maximum);
      total = {maximum, total.sum * keep + state.sum * add};
      const T* other = plan_.output + (first + c * plan_.rows + r) * plan_.width;
      for (int64_t d = 0; d < plan_.width; d += kLanes<T>)
        store(sum + d, fma(load(other + d), Vec<T>(add), load(sum + d) * Vec<T>(keep)));
    }
    total.maximum *= unit_.natural;
    const int64_t head = head_of(tile, r), i = row_of(tile, r);
    narrow_row(sum, normaliser(total) * T(dropout_scale(p_)), p_.value_dim,
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

  // body(Rows<count>{}, r) for as many rows at a time as registers hold the sums of.
  template <int kCount>
  struct Rows {
    static constexpr int count = kCount;
  };
  template <class Body>
  void for_each_rows(const Body& body) const {
    int64_t r = 0;
    for (; r + kTogether <= plan_.rows; r += kTogether) body(Rows<kTogether>{}, r);
    for (; r < plan_.rows; ++r) body(Rows<1>{}, r);
  }

  // m, l and O of a run of whole tiles of keys, added to those of the chunk so far.
  void attend(const RowTile& tile, Range keys, const ChunkScratch<T>& s, int64_t part, T* output) const {
    dot_products(tile, keys, s);
    for (int64_t r = 0; r < plan_.rows; ++r) {
      const T before = plan_.softmax.reference[part + r];
      for_each_tile(p_, keys, [&](Range some) {
        p_.dropout_p > 0 ? weigh<true>(tile, r, keys, some, s, part) : weigh<false>(tile, r, keys, some, s, part);
      });
      follow_reference(before, plan_.softmax.reference[part + r], unit_, output + r * plan_.width, plan_.width);
    }
    add_values(tile, keys, s, output);
  }

  // Scores of row r to weights. What follows the row's reference are the weights of the run so far.
  template <bool kDropout>
  void weigh(const RowTile& tile, int64_t r, Range run, Range keys, const ChunkScratch<T>& s, int64_t part) const {
    const TileTerms terms = tile_terms<T>(p_, tile, keys);
    RowTerms<T> row = s.terms;
    const int64_t before = keys.begin - run.begin;
    T *const first = s.scores + r * kChunkKeys, *const scores = first + before;
    load_terms(p_, tile, r, keys, terms, kNextKeys, row);
    finish_scores<T>(p_, terms, row, keys, scores, nullptr);
    softmax_row<T, kDropout>(terms, row, keys, unit_, plan_.softmax, part + r, scores, scores, false, first, before);
  }

  // S = Q K^T: vectors run along head_dim.
  void dot_products(const RowTile& tile, Range keys, const ChunkScratch<T>& s) const {
    const auto key = key_rows<Storage, kChunkKeys>(p_, p_.key, tile.batch, tile.kv_head, keys);
    const Streams streams(count(keys));
    for (int64_t step = 0; step < streams.steps; ++step) {
      const Storage* from[kStreams];  // past the last key that key again: those scores are not looked at
      for (int i = 0; i < kStreams; ++i) from[i] = key.row(min(streams.key(step, i), count(keys) - 1));
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kKeys = min(kLanes<T> / rows.count, kStreams);
        for (int first = 0; first < kStreams; first += kKeys)
          dot_rows<rows.count, kKeys>(from + first, s.query + r * padded<T>(p_.head_dim),
                                      s.scores + r * kChunkKeys + streams.key(step, first), streams.steps);
      });
    }
  }

  // Of kRows rows and kKeys keys, kLanes sums at a time: of fewer scores, each has several. Scores of keys are `apart` numbers apart.
  template <int kRows, int kKeys>
  void dot_rows(const Storage* const* from, const T* query, T* scores, int64_t apart) const {
    constexpr int kScores = kRows * kKeys, kSums = kLanes<T> / kScores;
    const int64_t cols = p_.head_dim, width = padded<T>(cols);
    Vec<T> sum[kLanes<T>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) sum[i] = Vec<T>(T(0));
    const auto add = [&](int64_t d, int part, const auto& widened) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const Vec<T> x = widened(from[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Vec<T>& one = sum[part * kScores + r * kKeys + i];
          one = fma(x, load(query + r * width + d), one);
        }
      }
    };
    const auto whole = [](const Storage* x) { return widen_load(x); };
    int64_t d = 0;
    for (; d + kSums * kLanes<T> <= cols; d += kSums * kLanes<T>)
#pragma GCC unroll 16
      for (int part = 0; part < kSums; ++part) add(d + part * kLanes<T>, part, whole);
    if constexpr (kSums > 1)
      for (; d + kLanes<T> <= cols; d += kLanes<T>) add(d, 0, whole);
    if (d < cols) add(d, 0, [&](const Storage* x) { return widen_some<T>(x, cols - d); });
    Vec<T> square[kLanes<T>];  // a copy: sums that a function takes by reference would live in memory
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) square[i] = sum[i];
    T lanes[kLanes<T>];
    store(lanes, sums_of(square));
#pragma GCC unroll 16
    for (int i = 0; i < kScores; ++i) {
      T score = lanes[i];
      for (int part = 1; part < kSums; ++part) score += lanes[part * kScores + i];
      scores[i / kKeys * kChunkKeys + i % kKeys * apart] = score;
    }
  }

  // O += P V. Where that meets NaN or inf, masked terms are marked and left out (0 * NaN is NaN).
  void add_values(const RowTile& tile, Range keys, const ChunkScratch<T>& s, T* output) const {
    const auto value = key_rows<Storage, kChunkKeys>(p_, p_.value, tile.batch, tile.kv_head, keys);
    const int64_t size = plan_.rows * plan_.width;
    sum_values<false>(value, count(keys), s);
    Finite<T> finite;
    for (int64_t d = 0; d < size; d += kLanes<T>) finite.add(load(s.sums + d));
    if (!finite.all()) {
      RowTerms<T> row = s.terms;
      for (int64_t r = 0; r < plan_.rows; ++r)
        for_each_tile(p_, keys, [&](Range some) {
          const TileTerms terms = tile_terms<T>(p_, tile, some);
          load_terms(p_, tile, r, some, terms, kNextKeys, row);
          mark_masked(terms, row, some, s.scores + r * kChunkKeys + some.begin - keys.begin, 1);
        });
      sum_values<true>(value, count(keys), s);
    }
    for (int64_t d = 0; d < size; d += kLanes<T>) store(output + d, load(output + d) + load(s.sums + d));
  }

  // sums = P V.
  template <bool kLeaveOutMasked>
  void sum_values(const KeyRows<Storage, kChunkKeys>& value, int64_t keys, const ChunkScratch<T>& s) const {
    const int64_t cols = p_.value_dim;
    const Streams streams(keys);
    clear_row(s.sums, plan_.rows * plan_.width);
    for (int64_t step = 0; step < streams.steps; ++step)
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kRows = rows.count, kVectors = 8 / kRows;  // sums that registers hold
        T* sums = s.sums + r * plan_.width;
        Step<kRows> now;
        for (int i = 0; i < kStreams; ++i) {
          const int64_t k = streams.key(step, i);
          now.value[i] = value.row(min(k, keys - 1));
          for (int one = 0; one < kRows; ++one)
            now.weight[i][one] = k < keys ? s.scores[(r + one) * kChunkKeys + k] : kSkip<T>;
        }
        int64_t d = 0;
        for (; d + kVectors * kLanes<T> <= cols; d += kVectors * kLanes<T>)
          add_columns<kRows, kVectors, kLeaveOutMasked>(now, d, sums, [](const Storage* x) { return widen_load(x); });
        for (; d < cols; d += kLanes<T>)
          add_columns<kRows, 1, kLeaveOutMasked>(now, d, sums,
                                                 [&](const Storage* x) { return widen_some<T>(x, cols - d); });
      });
  }

  // A key of each stream, and some rows' weights of these.
  template <int kRows>
  struct Step {
    const Storage* value[kStreams];
    T weight[kStreams][kRows];
  };

  template <int kRows, int kVectors, bool kLeaveOutMasked, class Widen>
  SCALEDOT_INLINE void add_columns(const Step<kRows>& step, int64_t d, T* sums, const Widen& widened) const {
    const int64_t width = plan_.width;
    Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width + d + v * kLanes<T>);
    for (int i = 0; i < kStreams; ++i) {
      const T* weight = step.weight[i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> x = widened(step.value[i] + d + v * kLanes<T>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          if (!kLeaveOutMasked || !is_skip(weight[r])) sum[r][v] = fma(Vec<T>(weight[r]), x, sum[r][v]);
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
