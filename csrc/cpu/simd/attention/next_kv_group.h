// Prefetches the KV group that a worker has next, if KV groups are short.
//
// A short KV group is a page or a few of each tensor. The CPU's own prefetchers stop at the end of a page, so each KV
// group would begin by waiting for memory. Asked for one KV group ahead, its rows arrive while the worker computes. The
// rows of the results are prefetched as well: a store to a line that is not cached waits for it.
#pragma once

#include "core/saved.h"
#include "cpu/simd/attention/mask_gradient.h"
#include "cpu/simd/tiling.h"

namespace scaledot {
namespace {

inline bool is_short_kv_group(const Problem& p) {
  const int64_t query_rows = p.heads / p.kv_heads * p.query_length, size = element_size(p.dtype);
  const int64_t bytes = (query_rows + p.key_length) * (p.head_dim + p.value_dim) * size;
  const int64_t saved = saves_softmax(p) ? query_rows * p.saved_keys * element_size(p.saved_softmax.dtype) : 0;
  return bytes + saved <= kShortKvGroupBytes && !is_paged(p);
}

// Rows of some heads, into the second-level cache: the first has no room for a second KV group. Always inlined: gcc 12
// drops calls of a function that only prefetches.
SCALEDOT_INLINE void prefetch_heads(const Problem& p, const TensorView& view, int64_t batch, Range heads, int64_t rows,
                                    int64_t cols) {
  if (!view.data || view.col_stride != 1) return;
  const int64_t size = element_size(view.dtype);
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    const char* const from = static_cast<const char*>(view.data) + size * offset(p, view, batch, head);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t byte = 0; byte < cols * size; byte += kCacheLine)
        __builtin_prefetch(from + size * row * view.row_stride + byte, 0, 2);
  }
}

// Prefetches all that a pass reads and writes for a KV group, except masks.
SCALEDOT_INLINE void prefetch_kv_group(const Problem& p, Pass pass, int64_t kv_group) {
  if (kv_group >= p.batch * p.kv_heads || !is_short_kv_group(p)) return;
  const int64_t batch = kv_group / p.kv_heads, kv_head = kv_group % p.kv_heads, group = p.heads / p.kv_heads;
  const Range kv_heads = {kv_head, kv_head + 1}, heads = {kv_head * group, (kv_head + 1) * group};
  prefetch_heads(p, p.key, batch, kv_heads, p.key_length, p.head_dim);
  prefetch_heads(p, p.value, batch, kv_heads, p.key_length, p.value_dim);
  prefetch_heads(p, p.query, batch, heads, p.query_length, p.head_dim);
  prefetch_heads(p, p.saved_softmax, batch, heads, p.query_length, p.saved_keys);
  if (pass == Pass::forward) {
    prefetch_heads(p, p.output, batch, heads, p.query_length, p.value_dim);
    return;
  }
  prefetch_heads(p, p.grad_output, batch, heads, p.query_length, p.value_dim);
  prefetch_heads(p, p.grad_query, batch, heads, p.query_length, p.head_dim);
  prefetch_heads(p, p.grad_key, batch, kv_heads, p.key_length, p.head_dim);
  prefetch_heads(p, p.grad_value, batch, kv_heads, p.key_length, p.value_dim);
}

// The KV group that a worker of the backward probably has after this one. Workers claim tasks in turn.
inline int64_t next_kv_group(const Problem& p, int64_t kv_group, int workers) {
  if (kv_groups_are_classes(p)) return kv_group + workers;
  return kv_group + (p.grad_mask.head_stride ? p.kv_heads : 1);  // of the same class
}

}  // namespace
}  // namespace scaledot
