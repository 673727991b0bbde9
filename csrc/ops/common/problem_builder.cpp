#include "ops/common/problem_builder.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "core/mask.h"
#include "ops/common/checks.h"

namespace scaledot {
namespace {

std::atomic<bool> row_invariant_enabled{false};

// The address of tensors without data. Kernels read and write nothing there: they are only asked about such a problem,
// or the tensor has no elements.
void* const kFakeAddress = reinterpret_cast<void*>(uintptr_t(4096));

// Whether the field's tensors have dimensions of heads and of entries.
bool is_relative(TensorView Problem::*field) {
  return field == &Problem::relative_bias || field == &Problem::grad_relative_bias;
}

// relative_bias with contiguous entries of the type. Leading dimensions that are broadcast stay so.
Tensor compact(Tensor bias, at::ScalarType type, bool shape_only) {
  for (int64_t d = 0; d < bias.dim() - 1; ++d)
    if (bias.stride(d) == 0 && bias.size(d) > 1) bias = bias.narrow(d, 0, 1);
  return shape_only ? at::empty(bias.sizes(), at::TensorOptions(type).device(at::kMeta)) : bias.to(type).contiguous();
}

// How many of (head, row, column) the dimensions of a field's tensors end with.
int trailing_dims(TensorView Problem::*field) {
  if (field == &Problem::lse || field == &Problem::grad_lse || is_relative(field)) return 2;
  const bool of_heads = field == &Problem::alibi_slopes || field == &Problem::k_scale || field == &Problem::v_scale;
  return of_heads ? 1 : 3;
}

int64_t product(at::IntArrayRef sizes) {
  int64_t result = 1;
  for (int64_t size : sizes) result *= size;
  return result;
}

// The stride of the k-th dimension from the last; 0 where the tensor is broadcast.
int64_t stride_from_last(at::IntArrayRef sizes, at::IntArrayRef strides, int k) {
  const int d = int(sizes.size()) - 1 - k;
  return d < 0 || sizes[d] == 1 ? 0 : strides[d];
}

}  // namespace

bool set_row_invariant(bool enabled) { return row_invariant_enabled.exchange(enabled); }

bool needs_heads(const Tensor& tensor, int64_t kv_heads) {
  return tensor.dim() > 2 && tensor.size(-3) != kv_heads && tensor.size(-3) != 1;
}

Tensor with_heads(const Tensor& tensor, int64_t kv_heads) {
  return needs_heads(tensor, kv_heads) ? at::repeat_interleave(tensor, kv_heads / tensor.size(-3), -3) : tensor;
}

int64_t ProblemBuilder::Entry::batch_stride(int from_last) const {
  return stride_from_last(sizes, strides, trailing + from_last);
}

ProblemBuilder::ProblemBuilder(const SdpaInputs& in, const AttentionOptions& o, const Shapes<int64_t>& shapes,
                               bool shape_only)
    : shapes_(shapes), shape_only_(shape_only) {
  Problem& p = problem_;
  p.batch = product(shapes.batch);
  p.heads = shapes.heads;
  p.kv_heads = shapes.kv_heads;
  p.query_length = shapes.query_length;
  p.key_length = shapes.key_length;
  p.head_dim = shapes.head_dim;
  p.value_dim = shapes.value_dim;
  p.dtype = dtype_of(in.query.scalar_type());
  // Without a head dimension every score is 0 whatever the scale; torch's 1 / sqrt(0) would make it NaN.
  p.scale = o.scale ? *o.scale : (p.head_dim == 0 ? 1.0 : 1.0 / std::sqrt(double(p.head_dim)));
  p.softcap = o.softcap.value_or(0.0);
  p.masked_score = o.masked_score.value_or(-std::numeric_limits<double>::infinity());
  p.dropout_p = o.dropout_p;
  p.row_invariant = row_invariant_enabled.load(std::memory_order_relaxed);
  p.position = position_mask(o, p.query_length, p.key_length);
  if (!o.part.empty()) {
    const auto number = [&](size_t k) { return o.part[k].expect_int(); };
    p.part = {true, number(1), number(2), number(3), number(4), number(5)};
  }

  add(&Problem::query, in.query);
  add(&Problem::key, in.key);
  add(&Problem::value, in.value);
  add(&Problem::attn_mask, in.attn_mask);
  if (const Tensor* slopes = present(in.alibi_slopes)) {
    slopes_ = slopes->element_size() == 2 ? slopes->to(at::kFloat) : *slopes;
    add(&Problem::alibi_slopes, slopes_);
  }
  if (const Tensor* bias = present(in.relative_bias)) {
    relative_bias_ = compact(*bias, lse_dtype(in.query.scalar_type()), shape_only);
    p.relative_range = {-(bias->size(-1) / 2), bias->size(-1) / 2};
    add(&Problem::relative_bias, relative_bias_);
  }
  if (const Tensor* blocks = present(in.blocks)) add_blocks(*blocks, *in.block_bits, o);
  if (const Tensor* indices = present(in.key_indices)) {
    add(&Problem::key_indices, *indices);
    p.list_length = shapes.columns;
    p.heads_per_list = indices->dim() > 2 ? p.heads / max<int64_t>(indices->size(-3), 1) : p.heads;
    if (!shape_only && p.list_length > 0) check_key_indices(*indices, p.key_length);
  }
}

void ProblemBuilder::add_seed(const OptionalTensor& seed) {
  if (problem_.dropout_p <= 0 || !present(seed)) return;
  problem_.dropout_seed = seed->const_data_ptr<int64_t>();
  problem_.dropout_batch = problem_.batch / max<int64_t>(seed->numel() / 2, 1);
}

void ProblemBuilder::add_blocks(const Tensor& blocks, const Tensor& bits, const AttentionOptions& o) {
  Problem& p = problem_;
  add(&Problem::blocks, blocks);
  p.block_rows = o.block_shape[0].expect_int();
  p.block_keys = o.block_shape[1].expect_int();
  p.block_bits.count = bits.size(0);
  if (shape_only_) return;
  block_bits_ = bits.contiguous();
  p.block_bits.words = static_cast<const uint64_t*>(block_bits_.const_data_ptr());
  // On a GPU, reading the numbers would mean to wait for them.
  if (blocks.device().is_cpu()) check_block_numbers(blocks, p.block_bits.count);
}

void ProblemBuilder::add(TensorView Problem::*field, const Tensor& tensor) {
  void* data = nullptr;
  if (shape_only_) {
    data = tensor.numel() > 0 ? kFakeAddress : nullptr;
  } else {
    data = const_cast<void*>(tensor.const_data_ptr());
    // Not absent: CPU kernels compute the addresses of its rows, which null may not be used for.
    if (!data && tensor.is_cpu()) data = kFakeAddress;
  }
  add(field, tensor.sizes(), tensor.strides(), tensor.scalar_type(), data);
}

void ProblemBuilder::add_written(TensorView Problem::*field, const Tensor& tensor) {
  tensor.mutable_data_ptr();
  add(field, tensor);
}

void ProblemBuilder::add(TensorView Problem::*field, const OptionalTensor& tensor) {
  if (const Tensor* t = present(tensor)) add(field, *t);
}

TensorView Problem::*ProblemBuilder::saved_field(const std::optional<c10::SymInt>& keys) {
  if (!keys) return &Problem::output_low;
  problem_.saved_keys = keys->expect_int();
  return &Problem::saved_softmax;
}

void ProblemBuilder::add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides,
                         at::ScalarType type) {
  add(field, sizes, strides, type, product(sizes) > 0 ? kFakeAddress : nullptr);
}

void ProblemBuilder::add(TensorView Problem::*field, at::IntArrayRef sizes, at::IntArrayRef strides,
                         at::ScalarType type, void* data) {
  const int trailing = trailing_dims(field);
  TensorView& view = problem_.*field;
  view.data = data;
  view.dtype = dtype_of(type);
  view.head_stride = stride_from_last(sizes, strides, trailing - 1);
  if (is_relative(field)) {
    view.col_stride = 1;
  } else if (trailing >= 2) {
    view.row_stride = stride_from_last(sizes, strides, trailing - 2);
  }
  if (trailing == 3) {
    view.col_stride = stride_from_last(sizes, strides, 0);
    // A single column may have any stride: 1 suits kernels best. A mask's single column may be broadcast and keeps 0.
    const bool is_mask = field == &Problem::attn_mask || field == &Problem::grad_mask;
    if (!is_mask && !sizes.empty() && sizes.back() == 1) view.col_stride = 1;
  }
  entries_.push_back({&view, sizes, strides, trailing});
}

Problem ProblemBuilder::finish(const Packed& packed, const Pages& pages) {
  // Dimensions are taken from the innermost; sizes[0] is the innermost one that is left.
  c10::SmallVector<int64_t, 8> sizes;
  c10::SmallVector<int, 8> innermost;  // of the merged dimensions, counted from the last batch dimension
  const auto& batch = shapes_.batch;
  const int dims = int(batch.size());
  int previous = -1;  // the outermost dimension merged so far into the last of `sizes`
  for (int d = 0; d < dims; ++d) {
    const int64_t size = batch[dims - 1 - d];
    if (size == 1) continue;
    bool merges = previous >= 0;
    for (const Entry& entry : entries_) {
      if (!merges) break;
      merges = entry.batch_stride(d) == entry.batch_stride(previous) * batch[dims - 1 - previous];
    }
    if (merges) {
      sizes.back() *= size;
    } else {
      sizes.push_back(size);
      innermost.push_back(d);
    }
    previous = d;
  }
  TORCH_CHECK_VALUE(sizes.size() <= kMaxBatchDims, "query: got ", dims, " batch dimensions, of which ", sizes.size(),
                    " cannot be merged because of their strides; needs at most ", kMaxBatchDims,
                    " (reshape the inputs or make them contiguous)");
  problem_.batch_dims = int32_t(sizes.size());
  for (int k = 0; k < problem_.batch_dims; ++k) {
    const int reversed = problem_.batch_dims - 1 - k;
    problem_.batch_sizes[k] = sizes[reversed];
    for (const Entry& entry : entries_) entry.view->batch_stride[k] = entry.batch_stride(innermost[reversed]);
  }
  Problem result = problem_;
  result.packed = packed;
  result.pages = pages;
  trim_relative_bias(result);
  return result;
}

}  // namespace scaledot
