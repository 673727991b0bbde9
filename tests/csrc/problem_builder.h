// From a Case (a named attention problem, with the fields of tests/library/cases.py) to a Problem and its tensors.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "core/saved.h"
#include "random.h"
#include "red_zones.h"

namespace scaledot::testing {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNaN = __builtin_bit_cast(double, ~uint64_t(0));  // every payload bit set

enum class MaskKind { none, boolean, additive, additive_with_inf };
enum class AlibiKind { none, heads, batch_heads };
enum class RelativeKind { none, shared, heads, batch_heads };

struct Case {
  std::string name;
  std::vector<int64_t> batch = {2};
  int64_t heads = 2, kv_heads = 2, query_length = 37, key_length = 53, head_dim = 20, value_dim = 20;
  DType dtype = DType::float32;
  DType cache = DType::none;  // of quantised keys and values, which have a scale a batch entry and head; forward only
  std::vector<double> scales = {0.03, -0.2, 1.5};  // of keys, in turn; those of values are twice that

  bool lower_right = false, causal = false;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  double scale = 0, softcap = 0, masked_score = -kInfinity, dropout_p = 0;  // scale 0: 1 / sqrt(head_dim)
  int64_t dropout_offset = 0;
  int64_t dropout_seeds = 1;  // (seed, offset) pairs; divides the batch

  MaskKind mask = MaskKind::none;
  DType mask_dtype = DType::none;  // none: the dtype of the case
  Broadcast mask_broadcast;
  int64_t mask_columns = 0;      // above 0: only the last ones affect a score, as in the mask of packed sequences
  double mask_offset = 0;        // added to a floating mask
  double mask_low = -kInfinity;  // of additive_with_inf, for a masked key
  bool empty_rows = false;       // the mask excludes all keys of every third row
  AlibiKind alibi = AlibiKind::none;
  RelativeKind relative = RelativeKind::none;
  DistanceRange relative_range = {-12, 12};
  double relative_low = 0;                 // -inf: every third entry of relative_bias is that, but for distance 0
  int64_t block_rows = 0, block_keys = 0;  // 0: no block mask
  Broadcast block_broadcast;               // of batch and head

  Part part = {};
  bool return_weights = false;
  bool average_weights = false;                                   // over the heads; forward only
  bool grad_output = true, grad_lse = true, grad_weights = true;  // which returned results have a gradient
  bool wants_query = true, wants_key = true, wants_value = true;  // which gradients are requested
  MemoryOrder order = MemoryOrder::padded;
  Broadcast key_broadcast;  // expanded keys and values
  double spread = 1;        // of the queries
  // NaN in keys (and values, queries) that no row attends to (and in rows without keys), or in live ones.
  bool inf_in_live_key = false, nan_in_masked = false, nan_in_live_key = false, nan_in_live_value = false,
       nan_in_live_query = false;
  uint64_t seed = 1;
};

inline void PrintTo(const Case& c, std::ostream* stream) { *stream << c.name; }

// A Case's Problem and its memory. Absent tensors are not present().
struct Built {
  Case c;
  TestTensor query, key, value, k_scale, v_scale, attn_mask, alibi_slopes, relative_bias, output, lse, weights;
  TestTensor grad_output, grad_lse, grad_weights, grad_query, grad_key, grad_value, grad_mask, grad_relative_bias;
  TestTensor saved_softmax, output_low;
  int64_t saved_keys = 0;
  bool reuse_returned = false;  // as the saved softmax
  std::vector<int64_t> dropout_seed;
  std::vector<int32_t> blocks;        // the numbers, row-major
  std::vector<uint64_t> block_words;  // the bits
  TensorView block_view = {};

  Problem problem() const {
    Problem p = {};
    p.batch_dims = int32_t(c.batch.size());
    p.batch = 1;
    for (size_t d = 0; d < c.batch.size(); ++d) p.batch *= p.batch_sizes[d] = c.batch[d];
    p.heads = c.heads, p.kv_heads = c.kv_heads, p.query_length = c.query_length, p.key_length = c.key_length;
    p.head_dim = c.head_dim, p.value_dim = c.value_dim;
    p.dtype = query.dtype();
    p.scale = c.scale != 0 ? c.scale : 1 / std::sqrt(double(max<int64_t>(c.head_dim, 1)));
    p.softcap = c.softcap, p.masked_score = c.masked_score, p.dropout_p = c.dropout_p;
    p.position.diagonal = c.lower_right ? c.key_length - c.query_length : 0;
    p.position.window_left = c.window_left;
    p.position.window_right = c.causal ? min<int64_t>(c.window_right, 0) : c.window_right;
    p.part = c.part;
    p.dropout_seed = dropout_seed.data();
    if (c.dropout_seeds > 1) p.dropout_batch = p.batch / c.dropout_seeds;
    p.dropout_offset = c.dropout_offset;
    p.query = query.view(), p.key = key.view(), p.value = value.view();
    p.k_scale = k_scale.view(), p.v_scale = v_scale.view();
    p.attn_mask = attn_mask.view(), p.alibi_slopes = alibi_slopes.view();
    p.output = output.view(), p.lse = lse.view(), p.weights = weights.view();
    p.grad_output = grad_output.view(), p.grad_lse = grad_lse.view(), p.grad_weights = grad_weights.view();
    p.grad_query = grad_query.view(), p.grad_key = grad_key.view(), p.grad_value = grad_value.view();
    p.grad_mask = grad_mask.view();
    p.saved_softmax = saved_softmax.view(), p.saved_keys = saved_keys, p.output_low = output_low.view();
    if (reuse_returned) use_returned_weights(p);
    p.relative_range = c.relative_range;
    p.relative_bias = relative_bias.view(), p.grad_relative_bias = grad_relative_bias.view();
    if (!blocks.empty()) {
      p.blocks = block_view;
      p.blocks.data = const_cast<int32_t*>(blocks.data());
      p.block_rows = c.block_rows, p.block_keys = c.block_keys;
      p.block_bits.words = block_words.data();
      p.block_bits.count = int64_t(block_words.size()) / (c.block_rows * ceil_div(c.block_keys, 64));
    }
    return p;
  }
};

// Calls body(tensor, writable) for all tensors of a case. Writable are those that the pass computes.
template <class Body>
void for_each_tensor(const Built& b, bool backward, const Body& body) {
  for (const TestTensor* t :
       {&b.query, &b.key, &b.value, &b.k_scale, &b.v_scale, &b.attn_mask, &b.alibi_slopes, &b.relative_bias})
    body(*t, false);
  for (const TestTensor* t : {&b.output, &b.lse, &b.weights, &b.saved_softmax, &b.output_low}) body(*t, !backward);
  for (const TestTensor* t : {&b.grad_output, &b.grad_lse, &b.grad_weights}) body(*t, false);
  for (const TestTensor* t : {&b.grad_query, &b.grad_key, &b.grad_value, &b.grad_mask, &b.grad_relative_bias})
    body(*t, backward);
}

inline void add_tensors(RedZones& zones, const Built& b) {
  for_each_tensor(b, false, [&](const TestTensor& t, bool) { zones.add(t); });
}

inline DType lse_dtype(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

// Mask values: 1 or 0 for a boolean mask.
inline std::vector<double> mask_values(const Case& c, const TestTensor& mask, Random& random) {
  std::vector<double> values(static_cast<size_t>(mask.count()));
  for (size_t k = 0; k < values.size(); ++k) {
    const int64_t row = int64_t(k) / mask.cols() % mask.rows();
    const bool attends = random.uniform() < 0.7 && !(c.empty_rows && row % 3 == 0);
    const double bias = random.normal() + c.mask_offset;
    switch (c.mask) {
      case MaskKind::boolean: values[k] = attends; break;
      case MaskKind::additive_with_inf: values[k] = attends ? bias : c.mask_low; break;
      default: values[k] = bias;
    }
    const bool before = c.mask_columns > 0 && int64_t(k) % mask.cols() < mask.cols() - c.mask_columns;
    if (before) values[k] = c.mask == MaskKind::boolean;
  }
  return values;
}

// Whether row i of (batch, head) attends to key j, from the plain definition.
inline bool sees(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t j) {
  if (!attends(p, i, j)) return false;
  if (p.blocks.data) {
    const int64_t m = i / p.block_rows, n = j / p.block_keys, k = j % p.block_keys;
    const int32_t number = static_cast<const int32_t*>(
        p.blocks.data)[offset(p, p.blocks, batch, head) + m * p.blocks.row_stride + n * p.blocks.col_stride];
    const int64_t row = number * p.block_rows + i % p.block_rows, words = (p.block_keys + 63) / 64;
    const bool shown = number >= 0 && p.block_bits.words[row * words + k / 64] >> (k % 64) & 1;
    if (!shown && number != kFullBlock) return false;
  }
  double bias = 0;
  if (p.relative_bias.data) add_relative_bias(p, batch, head, j - i - p.position.diagonal, 1, &bias);
  const bool biased = bias != -kInfinity;
  if (!p.attn_mask.data) return biased;
  const TensorView& m = p.attn_mask;
  const double x =
      load_element<double>(m.data, m.dtype, offset(p, m, batch, head) + i * m.row_stride + j * m.col_stride);
  if (m.dtype == DType::boolean && x == 0) return p.masked_score != -kInfinity;
  return biased && x != -kInfinity;
}

// A block mask of empty, full and partial blocks, each third at random. Bits past the last row or key are random too.
inline void add_blocks(Built& b) {
  const Case& c = b.c;
  Random random(c.seed + 500);
  const int64_t down = ceil_div(c.query_length, c.block_rows), across = ceil_div(c.key_length, c.block_keys);
  int64_t step = down * across;
  b.block_view.row_stride = across, b.block_view.col_stride = 1;
  const auto lay = [&step](int64_t& stride, int64_t size, bool broadcast) {
    stride = broadcast ? 0 : step;
    if (!broadcast) step *= size;
  };
  lay(b.block_view.head_stride, c.heads, c.block_broadcast.head);
  for (int d = int(c.batch.size()) - 1; d >= 0; --d)
    lay(b.block_view.batch_stride[d], c.batch[size_t(d)], c.block_broadcast.batch);
  const int64_t words = c.block_rows * ceil_div(c.block_keys, 64);
  int32_t partial = 0;
  for (int64_t k = 0; k < max<int64_t>(step, 1); ++k) {
    const uint64_t kind = random.bits() % 3;
    b.blocks.push_back(kind == 0 ? kEmptyBlock : kind == 1 ? kFullBlock : partial++);
    for (int64_t w = 0; kind == 2 && w < words; ++w) b.block_words.push_back(random.bits() | random.bits());
  }
}

// Puts NaN where the case has it.
inline void place_nans(Built& b) {
  const Case& c = b.c;
  const Problem p = b.problem();
  if (c.key_broadcast.batch || c.key_broadcast.head || p.batch * p.heads * p.query_length * p.key_length == 0) return;
  const bool any =
      c.nan_in_masked || c.inf_in_live_key || c.nan_in_live_key || c.nan_in_live_value || c.nan_in_live_query;
  if (!any) return;
  std::vector<double> query = b.query.values(), key = b.key.values(), value = b.value.values();
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t batch = 0; batch < p.batch && c.nan_in_masked; ++batch) {
    for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head)
      for (int64_t j = 0; j < p.key_length; ++j) {
        bool seen = false;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
          for (int64_t i = 0; i < p.query_length; ++i) seen |= sees(p, batch, head, i, j);
        if (seen) continue;
        const int64_t row = (batch * p.kv_heads + kv_head) * p.key_length + j;
        for (int64_t d = 0; d < p.head_dim; ++d) key[size_t(row * p.head_dim + d)] = d % 2 ? kInfinity : kNaN;
        for (int64_t d = 0; d < p.value_dim; ++d) value[size_t(row * p.value_dim + d)] = d % 2 ? -kInfinity : kNaN;
      }
    for (int64_t head = 0; head < p.heads; ++head)
      for (int64_t i = 0; i < p.query_length; ++i) {
        bool sees_any = false;
        for (int64_t j = 0; j < p.key_length; ++j) sees_any |= sees(p, batch, head, i, j);
        const int64_t row = (batch * p.heads + head) * p.query_length + i;
        for (int64_t d = 0; d < p.head_dim && !sees_any; ++d) query[size_t(row * p.head_dim + d)] = kNaN;
      }
  }
  if (c.inf_in_live_key) key[size_t(p.key_length / 3 * p.head_dim)] = kInfinity;
  if (c.nan_in_live_key) key[size_t(p.key_length / 2 * p.head_dim)] = kNaN;
  if (c.nan_in_live_value) value[size_t(p.key_length / 2 * p.value_dim)] = kNaN;
  if (c.nan_in_live_query) query[size_t(p.query_length / 2 * p.head_dim)] = kNaN;
  b.query.set(query), b.key.set(key), b.value.set(value);
}

// relative_bias, or its gradient.
inline TestTensor relative_tensor(const Case& c, MemoryOrder order) {
  const int64_t entries = c.relative_range.high - c.relative_range.low + 1;
  return TestTensor(lse_dtype(c.dtype), c.batch, c.heads, 1, entries, order,
                    {c.relative != RelativeKind::batch_heads, c.relative == RelativeKind::shared, true, false});
}

// Scales of KV groups, which have one for each key or value in memory.
inline void add_scales(Built& b) {
  const Case& c = b.c;
  const auto add = [&](TestTensor& t, double factor) {
    t = TestTensor(DType::float32, c.batch, c.kv_heads, 1, 1, MemoryOrder::padded, {false, false, true, true});
    std::vector<double> values(size_t(t.count()));
    for (size_t k = 0; k < values.size(); ++k) values[k] = factor * c.scales[(k + c.seed) % c.scales.size()];
    t.set(values);
  };
  const double unit = c.cache == DType::int8 ? 0.1 : 1;  // whose stored numbers are ten times as large
  add(b.k_scale, unit), add(b.v_scale, 2 * unit);
}

// Stored numbers of keys or values times their scale.
inline std::vector<double> dequantised(const TestTensor& stored, const TestTensor& scale) {
  std::vector<double> values = stored.values();
  const std::vector<double> scales = scale.values();
  const size_t each = scales.empty() ? 1 : values.size() / scales.size();
  for (size_t k = 0; k < values.size() && !scales.empty(); ++k) values[k] *= scales[k / each];
  return values;
}

// The inputs and empty results of a case. Without `values` its tensors hold NaN, which is enough for `why_not`.
inline Built build(const Case& c, bool values = true) {
  Built b;
  b.c = c;
  for (int64_t k = 0; k < c.dropout_seeds; ++k)
    b.dropout_seed.insert(b.dropout_seed.end(), {0x1234567890abcdef + k, 3});
  Random random(c.seed);
  const auto filled = [&](TestTensor& t, TestTensor made, double spread = 1) {
    t = std::move(made);
    if (values) t.set(random.normals(t.count(), spread));
  };
  const int64_t lq = c.query_length, lk = c.key_length;
  filled(b.query, TestTensor(c.dtype, c.batch, c.heads, lq, c.head_dim, c.order), c.spread);
  const bool quantised = c.cache != DType::none;
  const DType cache = quantised ? c.cache : c.dtype;
  const double stored = c.cache == DType::int8 ? 40 : quantised ? 4 : 1;  // uses many of the numbers
  filled(b.key, TestTensor(cache, c.batch, c.kv_heads, lk, c.head_dim, c.order, c.key_broadcast), stored);
  filled(b.value, TestTensor(cache, c.batch, c.kv_heads, lk, c.value_dim, c.order, c.key_broadcast), stored);
  if (quantised) add_scales(b);
  if (c.mask != MaskKind::none) {
    const DType dtype = c.mask == MaskKind::boolean   ? DType::boolean
                        : c.mask_dtype == DType::none ? c.dtype
                                                      : c.mask_dtype;
    b.attn_mask = TestTensor(dtype, c.batch, c.heads, lq, lk, c.order, c.mask_broadcast);
    if (values) b.attn_mask.set(mask_values(c, b.attn_mask, random));
  }
  if (c.alibi != AlibiKind::none) {
    b.alibi_slopes = TestTensor(lse_dtype(c.dtype), c.batch, c.heads, 1, 1, MemoryOrder::padded,
                                {c.alibi == AlibiKind::heads, false, true, true});
    std::vector<double> slopes(static_cast<size_t>(b.alibi_slopes.count()));
    for (double& slope : slopes) slope = random.uniform() * 0.2;
    b.alibi_slopes.set(slopes);
  }
  if (c.relative != RelativeKind::none) {
    b.relative_bias = relative_tensor(c, MemoryOrder::padded);
    std::vector<double> entries = random.normals(b.relative_bias.count());
    for (size_t k = 0; k < entries.size() && c.relative_low != 0; k += 3)
      if (int64_t(k) % b.relative_bias.cols() != -c.relative_range.low) entries[k] = c.relative_low;
    b.relative_bias.set(entries);
  }
  if (c.block_rows > 0) add_blocks(b);
  if (values) place_nans(b);
  const bool aligned = c.order == MemoryOrder::aligned || c.order == MemoryOrder::aligned_blhd;
  b.output =
      TestTensor(c.dtype, c.batch, c.heads, lq, c.value_dim, aligned ? MemoryOrder::aligned_blhd : MemoryOrder::blhd);
  b.lse = TestTensor(lse_dtype(c.dtype), c.batch, c.heads, lq, 1, MemoryOrder::contiguous, {false, false, false, true});
  if (c.return_weights)
    b.weights = TestTensor(c.dtype, c.batch, c.heads, lq, lk, MemoryOrder::contiguous,
                           {false, c.average_weights, false, false});
  return b;
}

// Adds the memory for the weights of the first `keys` keys.
inline void add_saved_softmax(Built& b, int64_t keys) {
  const Case& c = b.c;
  b.saved_keys = keys;
  b.saved_softmax = TestTensor(lse_dtype(c.dtype), c.batch, c.heads, c.query_length, saved_columns(keys));
}

// Adds the memory for what rounding takes off the output.
inline void add_output_low(Built& b) {
  const Case& c = b.c;
  b.output_low = TestTensor(c.dtype, c.batch, c.heads, c.query_length, c.value_dim);
}

// Adds the tensors of the backward. grad_mask is contiguous, as the op allocates it.
inline void add_gradients(Built& b, bool values = true) {
  const Case& c = b.c;
  Random random(c.seed + 1000);
  const auto filled = [&](TestTensor& t, TestTensor made) {
    t = std::move(made);
    if (values) t.set(random.normals(t.count()));
  };
  const int64_t lq = c.query_length, lk = c.key_length;
  if (c.grad_output) filled(b.grad_output, TestTensor(c.dtype, c.batch, c.heads, lq, c.value_dim, c.order));
  if (c.grad_lse)
    filled(b.grad_lse, TestTensor(lse_dtype(c.dtype), c.batch, c.heads, lq, 1, c.order, {false, false, false, true}));
  if (c.grad_weights && c.return_weights)
    filled(b.grad_weights, TestTensor(c.dtype, c.batch, c.heads, lq, lk, c.order));
  if (c.wants_query) b.grad_query = TestTensor(c.dtype, c.batch, c.heads, lq, c.head_dim, MemoryOrder::blhd);
  if (c.wants_key) b.grad_key = TestTensor(c.dtype, c.batch, c.kv_heads, lk, c.head_dim);
  if (c.wants_value) b.grad_value = TestTensor(c.dtype, c.batch, c.kv_heads, lk, c.value_dim, MemoryOrder::blhd);
  if (c.mask == MaskKind::additive || c.mask == MaskKind::additive_with_inf)
    b.grad_mask = TestTensor(b.attn_mask.dtype(), c.batch, c.heads, lq, lk, MemoryOrder::contiguous, c.mask_broadcast);
  if (c.relative != RelativeKind::none) b.grad_relative_bias = relative_tensor(c, MemoryOrder::contiguous);
}

// The problem in float64: every present tensor, with the values as its dtype stores them. Weights are those of
// each head.
inline Built widened(const Built& b) {
  Built wide = b;
  Case& c = wide.c;
  c.average_weights = false;
  c.dtype = DType::float64;
  c.cache = DType::none;
  c.mask_dtype = DType::float64;
  for (TestTensor* t : {&wide.query, &wide.key, &wide.value, &wide.alibi_slopes, &wide.relative_bias, &wide.output,
                        &wide.lse, &wide.grad_output, &wide.grad_lse, &wide.grad_weights, &wide.grad_query,
                        &wide.grad_key, &wide.grad_value, &wide.grad_mask, &wide.grad_relative_bias})
    *t = t->as_float64();
  if (c.mask != MaskKind::boolean) wide.attn_mask = wide.attn_mask.as_float64();
  if (c.return_weights) wide.weights = TestTensor(DType::float64, c.batch, c.heads, c.query_length, c.key_length);
  wide.key.set(dequantised(b.key, b.k_scale)), wide.value.set(dequantised(b.value, b.v_scale));
  wide.k_scale = wide.v_scale = wide.output_low = {};
  return wide;
}

}  // namespace scaledot::testing
