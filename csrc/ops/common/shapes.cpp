#include "ops/common/shapes.h"

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include "ops/common/checks.h"

namespace scaledot {
namespace {

// Widens `shape` by `sizes`, both aligned at their last dimension. False if two sizes differ and neither is 1.
template <class Int>
bool broadcast(c10::SmallVector<Int, 5>& shape, c10::ArrayRef<Int> sizes) {
  while (shape.size() < sizes.size()) shape.insert(shape.begin(), Int(1));
  const size_t shift = shape.size() - sizes.size();
  for (size_t d = 0; d < sizes.size(); ++d) {
    Int& size = shape[shift + d];
    if (size == sizes[d] || sizes[d] == 1) continue;
    if (size != 1) return false;
    size = sizes[d];
  }
  return true;
}

// Whether `sizes` broadcasts to `shape` without widening it.
template <class Int>
bool broadcasts_to(c10::ArrayRef<Int> sizes, c10::ArrayRef<Int> shape) {
  if (sizes.size() > shape.size()) return false;
  const size_t shift = shape.size() - sizes.size();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!(sizes[d] == shape[shift + d] || sizes[d] == 1)) return false;
  }
  return true;
}

template <class Int>
c10::ArrayRef<Int> batch_of(c10::ArrayRef<Int> sizes) {
  return sizes.size() > 3 ? sizes.slice(0, sizes.size() - 3) : c10::ArrayRef<Int>();
}

template <class Int>
Int heads_of(c10::ArrayRef<Int> sizes) {
  return sizes.size() > 2 ? sizes[sizes.size() - 3] : Int(1);
}

template <class Int>
Int from_last(c10::ArrayRef<Int> sizes, size_t k) {
  return sizes[sizes.size() - 1 - k];
}

// Advice if the tensors look like (batch, length, heads, head_dim), as flash-attn takes them: they fit that way,
// and there are more "heads" than rows.
template <class Int>
const char* layout_advice(c10::ArrayRef<Int> query, c10::ArrayRef<Int> key, c10::ArrayRef<Int> value) {
  if (query.size() != 4 || key.size() != 4 || value.size() != 4) return "";
  const Int &heads = query[2], &kv_heads = key[2];
  const bool fits = kv_heads > 0 && heads % kv_heads == 0 && key[1] == value[1] && kv_heads == value[2];
  if (!fits || (query[1] <= heads && key[1] <= kv_heads)) return "";
  return "; from (batch, length, heads, head_dim) pass query.transpose(1, 2), and key and value alike";
}

// Sets heads and kv_heads.
template <class Int>
void infer_heads(Shapes<Int>& shapes, const SdpaInputs& in, bool enable_gqa) {
  const auto sizes_q = sizes_of<Int>(in.query), sizes_k = sizes_of<Int>(in.key), sizes_v = sizes_of<Int>(in.value);
  const Int query = heads_of(sizes_q), key = heads_of(sizes_k), value = heads_of(sizes_v);
  if (query == key && key == value) {
    shapes.heads = shapes.kv_heads = query;
    return;
  }
  if (enable_gqa) {
    const auto check = [&](const Int& heads, const char* name) {
      TORCH_CHECK_VALUE(heads == query || (heads > 0 && query % heads == 0), name, ": got ", heads,
                        " heads; needs with enable_gqa a number that divides query's ", query, " heads",
                        layout_advice(sizes_q, sizes_k, sizes_v));
    };
    check(key, "key");
    check(value, "value");
    shapes.heads = query;
    if (key == value || value == 1) {
      shapes.kv_heads = key;
    } else {
      shapes.kv_heads = key == 1 ? value : query;
    }
    return;
  }
  shapes.kv_heads = key == 1 ? value : key;
  shapes.heads = query == 1 ? shapes.kv_heads : query;
  const auto check = [&](const Int& heads, const char* name) {
    TORCH_CHECK_VALUE(heads == 1 || heads == shapes.heads, name, ": got ", heads, " heads; needs 1 or query's ",
                      shapes.heads, "; pass enable_gqa=True for heads in groups that share a KV head",
                      layout_advice(sizes_q, sizes_k, sizes_v));
  };
  check(key, "key");
  check(value, "value");
}

// How to pass a mask that does not broadcast but would with further dimensions: the commonest mistake.
template <class Int>
const char* mask_advice(c10::ArrayRef<Int> mask, const SdpaInputs& in, const Shapes<Int>& shapes) {
  if (mask.size() >= 2 && from_last(mask, 0) == shapes.kv_heads &&
      (from_last(mask, 1) == shapes.heads || from_last(mask, 1) == 1)) {
    const char* advice = layout_advice(sizes_of<Int>(in.query), sizes_of<Int>(in.key), sizes_of<Int>(in.value));
    if (*advice) return advice;
  }
  if (shapes.batch.size() != 1 || mask.empty() || mask[0] != shapes.batch[0]) return "";
  const auto fits = [&](size_t d, const Int& size) { return mask[d] == size || mask[d] == 1; };
  if (mask.size() == 2 && mask[1] == shapes.key_length)
    return "; for a padding mask pass attn_mask[:, None, None, :], or key_mask to a module";
  if (mask.size() == 3 && fits(1, shapes.query_length) && fits(2, shapes.key_length))
    return "; for one mask per batch entry pass attn_mask[:, None]";
  return "";
}

template <class Int>
void check_relative_bias(const Tensor& bias, const Shapes<Int>& shapes) {
  const auto sizes = sizes_of<Int>(bias);
  auto full = shapes.batch;
  full.push_back(shapes.heads);
  if (!sizes.empty()) full.push_back(sizes.back());
  TORCH_CHECK_VALUE(!sizes.empty() && broadcasts_to<Int>(sizes, full), "relative_bias: got shape ", shape_of(bias),
                    "; needs one that broadcasts to (batch..., heads, 2 M + 1) with batch and heads of ",
                    shape_text<Int>(c10::ArrayRef<Int>(full).slice(0, shapes.batch.size() + 1)));
  check_distance_count(bias);
}

// The blocks of a block mask have to cover query and key, and to broadcast over batch and heads. They may have further
// dimensions of size 1 in front.
template <class Int>
void check_block_shapes(const SdpaInputs& in, const AttentionOptions& o, const Shapes<Int>& shapes) {
  const Tensor* blocks = present(in.blocks);
  if (!blocks) return;
  const auto number = [&](size_t k) { return as_int<Int>(o.block_shape[k]); };
  TORCH_CHECK_VALUE(number(2) == shapes.query_length && number(3) == shapes.key_length, "block_mask: got one for ",
                    number(2), " queries and ", number(3), " keys; needs ", shapes.query_length, " and ",
                    shapes.key_length);
  auto full = shapes.leading();
  full.push_back((shapes.query_length + number(0) - 1) / number(0));
  full.push_back((shapes.key_length + number(1) - 1) / number(1));
  const auto sizes = sizes_of<Int>(*blocks);
  size_t extra = 0;
  while (sizes.size() - extra > full.size() && sizes[extra] == 1) ++extra;
  const bool covers =
      sizes.size() >= 2 && from_last(sizes, 0) == full.back() && from_last(sizes, 1) == full[full.size() - 2];
  TORCH_CHECK_VALUE(covers && broadcasts_to<Int>(sizes.slice(extra), full), "block_mask: got blocks of shape ",
                    shape_of(*blocks), "; needs one that broadcasts to ", shape_text<Int>(full),
                    ", (batch..., heads, blocks of queries, blocks of keys)");
}

// key_indices may have the heads of query or of key, or one; any other number would not say which list is whose.
template <class Int>
void check_list_shapes(const SdpaInputs& in, Shapes<Int>& shapes) {
  const Tensor* indices = present(in.key_indices);
  if (!indices) return;
  const auto sizes = sizes_of<Int>(*indices);
  auto full = shapes.batch;
  if (sizes.size() > 2) {
    const bool of_keys = sizes[sizes.size() - 3] == shapes.kv_heads;
    full.push_back(of_keys ? shapes.kv_heads : shapes.heads);
  }
  full.push_back(shapes.query_length);
  if (!sizes.empty()) full.push_back(sizes.back());
  TORCH_CHECK_VALUE(sizes.size() >= 2 && broadcasts_to<Int>(sizes, full), "key_indices: got shape ", shape_of(*indices),
                    "; needs (batch..., heads, query_length, K) with batch ", shape_text<Int>(shapes.batch),
                    " (each may be 1), ", shapes.heads, " (query's), ", shapes.kv_heads, " (key's) or 1 heads, and ",
                    shapes.query_length, " or 1 rows");
  shapes.columns = sizes.back();
}

template <class Int>
void check_mask_shapes(const SdpaInputs& in, const Shapes<Int>& shapes) {
  if (const Tensor* mask = present(in.attn_mask)) {
    const auto full = shapes.weights();
    TORCH_CHECK_VALUE(broadcasts_to<Int>(sizes_of<Int>(*mask), full), "attn_mask: got shape ", shape_of(*mask),
                      "; needs one that broadcasts to ", shape_text<Int>(full),
                      ", (batch..., heads, query_length, key_length)",
                      mask_advice<Int>(sizes_of<Int>(*mask), in, shapes));
  }
  if (const Tensor* slopes = present(in.alibi_slopes)) {
    auto full = shapes.batch;
    full.push_back(shapes.heads);
    TORCH_CHECK_VALUE(slopes->dim() >= 1 && broadcasts_to<Int>(sizes_of<Int>(*slopes), full),
                      "alibi_slopes: got shape ", shape_of(*slopes), "; needs one that broadcasts to ",
                      shape_text<Int>(full), ", (batch..., heads)");
  }
  if (const Tensor* bias = present(in.relative_bias)) check_relative_bias(*bias, shapes);
  if (const Tensor* seed = present(in.dropout_seed)) {
    const auto sizes = sizes_of<Int>(*seed);
    const size_t dims = sizes.empty() ? 0 : sizes.size() - 1;
    TORCH_CHECK_VALUE(
        dims <= shapes.batch.size() && sizes.slice(0, dims) == c10::ArrayRef<Int>(shapes.batch).slice(0, dims),
        "dropout_seed: got shape ", shape_of(*seed),
        "; needs (2,) or (batch..., 2), a seed for each index of the first dimensions of the batch, ",
        shape_text<Int>(shapes.batch));
  }
}

}  // namespace

void check_dims(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() >= 2, name, ": got shape ", shape_of(tensor),
                    "; needs at least 2 dimensions: (..., heads, length, head_dim)");
}

void check_distance_count(const Tensor& relative_bias) {
  const c10::SymInt count = relative_bias.sym_size(-1);
  TORCH_CHECK_VALUE(count % 2 == 1, "relative_bias: got ", count,
                    " entries; needs an odd number, one for each distance from -M to M");
}

c10::SmallVector<int64_t, 5> row_major_strides(at::IntArrayRef sizes) {
  c10::SmallVector<int64_t, 5> strides(sizes.size(), 1);
  for (int d = int(sizes.size()) - 2; d >= 0; --d) strides[d] = strides[d + 1] * max<int64_t>(sizes[d + 1], 1);
  return strides;
}

template <class Int>
void check_result(const Tensor* tensor, const char* name, const c10::SmallVector<Int, 5>& shape, at::ScalarType type,
                  const Tensor& query) {
  if (!tensor) return;
  check_strided(*tensor, name);
  TORCH_CHECK_VALUE(sizes_of<Int>(*tensor) == c10::ArrayRef<Int>(shape), name, ": got shape ", shape_of(*tensor),
                    "; needs ", shape_text<Int>(shape));
  check_result_dtype(*tensor, name, type);
  check_on_device(*tensor, name, query);
  if constexpr (std::is_same_v<Int, int64_t>) check_storage(*tensor, name);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::leading() const {
  Vector shape;
  if (!has_heads) return shape;
  shape = batch;
  shape.push_back(heads);
  return shape;
}

template <class Int>
static typename Shapes<Int>::Vector joined(typename Shapes<Int>::Vector shape, const Int& rows, const Int& columns) {
  shape.push_back(rows);
  shape.push_back(columns);
  return shape;
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::output() const {
  return joined<Int>(leading(), query_length, value_dim);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::weights() const {
  return joined<Int>(leading(), query_length, columns);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::lse() const {
  Vector shape = leading();
  shape.push_back(query_length);
  return shape;
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::kernel_query() const {
  return joined<Int>(leading(), query_length, head_dim);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::kernel_key() const {
  Vector shape = leading();
  if (has_heads) shape.back() = kv_heads;
  return joined<Int>(std::move(shape), key_length, head_dim);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::kernel_value() const {
  Vector shape = leading();
  if (has_heads) shape.back() = kv_heads;
  return joined<Int>(std::move(shape), key_length, value_dim);
}

template <class Int>
typename Shapes<Int>::Vector Shapes<Int>::output_strides() const {
  const Vector shape = output();
  const int n = int(shape.size());
  Vector strides(n, Int(1));
  c10::SmallVector<int, 5> order;  // dimensions from the innermost
  for (int d = n - 1; d >= 0; --d) order.push_back(d);
  if (n >= 4) std::swap(order[1], order[2]);
  Int stride = 1;
  for (int d : order) {
    strides[d] = stride;
    if (shape[d] != 0) stride = stride * shape[d];
  }
  return strides;
}

template <class Int>
Shapes<Int> infer_shapes(const SdpaInputs& in, const AttentionOptions& o) {
  check_dims(in.query, "query");
  check_dims(in.key, "key");
  check_dims(in.value, "value");
  const auto query = sizes_of<Int>(in.query), key = sizes_of<Int>(in.key), value = sizes_of<Int>(in.value);

  Shapes<Int> shapes;
  shapes.has_heads = query.size() > 2 || key.size() > 2 || value.size() > 2;
  shapes.query_length = from_last(query, 1);
  shapes.head_dim = from_last(query, 0);
  shapes.key_length = from_last(key, 1);
  shapes.value_dim = from_last(value, 0);
  TORCH_CHECK_VALUE(from_last(key, 0) == shapes.head_dim, "key: got shape ", shape_of(in.key),
                    "; needs query's last dimension, ", shapes.head_dim);
  TORCH_CHECK_VALUE(from_last(value, 1) == shapes.key_length, "value: got shape ", shape_of(in.value),
                    "; needs key's length as its second-to-last dimension, ", shapes.key_length);

  shapes.batch.append(batch_of(query).begin(), batch_of(query).end());
  TORCH_CHECK_VALUE(broadcast(shapes.batch, batch_of(key)), "key: got shape ", shape_of(in.key),
                    "; needs batch dimensions that broadcast with those of query, ", shape_of(in.query));
  TORCH_CHECK_VALUE(broadcast(shapes.batch, batch_of(value)), "value: got shape ", shape_of(in.value),
                    "; needs batch dimensions that broadcast with those of query, ", shape_of(in.query), ", and key, ",
                    shape_of(in.key));
  infer_heads<Int>(shapes, in, o.enable_gqa);
  shapes.columns = shapes.key_length;
  check_list_shapes(in, shapes);
  check_mask_shapes(in, shapes);
  check_block_shapes(in, o, shapes);
  return shapes;
}

template struct Shapes<int64_t>;
template struct Shapes<c10::SymInt>;
template Shapes<int64_t> infer_shapes(const SdpaInputs&, const AttentionOptions&);
template Shapes<c10::SymInt> infer_shapes(const SdpaInputs&, const AttentionOptions&);
template void check_result(const Tensor*, const char*, const c10::SmallVector<int64_t, 5>&, at::ScalarType,
                           const Tensor&);
template void check_result(const Tensor*, const char*, const c10::SmallVector<c10::SymInt, 5>&, at::ScalarType,
                           const Tensor&);

}  // namespace scaledot
