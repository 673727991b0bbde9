// From a Problem's tensors to tensor maps of the copy engine, which have four dimensions: column, row, head and batch.
#pragma once

#include <numeric>

#include "cuda/ptx/tensor_map.h"
#include "cuda/sm90/config.h"

namespace scaledot {
namespace {

// The batch dimensions as one, if possible: batch entry b is at b * stride. A stride of 0 means a broadcast tensor.
struct BatchStride {
  bool is_one;
  int64_t stride;
};
inline BatchStride batch_stride(const Problem& p, const TensorView& view) {
  BatchStride result = {true, 0};
  int64_t size = 1;  // of the dimensions so far
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    if (p.batch_sizes[d] == 1) continue;
    if (size == 1)
      result.stride = view.batch_stride[d];
    else if (view.batch_stride[d] != result.stride * size)
      result.is_one = false;
    size *= p.batch_sizes[d];
  }
  return result;
}

// The rows of all packed sequences as those of one. Another problem stays as it is.
inline Problem with_all_rows(const Problem& p) {
  Problem all = p;
  if (is_packed(p)) {
    all.batch_dims = 0, all.batch = 1;
    all.query_length = p.packed.total_q, all.key_length = p.packed.total_k;
  }
  return all;
}

// The rows that keys and values are copied from: those of all packed sequences as those of one; of pages, those of a
// page, with the pages as batch entries. Another problem stays as it is.
inline Problem with_all_keys(const Problem& p) {
  Problem all = with_all_rows(p);
  if (is_paged(p)) {
    all.batch_dims = 1, all.batch_sizes[0] = all.batch = p.pages.pool, all.key_length = p.pages.size;
    all.key.batch_stride[0] = p.pages.key_stride, all.value.batch_stride[0] = p.pages.value_stride;
  }
  return all;
}

// The rows that one copy of keys or values moves. From pages: the most of a tile's `keys` that never cross the end of a
// page.
inline int key_box_rows(const Problem& p, int keys) {
  return is_paged(p) ? int(std::gcd(p.pages.size, int64_t(keys))) : keys;
}

// A tensor's shape for the copy engine, which sees two bytes of quantised numbers as one element. A broadcast dimension
// has one element, and its coordinate is multiplied by 0.
struct TmaLayout {
  TensorShape shape;
  int head_step, batch_step;
};

inline TmaLayout tma_layout(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                            int box_rows) {
  const BatchStride batch = batch_stride(p, view);
  const int bytes = int(element_size(view.dtype));  // 2, or 1 if quantised
  TmaLayout plan = {{view.data,
                     p.dtype,
                     {ceil_div(cols * bytes, 2), rows, heads, p.batch},
                     {2, 0, 0, 0},
                     {kPanelCols * bytes / 2, box_rows, 1, 1}},
                    1,
                    1};
  const int64_t strides[] = {1, view.row_stride, view.head_stride, batch.stride};
  const int64_t any_stride = round_up(cols * bytes, 16);  // for a dimension of one element: not less than a row
  for (int d = 1; d < 4; ++d) {
    if (strides[d] == 0 && d > 1) plan.shape.size[d] = 1;
    plan.shape.stride[d] = plan.shape.size[d] == 1 ? any_stride : bytes * strides[d];
  }
  plan.head_step = plan.shape.size[2] > 1, plan.batch_step = plan.shape.size[3] > 1;
  return plan;
}

// A tensor for kernels: its map, and the factors of the head and batch coordinates.
struct TmaTensor {
  TensorMap map;
  int head_step, batch_step;
};
// Copies move `box_rows` rows of a panel. Returns nullptr, or an error message.
inline const char* make_tma_tensor(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                                   int box_rows, TmaTensor& made) {
  const TmaLayout plan = tma_layout(p, view, heads, rows, cols, box_rows);
  made.head_step = plan.head_step, made.batch_step = plan.batch_step;
  return encode_tensor_map(made.map, plan.shape);
}

// nullptr, or the reason why the copy engine cannot address the tensor.
inline const char* why_no_tensor_map(const Problem& p, const TensorView& view, int64_t heads, int64_t rows,
                                     int64_t cols) {
  if (view.col_stride != 1 && cols > 1) return "a tensor's last stride is not 1";
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return "a tensor's address is not a multiple of 16 bytes";
  if (!batch_stride(p, view).is_one) return "a tensor's batch dimensions are not one in memory";
  const TmaLayout plan = tma_layout(p, view, heads, rows, cols, 64);
  for (int d = 0; d < 4; ++d) {
    if (plan.shape.size[d] >= kMaxTensorSize) return "a dimension is 2^31 or more";
    if (d == 0) continue;
    if (plan.shape.stride[d] <= 0 || plan.shape.stride[d] >= kMaxTensorStride)
      return "a tensor's stride is 0 or too large";
    if (plan.shape.stride[d] % 16 != 0) return "a tensor's strides are not multiples of 16 bytes";
  }
  if (rows > 1 && view.row_stride < cols) return "a tensor's rows overlap";
  return nullptr;
}

}  // namespace
}  // namespace scaledot
