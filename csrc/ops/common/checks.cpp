#include "ops/common/checks.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "core/mask.h"
#include "core/saved.h"
#include "ops/common/score_program.h"

namespace scaledot {
namespace {

const Tensor kUndefined;
constexpr size_t kPartNumbers = 6, kBlockShapeNumbers = 4;

const char* quantised_advice(const Tensor& tensor) {
  return is_quantised(tensor) ? "; varlen_attention takes key and value of 8 bits, and query of 16 or 32" : "";
}

void check_dtype(const Tensor& tensor, const char* name, const Tensor& query, bool may_be_quantised) {
  if (may_be_quantised && is_quantised(tensor)) return;
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), name, ": got dtype ", dtype_name(tensor.scalar_type()),
                   "; needs query's dtype, ", dtype_name(query.scalar_type()), quantised_advice(tensor));
}

void check_window(const std::optional<c10::SymInt>& side, const char* which) {
  TORCH_CHECK_VALUE(!side || *side >= 0, "window: got a ", which, " side of ", *side,
                    "; needs at least 0, or None for no limit");
}

void check_not_nested(const Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(!tensor.is_nested(), name,
                   ": got a nested tensor; needs a dense one, or query, key and value all of layout torch.jagged in "
                   "scaled_dot_product_attention");
}

// Every tensor is a plain one on query's device.
void check_layouts(const SdpaInputs& in) {
  for_each_input(in, [&](const auto& row) {
    const Tensor* given = present(row.tensor);
    if (!given && row.is_optional) return;
    const Tensor& tensor = given ? *given : kUndefined;
    check_strided(tensor, row.name);
    const void* const argument = &row.tensor;
    const bool may_be_on_cpu = argument == &in.dropout_seed || argument == &in.score_program;
    if (!may_be_on_cpu) check_on_device(tensor, row.argument, in.query);
  });
}

void check_mask_types(const SdpaInputs& in) {
  if (const Tensor* mask = present(in.attn_mask)) {
    TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool || is_kernel_float(mask->scalar_type()), "attn_mask: got dtype ",
                     dtype_name(mask->scalar_type()), "; needs torch.bool (True = may attend), or ", kFloats,
                     " (added to the score)",
                     at::isIntegralType(mask->scalar_type(), /*includeBool=*/false)
                         ? "; for a mask of zeros and ones pass attn_mask.bool()"
                         : "");
  }
  if (const Tensor* slopes = present(in.alibi_slopes)) {
    TORCH_CHECK_TYPE(slopes->scalar_type() == at::kFloat || slopes->scalar_type() == at::kDouble ||
                         slopes->scalar_type() == in.query.scalar_type(),
                     "alibi_slopes: got dtype ", dtype_name(slopes->scalar_type()),
                     "; needs torch.float32, torch.float64 or query's dtype, ", dtype_name(in.query.scalar_type()));
  }
  if (const Tensor* bias = present(in.relative_bias)) {
    TORCH_CHECK_TYPE(is_kernel_float(bias->scalar_type()), "relative_bias: got dtype ", dtype_name(bias->scalar_type()),
                     "; needs ", kFloats);
  }
}

// Everything except the shape and the numbers.
void check_list_arguments(const SdpaInputs& in) {
  const Tensor* indices = present(in.key_indices);
  if (!indices) return;
  TORCH_CHECK_TYPE(indices->scalar_type() == at::kInt || indices->scalar_type() == at::kLong, "key_indices: got dtype ",
                   dtype_name(indices->scalar_type()), "; needs torch.int32 or torch.int64");
  const auto check_absent = [](const OptionalTensor& other, const char* name) {
    TORCH_CHECK_VALUE(!present(other), name,
                      ": got one with key_indices; needs None: leave the keys that it would hide "
                      "out of the lists");
  };
  check_absent(in.attn_mask, "attn_mask");
  check_absent(in.blocks, "block_mask");
  const auto check_no_scores = [](const OptionalTensor& other, const char* name) {
    TORCH_CHECK_VALUE(!present(other), name,
                      ": got one with key_indices; needs None: kernels for lists of keys lack it");
  };
  check_no_scores(in.alibi_slopes, "alibi_slopes");
  check_no_scores(in.relative_bias, "relative_bias");
  check_no_scores(in.score_program, "score_mod");
  const c10::Device device = in.query.device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta(), "key_indices: got tensors on ", device,
                              "; needs tensors on the CPU: GPU kernels have no lists of keys");
}

// Everything but the lengths and the numbers of the blocks.
void check_blocks(const SdpaInputs& in, const AttentionOptions& o) {
  const Tensor *blocks = present(in.blocks), *bits = present(in.block_bits);
  if (!blocks && !bits && o.block_shape.empty()) return;
  TORCH_CHECK_VALUE(blocks && bits && !o.block_shape.empty(),
                    "blocks: got only a part of a block mask; needs blocks, block_bits and block_shape");
  TORCH_CHECK_TYPE(blocks->scalar_type() == at::kInt, "blocks: got dtype ", dtype_name(blocks->scalar_type()),
                   "; needs torch.int32");
  TORCH_CHECK_TYPE(bits->scalar_type() == at::kLong, "block_bits: got dtype ", dtype_name(bits->scalar_type()),
                   "; needs torch.int64");
  bool valid = o.block_shape.size() == kBlockShapeNumbers;
  for (size_t k = 0; k < o.block_shape.size(); ++k)
    valid = valid && o.block_shape[k] >= (k < 2 ? 1 : 0) && (k >= 2 || o.block_shape[k] <= INT32_MAX);
  TORCH_CHECK_VALUE(valid, "block_shape: got ", c10::SymIntArrayRef(o.block_shape),
                    "; needs the rows and keys of a block, 1 to 2^31 - 1, and the lengths of query and key");
  const c10::SymInt words = (o.block_shape[1] + 63) / 64;
  TORCH_CHECK_VALUE(bits->dim() == 3 && bits->sym_size(1) == o.block_shape[0] && bits->sym_size(2) == words,
                    "block_bits: got shape ", shape_of(*bits), "; needs (partial blocks, ", o.block_shape[0], ", ",
                    words, "), a bit for each row and key of a block");
}

}  // namespace

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kBFloat16: return DType::bfloat16;
    case at::kHalf: return DType::float16;
    case at::kBool: return DType::boolean;
    case at::kFloat8_e4m3fn: return DType::float8_e4m3fn;
    case at::kFloat8_e5m2: return DType::float8_e5m2;
    case at::kChar: return DType::int8;
    case at::kInt: return DType::int32;
    case at::kLong: return DType::int64;
    default: return DType::none;
  }
}

bool is_kernel_float(at::ScalarType type) {
  const DType dtype = dtype_of(type);
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::bfloat16 || dtype == DType::float16;
}

bool is_quantised(const Tensor& tensor) { return is_quantised(dtype_of(tensor.scalar_type())); }

std::string dtype_name(at::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

void check_strided(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.defined(), name, ": got None; needs a tensor");
  check_not_nested(tensor, name);
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": got a tensor of layout ", tensor.layout(),
                   "; needs a dense one (to_dense())");
  TORCH_CHECK_TYPE(!tensor.is_quantized(), name, ": got a quantised tensor; needs a floating one (dequantize())");
}

void check_not_nested(const Tensor& query, const Tensor& key, const Tensor& value) {
  check_not_nested(query, "query");
  check_not_nested(key, "key");
  check_not_nested(value, "value");
}

void check_on_device(const Tensor& tensor, const char* name, const Tensor& query) {
  TORCH_CHECK_VALUE(tensor.device() == query.device(), name, ": got a tensor on ", tensor.device(),
                    "; needs to be on query's device, ", query.device());
}

void check_storage(const Tensor& tensor, const char* name) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return;  // functorch's wrappers have none
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                         size_t(tensor.storage_offset()));
  TORCH_CHECK_VALUE(tensor.storage().nbytes() >= needed, name, ": got shape ", shape_of(tensor), " on a storage of ",
                    tensor.storage().nbytes(), " bytes; needs ", needed, " bytes: the storage was resized");
}

void check_result_dtype(const Tensor& tensor, const char* name, at::ScalarType type) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, ": got dtype ", dtype_name(tensor.scalar_type()), "; needs ",
                   dtype_name(type));
}

void check_has_low_part(const Tensor& query, const char* argument, const char* got) {
  TORCH_CHECK_VALUE(has_output_low(dtype_of(query.scalar_type())), argument, ": got ", got, " for ",
                    dtype_name(query.scalar_type()), "; needs torch.bfloat16 or torch.float16");
}

void check_dropout(double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p: got ", dropout_p, "; needs a number in [0, 1]");
}

void check_seed(const Tensor& seed, c10::Device other) {
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, "dropout_seed: got dtype ", dtype_name(seed.scalar_type()),
                   "; needs torch.int64");
  TORCH_CHECK_VALUE(seed.dim() >= 1 && seed.sym_size(-1) == 2, "dropout_seed: got shape ", shape_of(seed),
                    "; needs (2,) or (batch..., 2), a seed for each index of the first dimensions of the batch");
  TORCH_CHECK_VALUE(seed.device().is_cpu() || seed.device() == other, "dropout_seed: got a tensor on ", seed.device(),
                    "; needs to be on the CPU or on query's device, ", other);
}

void check_positions(const AttentionOptions& o) {
  TORCH_CHECK_VALUE(o.causal_alignment == "upper_left" || o.causal_alignment == "lower_right",
                    "causal_alignment: got '", o.causal_alignment, "'; needs 'upper_left' or 'lower_right'");
  check_window(o.window_left, "left");
  check_window(o.window_right, "right");
  bool placed = o.part.empty() || o.part.size() == kPartNumbers;
  for (size_t k = 1; k < o.part.size(); ++k) placed = placed && o.part[k] >= 0;
  TORCH_CHECK_VALUE(placed, "part: got ", c10::SymIntArrayRef(o.part),
                    "; needs no numbers, or diagonal, row, key, batch, head and heads, all but the first at least 0");
}

void check_block_numbers(const Tensor& blocks, int64_t count) {
  const Tensor numbers = blocks.contiguous();
  const int32_t* const first = numbers.const_data_ptr<int32_t>();
  int32_t lowest = kFullBlock, highest = kFullBlock;
  for (int64_t k = 0; k < numbers.numel(); ++k) {
    lowest = min(lowest, first[k]);
    highest = max(highest, first[k]);
  }
  TORCH_CHECK_VALUE(lowest >= kEmptyBlock && highest < count, "blocks: got the number ",
                    lowest < kEmptyBlock ? lowest : highest, "; needs ", int(kEmptyBlock), " (empty), ",
                    int(kFullBlock), " (full) or that of one of the ", count, " entries of block_bits");
}

void check_key_indices(const Tensor& indices, int64_t key_length) {
  if (indices.numel() == 0) return;
  TORCH_CHECK_VALUE(key_length <= INT32_MAX && indices.size(-1) <= INT32_MAX, "key_indices: got ", key_length,
                    " keys and lists of ", indices.size(-1), " entries; needs fewer than 2^31");
  const Tensor numbers = indices.contiguous();
  const auto highest_of = [&](const auto* first) -> int64_t {
    return *std::max_element(first, first + numbers.numel());
  };
  const int64_t highest = numbers.scalar_type() == at::kLong ? highest_of(numbers.const_data_ptr<int64_t>())
                                                             : highest_of(numbers.const_data_ptr<int32_t>());
  TORCH_CHECK_VALUE(highest < key_length, "key_indices: got the key ", highest, "; needs numbers below key's length, ",
                    key_length, ", and a negative one where a list has no key");
}

void check_differentiable(const SdpaInputs& in, const AttentionOptions& o) {
  TORCH_CHECK_VALUE(o.part.empty(), "part: got ", c10::SymIntArrayRef(o.part),
                    "; needs to be empty for a second derivative and for forward mode");
  const auto check_absent = [](const OptionalTensor& other, const char* name) {
    TORCH_CHECK_NOT_IMPLEMENTED(!present(other), name,
                                ": got one in a second derivative or in forward mode; needs a first derivative by a "
                                "backward");
  };
  check_absent(in.score_program, "score_mod");
  check_absent(in.key_indices, "key_indices");
}

void check_arguments(const SdpaInputs& in, const AttentionOptions& o, bool needs_seed, bool may_be_quantised) {
  check_layouts(in);
  TORCH_CHECK_TYPE(is_kernel_float(in.query.scalar_type()), "query: got dtype ", dtype_name(in.query.scalar_type()),
                   "; needs ", kFloats, quantised_advice(in.query));
  check_dtype(in.key, "key", in.query, may_be_quantised);
  check_dtype(in.value, "value", in.query, may_be_quantised);
  check_mask_types(in);
  check_blocks(in, o);
  check_score_arguments(in, o);
  check_list_arguments(in);

  check_dropout(o.dropout_p);
  if (const Tensor* seed = present(in.dropout_seed)) {
    check_seed(*seed, in.query.device());
  } else {
    TORCH_CHECK_VALUE(!needs_seed || o.dropout_p == 0, "dropout_seed: got None with dropout_p = ", o.dropout_p,
                      "; needs a torch.int64 tensor of shape (2,)");
  }
  TORCH_CHECK_VALUE(!o.scale || std::isfinite(*o.scale), "scale: got ", *o.scale, "; needs a finite number");
  TORCH_CHECK_VALUE(!o.softcap || (*o.softcap > 0 && std::isfinite(*o.softcap)), "softcap: got ", *o.softcap,
                    "; needs a finite number above 0, or None for no cap");
  TORCH_CHECK_VALUE(!o.masked_score || *o.masked_score < INFINITY, "masked_score: got ", *o.masked_score,
                    "; needs a finite number or -inf");
  check_positions(o);
}

PositionMask position_mask(const AttentionOptions& o, int64_t query_length, int64_t key_length) {
  const auto bounded = [](const c10::SymInt& number) { return min(number.expect_int(), kUnbounded); };
  PositionMask mask{};
  mask.diagonal = o.causal_alignment == "lower_right" ? key_length - query_length : 0;
  mask.window_left = o.window_left ? bounded(*o.window_left) : kUnbounded;
  mask.window_right = o.window_right ? bounded(*o.window_right) : kUnbounded;
  if (o.is_causal) mask.window_right = 0;
  if (!o.part.empty()) mask.diagonal = o.part[0].expect_int();
  return mask;
}

}  // namespace scaledot
