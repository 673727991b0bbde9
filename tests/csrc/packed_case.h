// Problems of packed sequences, with and without pages: from a PackedCase to a Problem and its tensors.
#pragma once

#include <numeric>

#include "core/varlen.h"
#include "kernel_cases.h"
#include "kernel_check.h"

namespace scaledot::testing {

struct Lengths {
  int64_t query, key;
};

struct PackedCase {
  std::string name;
  Case common;
  std::vector<Lengths> lengths;
  int64_t page_size = 0;  // 0: keys are packed, not paged
  int64_t unused = 0;     // rows after the keys of each sequence, which seqused_k leaves out
  int64_t num_splits = 0;
  int64_t seeds = 1;  // each for the same number of consecutive sequences
};
inline void PrintTo(const PackedCase& c, std::ostream* stream) { *stream << c.name; }

// One tensor of all sequences; `room`: the rows from the beginning of one to that of the next.
class PackedTensor {
 public:
  PackedTensor() = default;
  PackedTensor(DType dtype, int64_t heads, std::vector<int64_t> room, int64_t cols, MemoryOrder order,
               Broadcast broadcast = {})
      : first_(room.size() + 1, 0) {
    std::partial_sum(room.begin(), room.end(), first_.begin() + 1);
    tensor = TestTensor(dtype, {}, heads, first_.back(), cols, order, broadcast);
  }

  // Copies between this tensor and one of sequence b.
  void gather(size_t b, const TestTensor& from) { tensor.copy_rows(first_[b], from, 0, from.rows()); }
  void scatter(size_t b, TestTensor& to) const { to.copy_rows(0, tensor, first_[b], to.rows()); }

  TestTensor tensor;

 private:
  std::vector<int64_t> first_;
};

// The sequences of a PackedCase, and the memory that its Problem points to.
struct PackedBuilt {
  std::vector<Built> sequences;  // with gradients
  std::vector<Oracle> oracles;   // of these, if they were asked for
  PackedTensor query, key, value, output, lse, grad_output, grad_lse, grad_query, grad_key, grad_value;
  PackedTensor output_low;  // in some cases
  TestTensor slopes, relative_bias, grad_relative_bias, k_scale, v_scale, key_pages, value_pages, mask, grad_mask;
  std::vector<int32_t> cu_seq_q = {0}, table;
  std::vector<int64_t> cu_seq_k = {0}, used, seeds;
  Problem problem = {};
};

inline DType cache_dtype(const Case& c) { return c.cache == DType::none ? c.dtype : c.cache; }

// Copies the keys and values to pages of a pool, the last page first, with an unused page between any two.
// Pages before all windows are not in the table, as if a cache had let them go: page 0 is in their place.
inline void copy_to_pages(PackedBuilt& b, const PackedCase& c) {
  const int64_t size = c.page_size;
  int64_t most = 0, next = 0;
  for (const Lengths& n : c.lengths) most = max(most, ceil_div(n.key, size));
  const int64_t pool = 2 * most * int64_t(c.lengths.size()) + 1;
  b.table.assign(c.lengths.size() * size_t(most), -1);
  const bool aligned = c.common.order == MemoryOrder::aligned || c.common.order == MemoryOrder::aligned_blhd;
  const MemoryOrder order = aligned ? MemoryOrder::aligned_blhd : MemoryOrder::blhd;
  const auto copy = [&](TestTensor& pages, TestTensor Built::*tensor, int64_t cols) {
    pages = TestTensor(cache_dtype(c.common), {pool}, c.common.kv_heads, size, cols, order);
    std::vector<double> values(size_t(pages.count()), kNaN);
    next = pool - 2;
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      const std::vector<double> from = (b.sequences[s].*tensor).values();
      for (int64_t j = 0; j < c.lengths[s].key; ++j) {
        if (j % size == 0) b.table[s * size_t(most) + size_t(j / size)] = int32_t(next), next -= 2;
        const int64_t page = b.table[s * size_t(most) + size_t(j / size)];
        for (int64_t head = 0; head < c.common.kv_heads; ++head)
          for (int64_t d = 0; d < cols; ++d)
            values[size_t(((page * c.common.kv_heads + head) * size + j % size) * cols + d)] =
                from[size_t((head * c.lengths[s].key + j) * cols + d)];
      }
    }
    pages.set(values);
  };
  copy(b.key_pages, &Built::key, c.common.head_dim);
  copy(b.value_pages, &Built::value, c.common.value_dim);
  for (size_t s = 0; s < c.lengths.size(); ++s)
    std::fill_n(b.table.begin() + std::ptrdiff_t(s) * most,
                key_range(b.sequences[s].problem(), {0, c.lengths[s].query}).begin / size, 0);
  Problem& p = b.problem;
  p.key = b.key_pages.view(), p.value = b.value_pages.view();
  p.pages = {{b.table.data(), false}, most, most, pool, size, p.key.batch_stride[0], p.value.batch_stride[0]};
  p.key_length = min(p.key_length, most * size);
}

inline bool forward_only(const PackedCase& c) { return c.page_size > 0 || c.common.cache != DType::none; }

// A case that may save the low part of its output does so if its number of sequences is odd.
inline bool saves_output_low(const PackedCase& c) {
  return has_output_low(c.common.dtype) && !forward_only(c) && c.common.value_dim % 2 == 0 && c.lengths.size() % 2 == 1;
}

// Calls body(number in the mask of all sequences, number in the mask of sequence s) for each element that has a key.
template <class Body>
void for_each_mask_element(const PackedBuilt& b, size_t s, const Body& body) {
  const Case& c = b.sequences[s].c;
  const int64_t total = b.cu_seq_q.back(), first = b.cu_seq_q[s], rows = c.query_length, keys = c.key_length;
  const int64_t width = c.mask_columns;
  for (int64_t head = 0; head < b.mask.heads(); ++head)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t w = max<int64_t>(width - keys, 0); w < width; ++w)
        body(size_t((head * total + first + i) * width + w), size_t((head * rows + i) * keys + keys - width + w));
}

// Joins the masks of the sequences. Columns without a key have a number that would be noticed.
inline void join_masks(PackedBuilt& b, const Case& c) {
  if (c.mask == MaskKind::none) return;
  const bool boolean = c.mask == MaskKind::boolean;
  const Broadcast heads = {false, c.mask_broadcast.head};
  const DType dtype = b.sequences[0].attn_mask.dtype();
  const int64_t rows = b.cu_seq_q.back(), columns = c.mask_columns;
  b.mask = TestTensor(dtype, {}, c.heads, rows, columns, c.order, heads);
  std::vector<double> all(size_t(b.mask.count()), boolean ? 0 : kNaN);
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    const std::vector<double> own = b.sequences[s].attn_mask.values();
    for_each_mask_element(b, s, [&](size_t of_all, size_t of_own) { all[of_all] = own[of_own]; });
  }
  b.mask.set(all);
  b.problem.attn_mask = b.mask.view();
  if (!boolean) b.grad_mask = TestTensor(dtype, {}, c.heads, rows, columns, MemoryOrder::contiguous, heads);
}

// As the op does: kernels write the elements that have a key.
inline void clear_mask_gradient(PackedBuilt& b) {
  if (b.grad_mask.present()) b.grad_mask.set(std::vector<double>(size_t(b.grad_mask.count())));
}

constexpr int64_t kSeedStep = 10;  // from one seed's offset to the next one's

inline PackedBuilt build(const PackedCase& c, bool values = true) {
  PackedBuilt b;
  const int64_t share = int64_t(c.lengths.size()) / c.seeds;
  std::vector<int64_t> rows, room;
  for (const Lengths& n : c.lengths) {
    Case one = c.common;
    one.batch = {1}, one.query_length = n.query, one.key_length = n.key, one.seed = c.common.seed + b.sequences.size();
    const int64_t number = int64_t(b.sequences.size());
    one.dropout_offset = kSeedStep * (number / share) + number % share;
    b.sequences.push_back(build(one, values));
    add_gradients(b.sequences.back(), values);
    if (saves_output_low(c)) add_output_low(b.sequences.back());
    rows.push_back(n.query), room.push_back(n.key + c.unused), b.used.push_back(n.key);
    b.cu_seq_q.push_back(b.cu_seq_q.back() + int32_t(n.query));
    b.cu_seq_k.push_back(b.cu_seq_k.back() + room.back());
  }
  const Case& k = c.common;
  const DType of_lse = lse_dtype(k.dtype);
  const Broadcast no_columns = {false, false, false, true};
  b.query = {k.dtype, k.heads, rows, k.head_dim, k.order};
  b.key = {cache_dtype(k), k.kv_heads, room, k.head_dim, k.order};
  b.value = {cache_dtype(k), k.kv_heads, room, k.value_dim, k.order};
  const bool aligned = k.order == MemoryOrder::aligned || k.order == MemoryOrder::aligned_blhd;
  const MemoryOrder of_output = aligned ? MemoryOrder::aligned_blhd : MemoryOrder::blhd;
  b.output = {k.dtype, k.heads, rows, k.value_dim, of_output};
  b.lse = {of_lse, k.heads, rows, 1, MemoryOrder::contiguous, no_columns};
  if (saves_output_low(c)) b.output_low = {k.dtype, k.heads, rows, k.value_dim, of_output};
  b.grad_output = {k.dtype, k.heads, rows, k.value_dim, k.order};
  b.grad_lse = {of_lse, k.heads, rows, 1, MemoryOrder::contiguous, no_columns};
  b.grad_query = {k.dtype, k.heads, rows, k.head_dim, MemoryOrder::blhd};
  b.grad_key = {k.dtype, k.kv_heads, room, k.head_dim, MemoryOrder::blhd};
  b.grad_value = {k.dtype, k.kv_heads, room, k.value_dim, MemoryOrder::blhd};
  const int64_t count = int64_t(c.lengths.size());
  Problem& p = b.problem;
  p = b.sequences[0].problem();
  for (int64_t s = 0; s < c.seeds; ++s)
    b.seeds.insert(b.seeds.end(), {p.dropout_seed[0], p.dropout_seed[1] + s * kSeedStep});
  p.dropout_seed = b.seeds.data(), p.dropout_batch = share;
  if (k.alibi != AlibiKind::none) {
    b.slopes = TestTensor(of_lse, {count}, k.heads, 1, 1, MemoryOrder::padded, {false, false, true, true});
    std::vector<double> slopes;
    for (const Built& one : b.sequences)
      for (double slope : one.alibi_slopes.values()) slopes.push_back(slope);
    b.slopes.set(slopes);
  }
  if (k.relative != RelativeKind::none) {
    // Each sequence has its own bias. Their gradients are one if the kind has no batch dimension.
    Case all = k;
    all.batch = {count};
    const int64_t entries = k.relative_range.high - k.relative_range.low + 1;
    const bool one_head = k.relative == RelativeKind::shared;
    b.relative_bias = TestTensor(of_lse, {count}, k.heads, 1, entries, MemoryOrder::padded, {false, one_head, true});
    b.grad_relative_bias = relative_tensor(all, MemoryOrder::contiguous);
    std::vector<double> values;
    for (const Built& one : b.sequences)
      for (double x : one.relative_bias.values()) values.push_back(x);
    b.relative_bias.set(values);
  }
  const auto join_scales = [&](TestTensor& to, TestTensor Built::*scale) {
    if (k.cache == DType::none) return;
    to = TestTensor(DType::float32, {count}, k.kv_heads, 1, 1, MemoryOrder::padded, {false, false, true, true});
    std::vector<double> values;
    for (const Built& one : b.sequences)
      for (double x : (one.*scale).values()) values.push_back(x);
    to.set(values);
  };
  join_scales(b.k_scale, &Built::k_scale), join_scales(b.v_scale, &Built::v_scale);
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    Built& one = b.sequences[s];
    b.query.gather(s, one.query), b.key.gather(s, one.key), b.value.gather(s, one.value);
    b.grad_output.gather(s, one.grad_output), b.grad_lse.gather(s, one.grad_lse);
    p.query_length = max(p.query_length, one.c.query_length), p.key_length = max(p.key_length, one.c.key_length);
  }
  p.batch_dims = count > 1, p.batch_sizes[0] = p.batch = count;
  p.packed = {{b.cu_seq_q.data(), false},
              {b.cu_seq_k.data(), true},
              {},
              b.cu_seq_q.back(),
              b.cu_seq_k.back(),
              c.num_splits,
              c.common.mask_columns,
              k.lower_right};
  if (c.unused > 0 || c.page_size > 0) p.packed.seqused_k = {b.used.data(), true};
  p.query = b.query.tensor.view(), p.key = b.key.tensor.view(), p.value = b.value.tensor.view();
  p.alibi_slopes = b.slopes.view(), p.output = b.output.tensor.view(), p.lse = b.lse.tensor.view();
  p.output_low = b.output_low.tensor.view();
  p.relative_bias = b.relative_bias.view();
  p.k_scale = b.k_scale.view(), p.v_scale = b.v_scale.view();
  join_masks(b, k);
  p.grad_mask = {};
  p.grad_output = p.grad_lse = p.grad_query = p.grad_key = p.grad_value = p.grad_relative_bias = {};
  p.query.batch_stride[0] = p.key.batch_stride[0] = p.value.batch_stride[0] = 0;
  if (c.page_size > 0) p.packed.cu_seq_k = {}, copy_to_pages(b, c);
  return b;
}

// Calls body(tensor, writable) for all tensors of all sequences. Writable are those that the pass computes.
template <class Body>
void for_each_tensor(const PackedBuilt& b, bool backward, const Body& body) {
  for (const TestTensor* t :
       {&b.query.tensor, &b.key.tensor, &b.value.tensor, &b.slopes, &b.relative_bias, &b.k_scale, &b.v_scale,
        &b.key_pages, &b.value_pages, &b.mask, &b.grad_output.tensor, &b.grad_lse.tensor})
    body(*t, false);
  for (const TestTensor* t : {&b.output.tensor, &b.lse.tensor, &b.output_low.tensor}) body(*t, !backward);
  for (const TestTensor* t :
       {&b.grad_query.tensor, &b.grad_key.tensor, &b.grad_value.tensor, &b.grad_relative_bias, &b.grad_mask})
    body(*t, backward);
}

inline void expect_forward(PackedBuilt& b) {
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    SCOPED_TRACE("sequence " + std::to_string(s));
    Built& one = b.sequences[s];
    b.output.scatter(s, one.output), b.lse.scatter(s, one.lse);
    expect_forward(one, b.oracles[s]);
    if (!b.output_low.tensor.present()) continue;
    b.output_low.scatter(s, one.output_low);
    expect_output_low(one, b.oracles[s]);
  }
  EXPECT_TRUE(!b.output_low.tensor.present() || b.output_low.tensor.intact());
  EXPECT_TRUE(b.output.tensor.intact() && b.lse.tensor.intact());
}

inline void ask_for_gradients(PackedBuilt& b) {
  Problem& p = b.problem;
  p.grad_output = b.grad_output.tensor.view(), p.grad_lse = b.grad_lse.tensor.view();
  p.grad_query = b.grad_query.tensor.view(), p.grad_key = b.grad_key.tensor.view();
  p.grad_value = b.grad_value.tensor.view();
  p.grad_mask = b.grad_mask.view();
  clear_mask_gradient(b);
}

// Also fills in what the reference forward gives.
inline void prepare_backward(PackedBuilt& b) {
  ask_for_gradients(b);
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    run(kReferenceKernel, b.sequences[s], Pass::forward);
    b.output.gather(s, b.sequences[s].output), b.lse.gather(s, b.sequences[s].lse);
    if (b.output_low.tensor.present()) b.output_low.gather(s, b.sequences[s].output_low);
  }
}

inline void expect_mask_gradient(const PackedBuilt& b) {
  if (!b.grad_mask.present()) return;
  const std::vector<double> found = b.grad_mask.values();
  std::vector<double> wanted(found.size()), limits(found.size());
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    const Oracle& oracle = b.oracles[s];
    const std::vector<double> own = oracle.backward.grad_mask.values();
    for_each_mask_element(
        b, s, [&](size_t k, size_t of_own) { wanted[k] = own[of_own], limits[k] = oracle.limits.grad_mask[of_own]; });
  }
  EXPECT_TRUE(b.grad_mask.intact());
  EXPECT_EQ(worst_of(found, wanted, b.grad_mask.dtype(), limits).wrong, size_t(0));
}

inline void expect_backward(PackedBuilt& b) {
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    SCOPED_TRACE("sequence " + std::to_string(s));
    Built& one = b.sequences[s];
    b.grad_query.scatter(s, one.grad_query), b.grad_key.scatter(s, one.grad_key);
    b.grad_value.scatter(s, one.grad_value);
    expect_close("grad_query", one.grad_query, b.oracles[s].backward.grad_query, b.oracles[s].limits.grad_query);
    expect_close("grad_key", one.grad_key, b.oracles[s].backward.grad_key, b.oracles[s].limits.grad_key);
    expect_close("grad_value", one.grad_value, b.oracles[s].backward.grad_value, b.oracles[s].limits.grad_value);
  }
  EXPECT_TRUE(b.grad_query.tensor.intact() && b.grad_key.tensor.intact() && b.grad_value.tensor.intact());
  expect_mask_gradient(b);
}

// Few rows of several query heads that share their keys, of which each row is a multiple of 16 bytes.
inline void decode_aligned(PackedCase& c) {
  c.common.heads = 8, c.common.kv_heads = 2, c.common.head_dim = c.common.value_dim = 128, c.common.causal = true;
  c.common.order = MemoryOrder::aligned;
}
// The heads of a KV group take two tiles.
inline void decode_17_heads(PackedCase& c) {
  c.common.heads = 34, c.common.kv_heads = 2, c.common.head_dim = c.common.value_dim = 64;
  c.common.order = MemoryOrder::aligned;
}

// Quantised keys and values, in every dtype of queries.
inline void add_quantised(std::vector<PackedCase>& cases, const std::vector<Lengths>& uneven,
                          const std::vector<Lengths>& decode) {
  for (DType cache : kCaches)
    for (DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      const auto add = [&](const char* name, const std::vector<Lengths>& lengths, const auto& change) {
        PackedCase c;
        c.name = std::string(name) + "_" + dtype_name(cache) + "_" + dtype_name(dtype);
        c.common.dtype = dtype, c.common.cache = cache, c.common.lower_right = true, c.lengths = lengths;
        change(c);
        cases.push_back(c);
      };
      add("quantised", uneven, [](PackedCase& c) { c.common.causal = true, c.unused = 7; });
      add("quantised_split", decode, [](PackedCase& c) { c.common.heads = 8; });
      add("quantised_aligned", uneven,
          [](PackedCase& c) { c.common.order = MemoryOrder::aligned, c.common.head_dim = c.common.value_dim = 64; });
      add("quantised_everything", uneven, [](PackedCase& c) {
        c.common.heads = 4, c.common.causal = true, c.common.window_left = 40, c.common.softcap = 3;
        c.common.alibi = AlibiKind::batch_heads, c.common.dropout_p = 0.2, c.common.head_dim = 33;
        c.common.value_dim = 140, c.common.relative = RelativeKind::batch_heads;
      });
      add("quantised_inner2", uneven, [](PackedCase& c) { c.common.order = MemoryOrder::inner2; });
      add("quantised_empty", {{0, 20}, {20, 0}, {66, 70}}, [](PackedCase&) {});
      add("quantised_tree", uneven, [](PackedCase& c) {
        c.common.heads = 4, c.common.mask = MaskKind::boolean, c.common.mask_columns = 40, c.common.empty_rows = true;
      });
      add("quantised_pages_of_16", uneven, [](PackedCase& c) { c.page_size = 16, c.common.causal = true; });
      add("quantised_pages_of_5", decode, [](PackedCase& c) { c.page_size = 5, c.common.heads = 4; });
      add("quantised_pages_of_256", decode, [](PackedCase& c) {
        c.page_size = 256, c.common.order = MemoryOrder::aligned, c.common.head_dim = c.common.value_dim = 64;
      });
      add("quantised_decode", {{1, 1100}, {0, 40}, {4, 523}, {3, 0}}, [cache](PackedCase& c) {
        decode_aligned(c), c.common.window_left = 800, c.common.nan_in_masked = cache != DType::int8;
      });
      add("quantised_decode_17_heads", {{1, 530}, {1, 33}}, decode_17_heads);
      add("quantised_decode_32_rows", {{8, 530}, {3, 33}}, [](PackedCase& c) { decode_aligned(c), c.page_size = 32; });
      add("quantised_decode_pages", decode, [](PackedCase& c) { decode_aligned(c), c.page_size = 16; });
      add("quantised_decode_pages_window", {{1, 1100}, {4, 523}},
          [](PackedCase& c) { decode_aligned(c), c.page_size = 8, c.common.window_left = 300; });
      add("quantised_decode_panels", decode, [](PackedCase& c) {
        decode_aligned(c), c.common.head_dim = 208, c.common.value_dim = 144, c.common.dropout_p = 0.2;
      });
      add("quantised_decode_masked", decode, [cache](PackedCase& c) {
        decode_aligned(c), c.common.head_dim = c.common.value_dim = 48, c.common.mask = MaskKind::boolean;
        c.common.mask_columns = 50, c.common.nan_in_masked = c.common.inf_in_live_key = cache == DType::float8_e5m2;
      });
    }
}

inline std::vector<PackedCase> packed_cases() {
  const std::vector<Lengths> uneven = {{37, 53}, {3, 140}, {70, 70}}, decode = {{1, 70}, {2, 1100}, {1, 33}};
  std::vector<PackedCase> result;
  add_quantised(result, uneven, decode);
  for (DType dtype : kDTypes) {
    const auto add = [&](const char* name, const std::vector<Lengths>& lengths, const auto& change) {
      PackedCase c;
      c.name = std::string(name) + "_" + dtype_name(dtype);
      c.common.dtype = dtype, c.common.lower_right = true;
      c.lengths = lengths;
      change(c);
      result.push_back(c);
    };
    add("plain", uneven, [](PackedCase&) {});
    add("causal_aligned", uneven, [](PackedCase& c) {
      c.common.causal = true, c.common.order = MemoryOrder::aligned, c.common.head_dim = c.common.value_dim = 64;
    });
    add("everything", uneven, [](PackedCase& c) {
      c.common.heads = 4, c.common.causal = true, c.common.window_left = 40, c.common.softcap = 3;
      c.common.alibi = AlibiKind::batch_heads, c.common.dropout_p = 0.2, c.common.head_dim = 33;
      c.common.value_dim = 140, c.common.lower_right = false;
    });
    add("relative", uneven, [](PackedCase& c) {
      c.common.heads = 4, c.common.relative = RelativeKind::batch_heads, c.common.relative_range = {-20, 60};
    });
    add("relative_summed", uneven, [](PackedCase& c) {
      c.common.relative = RelativeKind::heads, c.common.relative_range = {-9, 9}, c.common.causal = true;
      c.common.dropout_p = 0.1, c.common.softcap = 3;
    });
    add("relative_empty", {{0, 20}, {20, 0}, {66, 70}},
        [](PackedCase& c) { c.common.relative = RelativeKind::shared, c.common.lower_right = false; });
    add("empty", {{0, 20}, {20, 0}, {0, 0}, {66, 70}}, [](PackedCase& c) { c.common.causal = true; });
    add("unused", uneven, [](PackedCase& c) { c.unused = 30, c.common.causal = true; });
    add("split", decode, [](PackedCase& c) { c.common.heads = 4, c.common.dropout_p = 0.1; });
    add("seeds", {{37, 53}, {3, 140}, {70, 70}, {5, 9}},
        [](PackedCase& c) { c.seeds = 2, c.common.dropout_p = 0.3, c.common.causal = true; });
    add("one_split", decode, [](PackedCase& c) { c.num_splits = 1; });
    add("tree", uneven, [](PackedCase& c) {
      c.common.mask = MaskKind::boolean, c.common.mask_broadcast.head = true, c.common.mask_columns = 60;
      c.common.empty_rows = true, c.common.heads = 4, c.common.kv_heads = 2;
    });
    add("tree_bias", uneven, [](PackedCase& c) {
      c.common.mask = MaskKind::additive_with_inf, c.common.mask_columns = 60, c.common.empty_rows = true;
      c.common.causal = true, c.common.softcap = 3, c.common.dropout_p = 0.1, c.common.alibi = AlibiKind::batch_heads;
    });
    add("tree_bias_of_1_column", uneven,
        [](PackedCase& c) { c.common.mask = MaskKind::additive, c.common.mask_columns = 1, c.unused = 5; });
    add("tree_bias_empty", {{0, 20}, {20, 0}, {0, 0}, {66, 70}},
        [](PackedCase& c) { c.common.mask = MaskKind::additive, c.common.mask_columns = 90; });
    add("tree_of_all_heads", uneven, [](PackedCase& c) {
      c.common.mask = MaskKind::additive, c.common.mask_broadcast.head = true, c.common.mask_columns = 60;
      c.common.heads = 4, c.common.kv_heads = 2;
    });
    add("tree_split", decode, [](PackedCase& c) {
      c.common.heads = 4, c.common.mask = MaskKind::additive, c.common.mask_dtype = DType::float32;
      c.common.mask_columns = 40;
    });
    add("tree_pages_of_5", decode, [](PackedCase& c) {
      c.page_size = 5, c.common.heads = 4, c.common.mask = MaskKind::boolean, c.common.mask_columns = 9;
    });
    add("pages_of_16", uneven, [](PackedCase& c) { c.page_size = 16, c.common.causal = true; });
    add("pages_of_5", decode, [](PackedCase& c) {
      c.page_size = 5, c.common.heads = 4, c.common.alibi = AlibiKind::batch_heads, c.common.window_left = 900;
      c.common.relative = RelativeKind::batch_heads;
    });
    add("pages_of_256", decode, [](PackedCase& c) {
      c.page_size = 256, c.common.order = MemoryOrder::aligned, c.common.head_dim = c.common.value_dim = 64;
    });
    add("decode", {{1, 1100}, {0, 40}, {4, 523}, {3, 0}},
        [](PackedCase& c) { decode_aligned(c), c.common.window_left = 800, c.common.nan_in_masked = true; });
    add("decode_17_heads", {{1, 530}, {1, 33}}, decode_17_heads);
    add("decode_32_rows", {{8, 530}, {3, 33}}, [](PackedCase& c) { decode_aligned(c), c.page_size = 32; });
    add("decode_pages", decode, [](PackedCase& c) { decode_aligned(c), c.page_size = 16, c.common.head_dim = 80; });
    add("decode_pages_window", {{1, 1100}, {4, 523}},
        [](PackedCase& c) { decode_aligned(c), c.page_size = 16, c.common.window_left = 300; });
    add("decode_pages_of_5", decode, [](PackedCase& c) {
      decode_aligned(c), c.page_size = 5, c.common.head_dim = c.common.value_dim = 64, c.unused = 3;
      c.common.mask = MaskKind::additive_with_inf, c.common.mask_columns = 50, c.common.nan_in_masked = true;
    });
  }
  return result;
}

}  // namespace scaledot::testing
