// The gradient of a floating mask: dMask = dS, summed over everything that the mask is broadcast along.
//
// If the mask is not broadcast, its rows are stored as they are computed. Otherwise they are summed in a buffer of the
// compute type, in a fixed order: every element of the buffer belongs to one task of the backward (backward.h), and
// that task visits the KV groups that share the mask in order. If the mask is broadcast along the keys,
// each task has a column in the buffer, and the columns are summed at the end.
#pragma once

#include "core/arena.h"
#include "core/dispatch.h"
#include "core/mask.h"
#include "cpu/simd/attention/captured_gradient.h"
#include "cpu/simd/pack.h"

namespace scaledot {
namespace {

// One row of dMask, in the mask's dtype.
template <class Sum>
void store_mask_row(const TensorView& view, int64_t start, int64_t cols, const Sum* from) {
  if (view.col_stride == 1 && view.dtype != DType::float64 && sizeof(Sum) == 4) {
    with_storage(view.dtype, [&](auto type) {
      using Storage = typename decltype(type)::type;
      if constexpr (sizeof(Storage) <= 4 && sizeof(Sum) == 4)
        narrow_row(from, Sum(1), cols, static_cast<Storage*>(view.data) + start);
    });
    return;
  }
  for (int64_t k = 0; k < cols; ++k) store_element(view.data, view.dtype, start + k * view.col_stride, from[k]);
}

// The distinct (batch, head) matrices of the mask, and which of them a (batch, head) reads.
struct MaskMatrices {
  int64_t batches, heads;

  explicit MaskMatrices(const Problem& p) : batches(1), heads(p.grad_mask.head_stride ? p.heads : 1) {
    for (int d = 0; d < p.batch_dims; ++d) batches *= p.grad_mask.batch_stride[d] ? p.batch_sizes[d] : 1;
  }
  static int64_t batch_index(const Problem& p, int64_t batch) {
    int64_t index = 0, step = 1;
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      if (p.grad_mask.batch_stride[d]) {
        index += batch % p.batch_sizes[d] * step;
        step *= p.batch_sizes[d];
      }
      batch /= p.batch_sizes[d];
    }
    return index;
  }
  // The first batch whose batch_index is `index`.
  static int64_t batch_of(const Problem& p, int64_t index) {
    int64_t batch = 0, step = 1;
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      if (p.grad_mask.batch_stride[d]) {
        batch += index % p.batch_sizes[d] * step;
        index /= p.batch_sizes[d];
      }
      step *= p.batch_sizes[d];
    }
    return batch;
  }
};

// The KV groups that must be visited in order form a class, because they share a matrix of a broadcast mask, or sums of
// captured numbers. Usually each KV group is a class. Class k is that of batch index k / heads.
inline bool sums_mask_gradient(const Problem& p) { return p.grad_mask.data && grad_mask_is_broadcast(p); }
struct GradientClasses {
  int64_t batches, heads;
};
inline GradientClasses gradient_classes(const Problem& p) {
  GradientClasses classes = {p.batch, p.kv_heads};
  if (sums_mask_gradient(p)) classes = {MaskMatrices(p).batches, p.grad_mask.head_stride ? p.kv_heads : 1};
  if (!wants_captured_gradient(p) || has_own_captured_sums(p)) return classes;
  const CapturedBy by = p.score_program->captured_by;
  if (by != CapturedBy::batch_and_head) classes.batches = 1;
  if (by == CapturedBy::any) classes.heads = 1;
  return classes;
}
inline int64_t class_count(const GradientClasses& classes) { return classes.batches * classes.heads; }
inline bool kv_groups_are_classes(const Problem& p) {
  return !sums_mask_gradient(p) && class_count(gradient_classes(p)) == p.batch * p.kv_heads;
}

// Calls body(kv_group) for the KV groups of a class, in order.
template <class Body>
void for_each_kv_group(const Problem& p, int64_t gradient_class, const Body& body) {
  if (kv_groups_are_classes(p)) return body(gradient_class);
  const auto [batches, heads] = gradient_classes(p);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const int64_t index = batches == 1 ? 0 : batches == p.batch ? batch : MaskMatrices::batch_index(p, batch);
    if (index != gradient_class / heads) continue;
    for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head)
      if (heads == 1 || kv_head == gradient_class % heads) body(batch * p.kv_heads + kv_head);
  }
}

template <class Sum>
class MaskGradient {
 public:
  // `tasks`: how many tasks of the backward share a KV group.
  MaskGradient(const Problem& p, int64_t tasks, Arena& arena)
      : p_(p),
        matrices_(p),
        wanted_(p.grad_mask.data),
        direct_(wanted_ && !grad_mask_is_broadcast(p)),
        keys_(p.key_length - p.mask_begin),
        streams_(direct_ && worth_streaming<Sum>(p, p.grad_mask, p.batch * p.heads, p.query_length, keys_)) {
    rows_ = p.grad_mask.row_stride ? p.query_length : 1;
    cols_ = p.grad_mask.col_stride ? keys_ : tasks;
    if (wanted_ && !direct_) sums_ = take<Sum>(arena, matrices_.batches * matrices_.heads * rows_ * cols_);
  }

  bool wanted() const { return wanted_; }

  // Sets the sums to 0, and the elements that no task visits because of positions, blocks or a score function.
  void clear(const Executor& executor) const {
    const TensorView& m = p_.grad_mask;
    const Range first = row_keys(p_, 0), last = row_keys(p_, p_.query_length - 1);
    const bool masks = has_blocks(p_) || (p_.score_program && p_.score_program->mask);
    const bool all_visited =
        !masks && last.begin == 0 && first.begin == 0 && first.end == p_.key_length && last.end == p_.key_length;
    if (direct_ && all_visited) return;
    parallel(executor, direct_ ? p_.batch * p_.heads : matrices_.batches * matrices_.heads, [&](int64_t index, int) {
      if (!direct_) {
        clear_row(sums_ + index * rows_ * cols_, rows_ * cols_);
        return;
      }
      const int64_t start = offset(p_, m, index / p_.heads, index % p_.heads);
      for (int64_t i = 0; i < p_.query_length; ++i)
        for (int64_t j = p_.mask_begin; j < p_.key_length; ++j)
          store_element(m.data, m.dtype, start + i * m.row_stride + j * m.col_stride, Sum(0));
    });
  }

  // Adds dS of row i and the given keys. `task`: the number of the caller among the tasks that share the KV group.
  void add(int64_t batch, int64_t head, int64_t i, Range keys, int64_t task, const Sum* grad_scores) const {
    const TensorView& m = p_.grad_mask;
    const int64_t skipped = first_masked(p_, keys), n = count(keys) - skipped, first = keys.begin + skipped;
    grad_scores += skipped;
    if (direct_) {
      const int64_t start = offset(p_, m, batch, head) + i * m.row_stride + first * m.col_stride;
      const bool streams = streams_ && skipped == 0;  // from a whole vector on
      streams ? stream_row(grad_scores, Sum(1), n, m, start) : store_mask_row(m, start, n, grad_scores);
      return;
    }
    Sum* row = sums_ + ((matrix_index(batch, head) * rows_) + (m.row_stride ? i : 0)) * cols_;
    if (m.col_stride) {
      Sum* sums = row + first - p_.mask_begin;
      int64_t k = 0;
      for (; k + kLanes<Sum> <= n; k += kLanes<Sum>) store(sums + k, load(sums + k) + load(grad_scores + k));
      for (; k < n; ++k) sums[k] += grad_scores[k];
    } else {
      Sum sum = Sum(0);
      for (int64_t k = 0; k < n; ++k) sum += grad_scores[k];
      row[task] += sum;
    }
  }

  // Called at the end of a task, after its last add().
  void end_task() const {
    if (streams_) end_streams();
  }

  // Writes the sums to grad_mask.
  void finish(const Executor& executor) const {
    if (direct_) return;
    const TensorView& m = p_.grad_mask;
    parallel(executor, matrices_.batches * matrices_.heads * rows_, [&](int64_t task, int) {
      const int64_t matrix = task / rows_, i = task % rows_;
      Sum* row = sums_ + task * cols_;
      const int64_t start =
          offset(p_, m, MaskMatrices::batch_of(p_, matrix / matrices_.heads), matrix % matrices_.heads);
      if (!m.col_stride)
        for (int64_t k = 1; k < cols_; ++k) row[0] += row[k];
      store_mask_row(m, start + i * m.row_stride + p_.mask_begin * m.col_stride, m.col_stride ? cols_ : 1, row);
    });
  }

 private:
  int64_t matrix_index(int64_t batch, int64_t head) const {
    return MaskMatrices::batch_index(p_, batch) * matrices_.heads + (matrices_.heads > 1 ? head : 0);
  }

  const Problem& p_;
  const MaskMatrices matrices_;
  const bool wanted_, direct_;
  const int64_t keys_;  // that have an element
  const bool streams_;
  int64_t rows_ = 0, cols_ = 0;  // of a matrix in sums_
  Sum* sums_ = nullptr;
};

}  // namespace
}  // namespace scaledot
