// Attention of each row to its own list of keys (Problem::key_indices), forward and backward. Time and memory grow with
// the length of a list, not with the number of keys.
//
// k_0, k_1, ...: the list of row i without entries that are negative or that the row's position hides.
//   S_e = Q_i . K[k_e]      P = softmax(scores(S))      Pd = keep P / (1 - dropout_p)      O_i = sum_e Pd_e V[k_e]
//   dP_e = keep (dO_i . V[k_e] + dW_e) / (1 - dropout_p)         delta = sum_e P_e dP_e - dlse_i
//   dX_e = scale slope P_e (dP_e - delta)                        (slope: of the softcap)
//   dQ_i = sum_e dX_e K[k_e]      dK[k_e] += dX_e Q_i      dV[k_e] += Pd_e dO_i
// A row sees its whole list at once: the softmax is not online, and delta is the exact sum, so the backward needs
// neither lse nor output.
//
// Tiles. The query heads that share a list and a KV head, and some rows, are a tile. With few such heads its lists are
// sorted by blocks of keys, and all its rows visit a block before the next one: usually a block is in the second-level
// cache, where all keys are not. Each key is loaded once for several of the heads.
//
// Tasks. A task of the forward is a tile. A task of the backward is a split of the rows of a KV group, with sums of dK
// and dV of its own; the sums are added in order. The number of splits depends on the shape alone, and the order in
// which a row visits its keys on its list alone. The kernels are called "..._key_lists".
#pragma once

#include "cpu/cpu.h"
#include "cpu/simd/attention/key_list_plan.h"
#include "cpu/simd/attention/key_list_products.h"
#include "cpu/simd/task_state.h"

namespace scaledot {
namespace {

// `Storage`: of query, key and value. `Products`: ListProducts, or ListTileProducts.
template <class Storage, class Products>
class KeyLists {
  using Sum = typename Compute<Storage>::type;

 public:
  KeyLists(const Problem& p, const ListPlan<Sum>& plan, Pass pass)
      : p_(p), plan_(plan), pass_(pass), unit_(score_unit<Sum>(p)) {}

  // Output, lse and weights of a tile.
  void attend(int64_t kv_group, int64_t head_tile, Range rows, int worker) const {
    const ListScratch<Sum> s = scratch(worker);
    const Tile tile = tile_of(kv_group, head_tile, rows);
    load_lists(tile, s);
    load_rows(p_.query, tile, p_.head_dim, s.query);
    dot_rows(tile, s, rows_of(p_.key, tile, p_.head_dim), s.query, s.scores);
    for_each_query(tile, [&](int64_t q, int64_t row) {
      const ListedKeys list = list_of(s, row);
      s.states[q] = softmax(list, s.scores + q * plan_.stride, nullptr);
      if (p_.dropout_p > 0) drop(list, tile, q, s, s.scores + q * plan_.stride);
    });
    weigh_rows(tile, s, rows_of(p_.value, tile, p_.value_dim), s.scores);
    for_each_query(tile, [&](int64_t q, int64_t row) { write_results(list_of(s, row), tile, q, s); });
  }

  // dQ of a split's rows, and its sums of dK and dV.
  void add_split(int64_t kv_group, int64_t split, int worker) const {
    const ListScratch<Sum> s = scratch(worker);
    const int64_t place = plan_.splits > 1 ? kv_group * plan_.splits + split : worker;
    Sum* const grad_key = sums_at(plan_.grad_key, place, p_.head_dim);
    Sum* const grad_value = sums_at(plan_.grad_value, place, p_.value_dim);
    if (p_.grad_key.data) clear_row(grad_key, p_.key_length * padded<Sum>(p_.head_dim));
    if (p_.grad_value.data) clear_row(grad_value, p_.key_length * padded<Sum>(p_.value_dim));
    const Range rows = {p_.query_length * split / plan_.splits, p_.query_length * (split + 1) / plan_.splits};
    for (int64_t first = rows.begin; first < rows.end; first += plan_.tile_rows)
      for (int64_t head_tile = 0; head_tile < plan_.head_tiles; ++head_tile)
        add_tile(tile_of(kv_group, head_tile, {first, min(first + plan_.tile_rows, rows.end)}), s, grad_key,
                 grad_value);
    if (plan_.splits == 1) store_sums(kv_group, {0, p_.key_length}, grad_key, grad_value);
  }

  // dK and dV of some keys: the sums of all splits.
  void sum_splits(int64_t kv_group, Range keys) const {
    Sum* const grad_key = sums_at(plan_.grad_key, kv_group * plan_.splits, p_.head_dim);
    Sum* const grad_value = sums_at(plan_.grad_value, kv_group * plan_.splits, p_.value_dim);
    for (int64_t split = 1; split < plan_.splits; ++split) {
      if (p_.grad_key.data) add_sums(grad_key, split, keys, padded<Sum>(p_.head_dim));
      if (p_.grad_value.data) add_sums(grad_value, split, keys, padded<Sum>(p_.value_dim));
    }
    store_sums(kv_group, keys, grad_key, grad_value);
  }

 private:
  // Some rows of query heads that share a list and a KV head. Query q is row q / heads, head q % heads of the tile.
  struct Tile {
    int64_t batch, kv_head, first_head, heads;
    Range rows;
  };

  Tile tile_of(int64_t kv_group, int64_t head_tile, Range rows) const {
    const int64_t of_list = ceil_div(plan_.heads, plan_.tile_heads), kv_head = kv_group % p_.kv_heads;
    const int64_t before = head_tile % of_list * plan_.tile_heads;
    return {kv_group / p_.kv_heads, kv_head,
            kv_head * (p_.heads / p_.kv_heads) + head_tile / of_list * plan_.heads + before,
            min(plan_.tile_heads, plan_.heads - before), rows};
  }

  static int64_t head_of(const Tile& tile, int64_t q) { return tile.first_head + q % tile.heads; }
  static int64_t row_of(const Tile& tile, int64_t q) { return tile.rows.begin + q / tile.heads; }

  // Calls body(query, row of the tile).
  template <class Body>
  static void for_each_query(const Tile& tile, const Body& body) {
    for (int64_t q = 0; q < count(tile.rows) * tile.heads; ++q) body(q, q / tile.heads);
  }

  ListScratch<Sum> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_list(p_, plan_, pass_, arena);
  }

  Products products_of(const ListScratch<Sum>& s) const {
    return Products(plan_.tile_heads, max(padded<Sum>(p_.head_dim), padded<Sum>(p_.value_dim)), s.products);
  }

  ListedRows<Storage> rows_of(const TensorView& view, const Tile& tile, int64_t cols) const {
    return {element_ptr<const Storage>(p_, view, tile.batch, tile.kv_head), view.row_stride, cols};
  }

  // ---------------------------------------------------------------------------------------------------- lists
  // Loads the entries that each row may attend to, sorted by blocks. No other number is used as a key, so nothing else
  // is ever read.
  void load_lists(const Tile& tile, const ListScratch<Sum>& s) const {
    const TensorView& view = p_.key_indices;
    const int64_t start = offset(p_, view, tile.batch, tile.first_head / p_.heads_per_list);
    for (int64_t row = 0; row < count(tile.rows); ++row) {
      const int64_t i = tile.rows.begin + row, first = start + i * view.row_stride;
      if (view.dtype == DType::int64)
        load_list(static_cast<const int64_t*>(view.data) + first, row_keys(p_, i), row, s);
      else
        load_list(static_cast<const int32_t*>(view.data) + first, row_keys(p_, i), row, s);
    }
  }

  template <class Index>
  void load_list(const Index* entries, Range seen, int64_t row, const ListScratch<Sum>& s) const {
    const int64_t step = p_.key_indices.col_stride;
    int64_t* const starts = s.starts + row * (plan_.blocks + 1);
    const bool sorts = plan_.blocks > 1, with_columns = needs_columns(p_);
    int32_t *const keys = s.keys + row * p_.list_length, *const columns = s.columns + row * p_.list_length;
    int32_t *const loaded = sorts ? s.unsorted : keys, *const at_column = sorts ? s.at_column : columns;
    for (int64_t b = 0; b <= plan_.blocks; ++b) starts[b] = 0;
    int64_t n = 0;
    for (int64_t c = 0; c < p_.list_length; ++c) {
      const int64_t key = entries[c * step];
      if (key < seen.begin || key >= seen.end) continue;
      loaded[n] = int32_t(key);
      if (with_columns) at_column[n] = int32_t(c);
      ++n;
      if (sorts) ++starts[key >> plan_.block_shift];
    }
    if (!sorts) starts[0] = n;
    int64_t before = 0;
    for (int64_t b = 0; b <= plan_.blocks; ++b) {
      const int64_t size = starts[b];
      starts[b] = before;
      before += size;
    }
    if (!sorts) return;
    for (int64_t e = 0; e < n; ++e) {
      const int64_t place = starts[loaded[e] >> plan_.block_shift]++;
      keys[place] = loaded[e];
      if (with_columns) columns[place] = at_column[e];
    }
    for (int64_t b = plan_.blocks; b > 0; --b) starts[b] = starts[b - 1];
    starts[0] = 0;
  }

  ListedKeys list_of(const ListScratch<Sum>& s, int64_t row) const {
    return {s.keys + row * p_.list_length, s.starts[row * (plan_.blocks + 1) + plan_.blocks]};
  }

  // Calls body(row of the tile, keys, their place in the row's list) for all blocks and rows, in pieces; before that
  // prefetch(keys) for the piece that comes next.
  template <class Prefetch, class Body>
  SCALEDOT_INLINE void for_each_piece(const Tile& tile, const ListScratch<Sum>& s, const Prefetch& prefetch,
                                      const Body& body) const {
    int64_t row = 0, place = 0;
    ListedKeys now = {nullptr, 0};
    for (int64_t block = 0; block < plan_.blocks; ++block)
      for (int64_t r = 0; r < count(tile.rows); ++r) {
        const int64_t* of_block = s.starts + r * (plan_.blocks + 1) + block;
        for (int64_t e = of_block[0]; e < of_block[1]; e += Products::kPiece) {
          const ListedKeys next = {s.keys + r * p_.list_length + e, min(of_block[1] - e, Products::kPiece)};
          prefetch(next);
          if (now.count > 0) body(row, now, place);
          row = r, place = e, now = next;
        }
      }
    if (now.count > 0) body(row, now, place);
  }

  // ---------------------------------------------------------------------------------------------------- products
  // Row of each query, widened.
  void load_rows(const TensorView& view, const Tile& tile, int64_t cols, Sum* to) const {
    Finite<Sum> unused;
    for_each_query(tile, [&](int64_t q, int64_t) {
      load_row(element_ptr<const Storage>(p_, view, tile.batch, head_of(tile, q)) + row_of(tile, q) * view.row_stride,
               view.col_stride, cols, to + q * padded<Sum>(cols), unused);
    });
  }

  void dot_rows(const Tile& tile, const ListScratch<Sum>& s, const ListedRows<Storage>& b, const Sum* a,
                Sum* to) const {
    const int64_t width = padded<Sum>(b.cols);
    const Products products = products_of(s);
    for_each_piece(
        tile, s, [&](const ListedKeys& next) { products.prefetch(next, b.data, b.row_stride, b.cols); },
        [&](int64_t row, const ListedKeys& keys, int64_t place) {
          products.dots(keys, b, a + row * tile.heads * width, tile.heads, to + row * tile.heads * plan_.stride + place,
                        plan_.stride);
        });
  }

  void weigh_rows(const Tile& tile, const ListScratch<Sum>& s, const ListedRows<Storage>& b, const Sum* weights,
                  bool exact = false) const {
    const int64_t width = padded<Sum>(b.cols);
    clear_row(s.sums, count(tile.rows) * tile.heads * width);
    const Products products = products_of(s);
    for_each_piece(
        tile, s, [&](const ListedKeys& next) { products.prefetch(next, b.data, b.row_stride, b.cols); },
        [&](int64_t row, const ListedKeys& keys, int64_t place) {
          products.weigh(keys, b, weights + row * tile.heads * plan_.stride + place, plan_.stride, tile.heads,
                         s.sums + row * tile.heads * width, exact);
        });
  }

  void scatter_rows(const Tile& tile, const ListScratch<Sum>& s, const Sum* weights, const Sum* a, int64_t cols,
                    Sum* to) const {
    const int64_t width = padded<Sum>(cols);
    const Products products = products_of(s);
    for_each_piece(
        tile, s, [&](const ListedKeys& next) { products.prefetch(next, to, width, cols); },
        [&](int64_t row, const ListedKeys& keys, int64_t place) {
          products.scatter(keys, weights + row * tile.heads * plan_.stride + place, plan_.stride,
                           a + row * tile.heads * width, tile.heads, cols, to);
        });
  }

  // ---------------------------------------------------------------------------------------------------- one query
  // Dot products to P times its sum; the state has the sum. `slopes`: d score / d (scale * dot product) of a softcap.
  RowState<Sum> softmax(const ListedKeys& list, Sum* scores, Sum* slopes) const {
    const Range all = {0, round_up(list.count, int64_t(kLanes<Sum>))};
    const Sum scale = Sum(p_.scale);
    if (p_.softcap > 0)
      cap_scores(all, scale, Sum(p_.softcap), scores, slopes);
    else if (!unit_.raw)
      for (int64_t e = 0; e < all.end; e += kLanes<Sum>) store(scores + e, load(scores + e) * Vec<Sum>(scale));
    for (int64_t e = list.count; e < all.end; ++e) scores[e] = -Sum(__builtin_inf());
    const Sum highest = maximum_of(highest_of(scores, all));
    const Vec<Sum> offset(shift(highest)), log2(unit_.log2);
    Vec<Sum> sum(Sum(0));
    for (int64_t e = 0; e < all.end; e += kLanes<Sum>) {
      const Vec<Sum> w = exp2((load(scores + e) - offset) * log2);
      sum = sum + w;
      store(scores + e, w);
    }
    return {highest * unit_.natural, sum_of(sum)};
  }

  // Multiplies what dropout drops by 0. `again`: the words of query q are loaded.
  void drop(const ListedKeys& list, const Tile& tile, int64_t q, const ListScratch<Sum>& s, Sum* row,
            bool again = false) const {
    const DropoutRow stream = dropout_row(p_, tile.batch, head_of(tile, q), row_of(tile, q));
    const int64_t first = stream.first_column, before = first % kDropoutGroup;
    if (!again) {
      PhiloxKeys keys;
      keys.set(stream);
      dropout_words(PhiloxRow(stream, keys), first / kDropoutGroup, before + p_.list_length, s.words);
    }
    const uint32_t* const words = s.words + before;
    const int32_t* const columns = columns_of(tile, q, s);
    for (int64_t e = 0; e < list.count; ++e) row[e] *= Sum(words[columns[e]] >= stream.threshold);
  }

  const int32_t* columns_of(const Tile& tile, int64_t q, const ListScratch<Sum>& s) const {
    return s.columns + q / tile.heads * p_.list_length;
  }

  void write_results(const ListedKeys& list, const Tile& tile, int64_t q, const ListScratch<Sum>& s) const {
    const int64_t head = head_of(tile, q), i = row_of(tile, q);
    const RowState<Sum> state = s.states[q];
    const Sum factor = output_factor(state, Sum(dropout_scale(p_)));
    write_output_row<Storage>(p_, tile.batch, head, i, s.sums + q * padded<Sum>(p_.value_dim), factor);
    if (p_.lse.data) element_ptr<Sum>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride] = logsumexp(state);
    if (!p_.weights.data) return;
    const int64_t step = p_.weights.col_stride;
    Storage* weights = element_ptr<Storage>(p_, p_.weights, tile.batch, head) + i * p_.weights.row_stride;
    const int32_t* const columns = columns_of(tile, q, s);
    for (int64_t c = 0; c < p_.list_length; ++c) narrow(Sum(0), weights[c * step]);
    for (int64_t e = 0; e < list.count; ++e)
      narrow(s.scores[q * plan_.stride + e] * factor, weights[columns[e] * step]);
  }

  // The gradients of a tile.
  void add_tile(const Tile& tile, const ListScratch<Sum>& s, Sum* grad_key, Sum* grad_value) const {
    const ListedRows<Storage> keys = rows_of(p_.key, tile, p_.head_dim);
    load_lists(tile, s);
    load_rows(p_.query, tile, p_.head_dim, s.query);
    dot_rows(tile, s, keys, s.query, s.scores);
    if (p_.grad_output.data) {
      load_rows(p_.grad_output, tile, p_.value_dim, s.grad_output);
      dot_rows(tile, s, rows_of(p_.value, tile, p_.value_dim), s.grad_output, s.grads);
    } else {
      clear_row(s.grads, count(tile.rows) * tile.heads * plan_.stride);
    }
    for_each_query(tile, [&](int64_t q, int64_t row) { grad_scores(list_of(s, row), tile, q, s); });
    if (p_.grad_query.data) {
      weigh_rows(tile, s, keys, s.grads, /*exact=*/true);
      for_each_query(tile, [&](int64_t q, int64_t) {
        narrow_row(s.sums + q * padded<Sum>(p_.head_dim), Sum(1), p_.head_dim,
                   element_ptr<Storage>(p_, p_.grad_query, tile.batch, head_of(tile, q)) +
                       row_of(tile, q) * p_.grad_query.row_stride);
      });
    }
    if (p_.grad_key.data) scatter_rows(tile, s, s.grads, s.query, p_.head_dim, grad_key);
    if (p_.grad_value.data && p_.grad_output.data)
      scatter_rows(tile, s, s.scores, s.grad_output, p_.value_dim, grad_value);
  }

  // S and dO . V of a query to Pd and dX.
  void grad_scores(const ListedKeys& list, const Tile& tile, int64_t q, const ListScratch<Sum>& s) const {
    const int64_t head = head_of(tile, q), i = row_of(tile, q);
    Sum *const weights = s.scores + q * plan_.stride, *const grads = s.grads + q * plan_.stride;
    if (const Storage* given = element_ptr<const Storage>(p_, p_.grad_weights, tile.batch, head)) {
      given += i * p_.grad_weights.row_stride;
      const int32_t* const columns = columns_of(tile, q, s);
      for (int64_t e = 0; e < list.count; ++e) grads[e] += Sum(widen(given[columns[e] * p_.grad_weights.col_stride]));
    }
    const RowState<Sum> state = softmax(list, weights, s.slopes);
    if (p_.dropout_p > 0) drop(list, tile, q, s, grads);
    const Sum kept = Sum(dropout_scale(p_)), probability = normaliser(state);
    const int64_t end = round_up(list.count, int64_t(kLanes<Sum>));
    for (int64_t e = list.count; e < end; ++e) grads[e] = Sum(0);
    Vec<Sum> sum(Sum(0));
    for (int64_t e = 0; e < end; e += kLanes<Sum>) {
      const Vec<Sum> p = load(weights + e) * Vec<Sum>(probability), g = load(grads + e) * Vec<Sum>(kept);
      store(weights + e, p);
      store(grads + e, g);
      sum = fma(p, g, sum);
    }
    const Sum* grad_lse = element_ptr<const Sum>(p_, p_.grad_lse, tile.batch, head);
    const Vec<Sum> delta(sum_of(sum) - (grad_lse ? grad_lse[i * p_.grad_lse.row_stride] : Sum(0)));
    const Vec<Sum> scale(Sum(p_.scale));
    for (int64_t e = 0; e < end; e += kLanes<Sum>) {
      Vec<Sum> x = load(weights + e) * (load(grads + e) - delta) * scale;
      if (p_.softcap > 0) x = x * load(s.slopes + e);
      store(grads + e, x);
      store(weights + e, load(weights + e) * Vec<Sum>(kept));
    }
    if (p_.dropout_p > 0) drop(list, tile, q, s, weights, /*again=*/true);
  }

  Sum* sums_at(Sum* first, int64_t place, int64_t cols) const {
    return first + place * p_.key_length * padded<Sum>(cols);
  }

  void add_sums(Sum* first, int64_t split, Range keys, int64_t width) const {
    const Sum* other = first + split * p_.key_length * width;
    for (int64_t d = keys.begin * width; d < keys.end * width; d += kLanes<Sum>)
      store(first + d, load(first + d) + load(other + d));
  }

  void store_sums(int64_t kv_group, Range keys, const Sum* grad_key, const Sum* grad_value) const {
    const auto store_rows = [&](const TensorView& to, const Sum* from, int64_t cols) {
      if (!to.data) return;
      Storage* rows = element_ptr<Storage>(p_, to, kv_group / p_.kv_heads, kv_group % p_.kv_heads);
      for (int64_t j = keys.begin; j < keys.end; ++j)
        narrow_row(from + j * padded<Sum>(cols), Sum(1), cols, rows + j * to.row_stride);
    };
    store_rows(p_.grad_key, grad_key, p_.head_dim);
    store_rows(p_.grad_value, grad_value, p_.value_dim);
  }

  const Problem& p_;
  const ListPlan<Sum>& plan_;
  const Pass pass_;
  const ScoreUnit<Sum> unit_;
};

template <class Products, class Sum>
int64_t list_workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  plan_lists<Products, Sum>(p, pass, workers, arena);
  return arena.used;
}

template <class Storage, class Products>
void list_forward(const Problem& p, const Executor& executor) {
  using Sum = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ListPlan<Sum> plan = plan_lists<Products, Sum>(p, Pass::forward, executor.workers, arena);
  const KeyLists<Storage, Products> pass(p, plan, Pass::forward);
  const int64_t tasks = ceil_div(p.query_length, plan.tile_rows) * plan.head_tiles;  // of a KV group
  parallel(executor, p.batch * p.kv_heads * tasks, [&](int64_t task, int worker) {
    const int64_t first = task % tasks / plan.head_tiles * plan.tile_rows;
    const Range rows = {first, min(first + plan.tile_rows, p.query_length)};
    pass.attend(task / tasks, task % plan.head_tiles, rows, worker);
  });
}

template <class Storage, class Products>
void list_backward(const Problem& p, const Executor& executor) {
  using Sum = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ListPlan<Sum> plan = plan_lists<Products, Sum>(p, Pass::backward, executor.workers, arena);
  const KeyLists<Storage, Products> pass(p, plan, Pass::backward);
  const int64_t kv_groups = p.batch * p.kv_heads;
  parallel(executor, kv_groups * plan.splits,
           [&](int64_t task, int worker) { pass.add_split(task / plan.splits, task % plan.splits, worker); });
  if (plan.splits == 1) return;
  const int64_t tiles = ceil_div(p.key_length, int64_t(kTileKeys));
  parallel(executor, kv_groups * tiles, [&](int64_t task, int) {
    const int64_t first = task % tiles * kTileKeys;
    pass.sum_splits(task / tiles, {first, min(first + kTileKeys, p.key_length)});
  });
}

inline int64_t key_lists_workspace(const Problem& p, Pass pass, int workers) {
  return p.dtype == DType::float64 ? list_workspace<ListProducts<double>, double>(p, pass, workers)
                                   : list_workspace<ListProducts<float>, float>(p, pass, workers);
}

inline void key_lists_forward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype,
               [&]<class Storage>(Type<Storage>) { list_forward<Storage, ListProducts<Storage>>(p, executor); });
}

inline void key_lists_backward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype,
               [&]<class Storage>(Type<Storage>) { list_backward<Storage, ListProducts<Storage>>(p, executor); });
}

template <Capability kLeast>
const char* why_not_key_lists_at(const Problem& p, Pass) {
  if (const char* reason = why_below(kLeast)) return reason;
  return has_key_lists(p) ? nullptr : "there are no key_indices";
}

// Table entry.
constexpr Kernel key_lists_kernel(const char* name, const char* (*why_not)(const Problem&, Pass)) {
  return {name, why_not, key_lists_workspace, with_state<key_lists_forward>, with_state<key_lists_backward>};
}

}  // namespace
}  // namespace scaledot
