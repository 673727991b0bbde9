#include "ops/sdpa/checks.h"

#include <c10/util/Exception.h>

#include "core/saved.h"
#include "ops/common/checks.h"

namespace scaledot {
namespace {

// The k-th size from the last, which is the first.
template <class Int>
Int from_last(const Tensor& tensor, size_t k) {
  const auto sizes = sizes_of<Int>(tensor);
  return sizes[sizes.size() - k];
}

// (..., heads, query_length, columns)
template <class Int>
c10::SmallVector<Int, 5> saved_softmax_sizes(const SdpaInputs& in, const AttentionOptions& o,
                                             const c10::SymInt& saved_keys, const Shapes<Int>& shapes) {
  const at::ScalarType type = in.query.scalar_type();
  TORCH_CHECK_VALUE(!has_output_low(dtype_of(type)), "saved_keys: got a number for ", dtype_name(type),
                    "; needs None, or torch.float32 or torch.float64");
  TORCH_CHECK_VALUE(in.query.device().is_cpu() || in.query.device().is_meta(), "saved_keys: got a tensor on ",
                    in.query.device(), "; needs a CPU");
  TORCH_CHECK_VALUE(!o.softcap && o.part.empty() && !present(in.score_program),
                    "saved_keys: got a number with softcap, part or a score function; needs None");
  const Int keys = as_int<Int>(saved_keys);
  TORCH_CHECK_VALUE(keys > 0 && (keys == shapes.key_length || (keys < shapes.key_length && keys % kSavedTile == 0)),
                    "saved_keys: got ", keys, "; needs the ", shapes.key_length, " keys, or fewer in a multiple of ",
                    kSavedTile);
  auto sizes = shapes.weights();
  sizes.back() = (keys + (kSavedUnit - 1)) / kSavedUnit * kSavedUnit;
  return sizes;
}

// Checks what the forward saved for the backward.
template <class Int>
void check_saved(const SdpaBackwardArgs& args, const Shapes<Int>& shapes) {
  const Tensor& query = args.inputs.query;
  const Tensor* saved = present(args.saved);
  if (!args.saved_keys) {
    if (saved) check_has_low_part(query, "saved", "a tensor without saved_keys");
    return check_result<Int>(saved, "saved", shapes.output(), query.scalar_type(), query);
  }
  TORCH_CHECK_VALUE(saved && !present(args.grad_weights),
                    "saved_keys: got a number without saved, or with grad_weights; needs what the forward saved");
  check_result<Int>(saved, "saved", saved_softmax_sizes(args.inputs, args.options, *args.saved_keys, shapes),
                    lse_dtype(query.scalar_type()), query);
  if constexpr (std::is_same_v<Int, int64_t>)
    TORCH_CHECK_VALUE(saved->numel() == 0 || saved->stride(-1) == 1, "saved: got a last stride of ", saved->stride(-1),
                      "; needs 1");
}

}  // namespace

template <class Int>
c10::SmallVector<Int, 5> returned_sizes(const SdpaArgs& args, const Shapes<Int>& shapes) {
  TORCH_CHECK_VALUE(args.return_weights || !args.average_weights,
                    "average_weights: got True without return_weights; needs both");
  TORCH_CHECK_VALUE(shapes.has_heads || !args.average_weights,
                    "average_weights: got 2-D inputs; needs a dimension of heads to average over");
  if (!args.return_weights) return {Int(0)};
  auto sizes = shapes.weights();
  if (args.average_weights) sizes.erase(sizes.end() - 3);
  return sizes;
}

template <class Int>
c10::SmallVector<Int, 5> output_strides(const SdpaArgs& args, const Shapes<Int>& shapes) {
  if (args.output_strides.empty()) return shapes.output_strides();
  const auto sizes = shapes.output();
  c10::SmallVector<Int, 5> strides;
  for (const c10::SymInt& stride : args.output_strides) strides.push_back(as_int<Int>(stride));
  TORCH_CHECK_VALUE(strides.size() == sizes.size(), "output_strides: got ", strides.size(), "; needs ", sizes.size());
  return strides;
}

template <class Int>
c10::SmallVector<Int, 5> saved_sizes(const SdpaRecordedArgs& args, const Shapes<Int>& shapes) {
  if (args.save_output_low) {
    check_has_low_part(args.inputs.query, "save_output_low", "True");
    TORCH_CHECK_VALUE(!args.saved_keys, "save_output_low: got True with saved_keys; needs one of them");
    return shapes.output();
  }
  if (!args.saved_keys) return {Int(0)};
  TORCH_CHECK_VALUE(!args.return_weights, "saved_keys: got a number with return_weights; needs None");
  return saved_softmax_sizes(args.inputs, args.options, *args.saved_keys, shapes);
}

at::ScalarType saved_dtype(const SdpaRecordedArgs& args) {
  const at::ScalarType type = args.inputs.query.scalar_type();
  return args.saved_keys ? lse_dtype(type) : type;
}

template <class Int>
void check_backward(const SdpaBackwardArgs& args, const Shapes<Int>& shapes) {
  const Tensor& query = args.inputs.query;
  const at::ScalarType type = query.scalar_type();
  const auto output = shapes.output(), lse = shapes.lse();
  check_result<Int>(present(args.grad_output), "grad_output", output, type, query);
  check_result<Int>(present(args.grad_lse), "grad_lse", lse, lse_dtype(type), query);
  check_result<Int>(&args.output, "output", output, type, query);
  check_result<Int>(&args.lse, "lse", lse, lse_dtype(type), query);
  if (present(args.grad_weights) || present(args.weights)) {
    const auto weights = shapes.weights();
    check_result<Int>(present(args.grad_weights), "grad_weights", weights, type, query);
    check_result<Int>(present(args.weights), "weights", weights, type, query);
  }
  check_saved(args, shapes);
  const Tensor* mask = present(args.inputs.attn_mask);
  TORCH_CHECK_VALUE(!args.output_mask[3] || (mask && mask->is_floating_point()),
                    "output_mask: got a request for grad_mask; needs a floating attn_mask");
  TORCH_CHECK_VALUE(!args.output_mask[4] || present(args.inputs.relative_bias),
                    "output_mask: got a request for grad_relative_bias; needs a relative_bias");
  TORCH_CHECK_VALUE(!args.output_mask[5] || present(args.inputs.score_numbers),
                    "output_mask: got a request for grad_score_numbers; needs score_numbers");
}

template <class Int>
MaskShapes<Int> check_mask(const SdpaMaskArgs& args) {
  check_strided(args.query, "query");
  check_strided(args.key, "key");
  check_dims(args.query, "query");
  check_dims(args.key, "key");
  check_positions(args.options);
  MaskShapes<Int> shapes{from_last<Int>(args.query, 2), from_last<Int>(args.key, 2), {}};
  if (const Tensor* slopes = present(args.alibi_slopes)) {
    check_strided(*slopes, "alibi_slopes");
    TORCH_CHECK_TYPE(is_kernel_float(slopes->scalar_type()), "alibi_slopes: got dtype ",
                     dtype_name(slopes->scalar_type()), "; needs ", kFloats);
    const auto sizes = sizes_of<Int>(*slopes);
    const auto heads_in = [](const Tensor& t) { return t.dim() > 2 ? from_last<Int>(t, 3) : Int(1); };
    const Int query_heads = heads_in(args.query), heads = query_heads == 1 ? heads_in(args.key) : query_heads;
    TORCH_CHECK_VALUE(!sizes.empty() && (sizes.back() == heads || sizes.back() == 1), "alibi_slopes: got shape ",
                      shape_of(*slopes), "; needs (heads,) or (batch, heads) with ", heads, " heads");
    shapes.bias.append(sizes.begin(), sizes.end());
    shapes.bias.push_back(shapes.query_length);
    shapes.bias.push_back(shapes.key_length);
  } else {
    shapes.bias.push_back(Int(0));
  }
  return shapes;
}

void check_dropout_mask(const DropoutMaskArgs& args) {
  check_strided(args.seed, "seed");
  check_seed(args.seed, args.seed.device());
  check_dropout(args.dropout_p);
  const auto check = [](const c10::SymInt& size, const char* name) {
    TORCH_CHECK_VALUE(size >= 0, name, ": got ", size, "; needs a number of at least 0");
  };
  check(args.batch, "batch");
  check(args.heads, "heads");
  check(args.query_length, "query_length");
  check(args.key_length, "key_length");
  const c10::SymInt seeds = args.seed.sym_numel() / 2;
  TORCH_CHECK_VALUE(seeds > 0 ? args.batch % seeds == 0 : args.batch == 0, "seed: got shape ", shape_of(args.seed),
                    "; needs (2,) or a number of seeds that divides batch, ", args.batch);
}

template c10::SmallVector<int64_t, 5> returned_sizes(const SdpaArgs&, const Shapes<int64_t>&);
template c10::SmallVector<c10::SymInt, 5> returned_sizes(const SdpaArgs&, const Shapes<c10::SymInt>&);
template c10::SmallVector<int64_t, 5> output_strides(const SdpaArgs&, const Shapes<int64_t>&);
template c10::SmallVector<c10::SymInt, 5> output_strides(const SdpaArgs&, const Shapes<c10::SymInt>&);
template c10::SmallVector<int64_t, 5> saved_sizes(const SdpaRecordedArgs&, const Shapes<int64_t>&);
template c10::SmallVector<c10::SymInt, 5> saved_sizes(const SdpaRecordedArgs&, const Shapes<c10::SymInt>&);
template void check_backward(const SdpaBackwardArgs&, const Shapes<int64_t>&);
template void check_backward(const SdpaBackwardArgs&, const Shapes<c10::SymInt>&);
template MaskShapes<int64_t> check_mask(const SdpaMaskArgs&);
template MaskShapes<c10::SymInt> check_mask(const SdpaMaskArgs&);

}  // namespace scaledot
