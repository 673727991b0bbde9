#include "ops/varlen/checks.h"

#include <c10/util/Exception.h>

#include "core/varlen.h"
#include "ops/common/checks.h"
#include "ops/common/shapes.h"

namespace scaledot {
namespace {

template <class Int>
Int size_of(const Tensor& tensor, int64_t dim) {
  if constexpr (std::is_same_v<Int, int64_t>) {
    return tensor.size(dim);
  } else {
    return tensor.sym_size(dim);
  }
}

// The fields of Pages and Packed that callers see as tensors of integers.
void check_integers(const Tensor& tensor, const char* name, int64_t dims, const char* shape, const Tensor& query) {
  check_strided(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name, ": got dtype ",
                   dtype_name(tensor.scalar_type()), "; needs torch.int32 or torch.int64");
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": got shape ", shape_of(tensor), "; needs ", shape);
  check_on_device(tensor, name, query);
}

void check_dims(const Tensor& tensor, const char* name, int64_t dims, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": got shape ", shape_of(tensor), "; needs ", shape);
}

template <class Int>
void check_keys(const VarlenInputs& in, bool paged, const VarlenShapes<Int>& s) {
  const char* const shape =
      paged ? "(pages, page_size, kv_heads, head_dim), as block_table is given" : "(total_k, kv_heads, head_dim)";
  const int64_t dims = paged ? 4 : 3;
  check_dims(in.key, "key", dims, shape);
  check_dims(in.value, "value", dims, shape);
  TORCH_CHECK_VALUE(size_of<Int>(in.key, -1) == s.head_dim, "key: got shape ", shape_of(in.key),
                    "; needs query's last dimension, ", s.head_dim);
  for (int64_t d = 0; d < dims - 1; ++d)
    TORCH_CHECK_VALUE(size_of<Int>(in.value, d) == size_of<Int>(in.key, d), "value: got shape ", shape_of(in.value),
                      "; needs key's, ", shape_of(in.key), ", except for the last dimension");
  TORCH_CHECK_VALUE(!paged || size_of<Int>(in.key, 1) > 0, "key: got shape ", shape_of(in.key),
                    "; needs pages of at least one row");
}

template <class Int>
void check_heads(const AttentionOptions& o, const VarlenShapes<Int>& s) {
  TORCH_CHECK_VALUE(o.enable_gqa || s.heads == s.kv_heads, "key: got ", s.kv_heads, " heads; needs query's ", s.heads,
                    "; pass enable_gqa=True for heads in groups that share a KV head");
  TORCH_CHECK_VALUE(s.kv_heads > 0 ? s.heads % s.kv_heads == 0 : s.heads == 0, "key: got ", s.kv_heads,
                    " heads; needs with enable_gqa a number that divides query's ", s.heads, " heads");
}

template <class Int>
void check_lengths(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* table = present(in.block_table);
  if (const Tensor* cu_seq_k = present(in.cu_seq_k)) {
    TORCH_CHECK_VALUE(!table,
                      "cu_seq_k: got a tensor; needs None with block_table, where seqused_k gives the number of keys");
    check_integers(*cu_seq_k, "cu_seq_k", 1, "(sequences + 1,)", in.query);
    TORCH_CHECK_VALUE(size_of<Int>(*cu_seq_k, 0) == s.sequences + 1, "cu_seq_k: got ", cu_seq_k->sym_size(0),
                      " numbers; needs cu_seq_q's ", s.sequences + 1);
  } else {
    TORCH_CHECK_VALUE(table,
                      "cu_seq_k: got None; needs a tensor of shape (sequences + 1,) unless block_table is given");
  }
  if (const Tensor* used = present(in.seqused_k)) {
    check_integers(*used, "seqused_k", 1, "(sequences,)", in.query);
    TORCH_CHECK_VALUE(size_of<Int>(*used, 0) == s.sequences, "seqused_k: got ", used->sym_size(0),
                      " numbers; needs one for each of the ", s.sequences, " sequences");
  } else {
    TORCH_CHECK_VALUE(!table, "seqused_k: got None; needs with block_table a tensor of shape (sequences,)");
  }
  if (!table) return;
  check_integers(*table, "block_table", 2, "(sequences, pages of a sequence)", in.query);
  TORCH_CHECK_VALUE(size_of<Int>(*table, 0) == s.sequences, "block_table: got shape ", shape_of(*table),
                    "; needs a row for each of the ", s.sequences, " sequences");
}

template <class Int>
void check_slopes(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* slopes = present(in.alibi_slopes);
  if (!slopes) return;
  const bool fits = (slopes->dim() == 1 || (slopes->dim() == 2 && size_of<Int>(*slopes, 0) == s.sequences)) &&
                    size_of<Int>(*slopes, -1) == s.heads;
  TORCH_CHECK_VALUE(fits, "alibi_slopes: got shape ", shape_of(*slopes), "; needs (heads,) or (sequences, heads) with ",
                    s.heads, " heads and ", s.sequences, " sequences");
}

// k_scale or v_scale.
template <class Int>
void check_scale(const OptionalTensor& given, const char* name, const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* scale = present(given);
  if (!scale) return;
  TORCH_CHECK_VALUE(is_quantised(in.key), name, ": got a tensor while key has dtype ", dtype_name(in.key.scalar_type()),
                    "; needs None, or key and value of 8 bits");
  check_strided(*scale, name);
  TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat, name, ": got dtype ", dtype_name(scale->scalar_type()),
                   "; needs torch.float32");
  check_on_device(*scale, name, in.query);
  const int64_t dims = scale->dim();
  const bool fits = dims == 0 || (dims <= 2 && size_of<Int>(*scale, -1) == s.kv_heads &&
                                  (dims == 1 || size_of<Int>(*scale, 0) == s.sequences));
  TORCH_CHECK_VALUE(fits, name, ": got shape ", shape_of(*scale),
                    "; needs (), (kv_heads,) or (sequences, kv_heads) with ", s.kv_heads, " KV heads and ", s.sequences,
                    " sequences");
}

// Quantised keys and values.
template <class Int>
void check_quantised(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  if (is_quantised(in.key) || is_quantised(in.value)) {
    TORCH_CHECK_TYPE(in.value.scalar_type() == in.key.scalar_type(), "value: got dtype ",
                     dtype_name(in.value.scalar_type()), "; needs key's dtype, ", dtype_name(in.key.scalar_type()));
    TORCH_CHECK_TYPE(in.query.scalar_type() != at::kDouble, "query: got dtype torch.float64 while key has dtype ",
                     dtype_name(in.key.scalar_type()), "; needs torch.float32, torch.bfloat16 or torch.float16");
  }
  check_scale(in.k_scale, "k_scale", in, s);
  check_scale(in.v_scale, "v_scale", in, s);
}

template <class Int>
void check_relative_bias(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* bias = present(in.relative_bias);
  if (!bias) return;
  const int64_t dims = bias->dim();
  const auto fits = [&](int64_t from_last, const Int& size) {
    return dims < from_last || size_of<Int>(*bias, -from_last) == 1 || size_of<Int>(*bias, -from_last) == size;
  };
  TORCH_CHECK_VALUE(dims >= 1 && dims <= 3 && fits(2, s.heads) && fits(3, s.sequences), "relative_bias: got shape ",
                    shape_of(*bias), "; needs one that broadcasts to (sequences, heads, 2 M + 1) with ", s.heads,
                    " heads and ", s.sequences, " sequences");
  check_distance_count(*bias);
}

template <class Int>
void check_tree_mask(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* mask = present(in.attn_mask);
  if (!mask) return;
  const int64_t dims = mask->dim();
  const bool fits = (dims == 2 || (dims == 3 && (size_of<Int>(*mask, 0) == s.heads || size_of<Int>(*mask, 0) == 1))) &&
                    size_of<Int>(*mask, -2) == s.total_q && size_of<Int>(*mask, -1) > 0;
  TORCH_CHECK_VALUE(fits, "attn_mask: got shape ", shape_of(*mask),
                    "; needs (total_q, W) or (heads or 1, total_q, W) with ", s.total_q, " query rows, ", s.heads,
                    " heads and a column for each of the last W keys of a sequence, W at least 1");
}

template <class Int>
void check_seeds(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* seed = present(in.dropout_seed);
  if (!seed) return;
  bool fits = seed->dim() <= 2;
  if (fits && seed->dim() == 2) {
    const Int seeds = size_of<Int>(*seed, 0);
    fits = seeds > 0 ? s.sequences % seeds == 0 : s.sequences == 0;
  }
  TORCH_CHECK_VALUE(fits, "dropout_seed: got shape ", shape_of(*seed),
                    "; needs (2,) or (seeds, 2) with a number of seeds that divides that of the sequences, ",
                    s.sequences);
}

// cu_seq_q or cu_seq_k, number by number.
void check_bounds(const IndexView& cu_seq, const char* name, const Problem& p, int64_t total, const char* tensor) {
  TORCH_CHECK_VALUE(index_at(cu_seq, 0) == 0, name, ": got ", index_at(cu_seq, 0),
                    " as its first number; needs 0, and then the end of each sequence");
  for (int64_t b = 0; b < p.batch; ++b)
    TORCH_CHECK_VALUE(index_at(cu_seq, b) <= index_at(cu_seq, b + 1), name, ": got ", index_at(cu_seq, b), " and then ",
                      index_at(cu_seq, b + 1), " at index ", b + 1, "; needs numbers that never decrease");
  TORCH_CHECK_VALUE(index_at(cu_seq, p.batch) == total, name, ": got ", index_at(cu_seq, p.batch),
                    " as its last number; needs the number of rows of ", tensor, ", ", total);
}

void check_pages(const Problem& p, int64_t b, int64_t keys) {
  const Pages& pages = p.pages;
  for (int64_t k = 0; k < ceil_div(keys, pages.size); ++k) {
    const int64_t page = index_at(pages.table, b * pages.table_stride + k);
    TORCH_CHECK_VALUE(page >= 0 && page < pages.pool, "block_table: got page ", page, " at [", b, ", ", k,
                      "]; needs a number from 0 to ", pages.pool - 1);
  }
}

}  // namespace

template <class Int>
VarlenShapes<Int> check_varlen(const VarlenArgs& args, bool needs_seed) {
  const VarlenInputs& in = args.inputs;
  check_arguments({.query = in.query,
                   .key = in.key,
                   .value = in.value,
                   .attn_mask = in.attn_mask,
                   .alibi_slopes = in.alibi_slopes,
                   .dropout_seed = in.dropout_seed,
                   .relative_bias = in.relative_bias},
                  args.options, needs_seed, /*may_be_quantised=*/true);
  check_dims(in.query, "query", 3, "(total_q, heads, head_dim)");
  check_integers(in.cu_seq_q, "cu_seq_q", 1, "(sequences + 1,)", in.query);
  TORCH_CHECK_VALUE(size_of<Int>(in.cu_seq_q, 0) >= 1, "cu_seq_q: got shape (0,); needs (sequences + 1,)");
  const bool paged = present(in.block_table) != nullptr;
  VarlenShapes<Int> s;
  s.sequences = size_of<Int>(in.cu_seq_q, 0) - 1;
  s.total_q = size_of<Int>(in.query, 0);
  s.heads = size_of<Int>(in.query, 1);
  s.head_dim = size_of<Int>(in.query, 2);
  check_keys(in, paged, s);
  s.total_k = paged ? Int(0) : size_of<Int>(in.key, 0);
  s.kv_heads = size_of<Int>(in.key, -2);
  s.value_dim = size_of<Int>(in.value, -1);
  check_heads(args.options, s);
  check_lengths(in, s);
  check_slopes(in, s);
  check_relative_bias(in, s);
  check_tree_mask(in, s);
  check_quantised(in, s);
  check_seeds(in, s);
  TORCH_CHECK_VALUE(args.max_q >= 0, "max_q: got ", args.max_q, "; needs a number of at least 0");
  TORCH_CHECK_VALUE(args.max_k >= 0, "max_k: got ", args.max_k, "; needs a number of at least 0");
  TORCH_CHECK_VALUE(!args.num_splits || *args.num_splits >= 1, "num_splits: got ", *args.num_splits,
                    "; needs a number of at least 1, or None");
  return s;
}

template <class Int>
void check_varlen_backward(const VarlenBackwardArgs& args, const VarlenShapes<Int>& shapes) {
  const Tensor& query = args.inputs.query;
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !present(args.inputs.block_table),
      "block_table: got a tensor in a backward; needs None, as keys and values in pages have no gradient");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_quantised(args.inputs.key), "key: got dtype ",
                              dtype_name(args.inputs.key.scalar_type()), " in a backward; needs query's dtype, ",
                              dtype_name(type), ", as quantised keys and values have no gradient");
  TORCH_CHECK_VALUE(!args.output_mask[3] || present(args.inputs.relative_bias),
                    "output_mask: got a request for grad_relative_bias; needs a relative_bias");
  const Tensor* mask = present(args.inputs.attn_mask);
  TORCH_CHECK_VALUE(!args.output_mask[4] || (mask && mask->is_floating_point()),
                    "output_mask: got a request for grad_attn_mask; needs a floating attn_mask");
  check_result<Int>(present(args.grad_output), "grad_output", shapes.output(), type, query);
  check_result<Int>(present(args.grad_lse), "grad_lse", shapes.lse(), lse_dtype(type), query);
  check_result<Int>(&args.output, "output", shapes.output(), type, query);
  check_result<Int>(&args.lse, "lse", shapes.lse(), lse_dtype(type), query);
  if (present(args.saved)) check_has_low_part(query, "saved", "a tensor");
  check_result<Int>(present(args.saved), "saved", shapes.output(), type, query);
}

void check_varlen_recorded(const VarlenRecordedArgs& args) {
  if (args.save_output_low) check_has_low_part(args.inputs.query, "save_output_low", "True");
}

void check_sequences(const Problem& p) {
  check_bounds(p.packed.cu_seq_q, "cu_seq_q", p, p.packed.total_q, "query");
  if (p.packed.cu_seq_k.data) check_bounds(p.packed.cu_seq_k, "cu_seq_k", p, p.packed.total_k, "key");
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = rows_between(p.packed.cu_seq_q, b, p.packed.total_q).count, slot = key_slot(p, b).count;
    TORCH_CHECK_VALUE(rows <= p.query_length, "max_q: got ", p.query_length, "; needs at least ", rows,
                      ", the length of sequence ", b);
    int64_t keys = slot;
    if (p.packed.seqused_k.data) {
      keys = index_at(p.packed.seqused_k, b);
      TORCH_CHECK_VALUE(keys >= 0 && keys <= slot, "seqused_k: got ", keys, " for sequence ", b,
                        "; needs a number from 0 to ", slot, ", the keys that it has room for");
    }
    TORCH_CHECK_VALUE(keys <= p.key_length, "max_k: got ", p.key_length, "; needs at least ", keys,
                      ", the number of keys of sequence ", b);
    if (is_paged(p)) check_pages(p, b, keys);
  }
}

template VarlenShapes<int64_t> check_varlen(const VarlenArgs&, bool);
template VarlenShapes<c10::SymInt> check_varlen(const VarlenArgs&, bool);
template void check_varlen_backward(const VarlenBackwardArgs&, const VarlenShapes<int64_t>&);
template void check_varlen_backward(const VarlenBackwardArgs&, const VarlenShapes<c10::SymInt>&);

}  // namespace scaledot
