// Every check of scaledot::varlen's own arguments; those that it shares with scaledot::sdpa are in ops/check.cpp.
#include <c10/util/Exception.h>

#include "core/varlen.h"
#include "ops/make_problem.h"
#include "ops/varlen_schema.h"

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
                   dtype_name(tensor.scalar_type()), "; needs int32 or int64");
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": got shape ", tensor.sym_sizes(), "; needs ", shape);
  TORCH_CHECK_VALUE(tensor.device() == query.device(), name, ": got a tensor on ", tensor.device(),
                    "; needs to be on query's device, ", query.device());
}

void check_dims(const Tensor& tensor, const char* name, int64_t dims, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": got shape ", tensor.sym_sizes(), "; needs ", shape);
}

template <class Int>
void check_keys(const VarlenInputs& in, bool paged, const VarlenShapes<Int>& s) {
  const char* const shape =
      paged ? "(pages, page_size, kv_heads, head_dim), as block_table is given" : "(total_k, kv_heads, head_dim)";
  const int64_t dims = paged ? 4 : 3;
  check_dims(in.key, "key", dims, shape);
  check_dims(in.value, "value", dims, shape);
  TORCH_CHECK_VALUE(size_of<Int>(in.key, -1) == s.head_dim, "key: got shape ", in.key.sym_sizes(),
                    ", its last dimension needs to be query's, ", s.head_dim);
  for (int64_t d = 0; d < dims - 1; ++d)
    TORCH_CHECK_VALUE(size_of<Int>(in.value, d) == size_of<Int>(in.key, d), "value: got shape ", in.value.sym_sizes(),
                      "; needs key's, ", in.key.sym_sizes(), ", but for the last dimension");
  TORCH_CHECK_VALUE(!paged || size_of<Int>(in.key, 1) > 0, "key: got shape ", in.key.sym_sizes(),
                    "; needs pages of at least one row");
}

template <class Int>
void check_heads(const VarlenOptionArgs& o, const VarlenShapes<Int>& s) {
  TORCH_CHECK_VALUE(o.enable_gqa || s.heads == s.kv_heads, "key: got ", s.kv_heads, " heads; needs query's ", s.heads,
                    "; pass enable_gqa=True for heads in groups that share a key and value head");
  TORCH_CHECK_VALUE(s.kv_heads > 0 ? s.heads % s.kv_heads == 0 : s.heads == 0, "key: got ", s.kv_heads,
                    " heads, with enable_gqa it needs a number that divides query's ", s.heads, " heads");
}

template <class Int>
void check_lengths(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* table = present(in.block_table);
  if (const Tensor* cu_seq_k = present(in.cu_seq_k)) {
    TORCH_CHECK_VALUE(!table,
                      "cu_seq_k: got a tensor; needs None where block_table is given: keys lie in pages, and seqused_k "
                      "says how many there are");
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
    TORCH_CHECK_VALUE(!table, "seqused_k: got None, block_table needs a tensor of shape (sequences,)");
  }
  if (!table) return;
  check_integers(*table, "block_table", 2, "(sequences, pages of a sequence)", in.query);
  TORCH_CHECK_VALUE(size_of<Int>(*table, 0) == s.sequences, "block_table: got shape ", table->sym_sizes(),
                    "; needs a row for each of the ", s.sequences, " sequences");
}

template <class Int>
void check_slopes(const VarlenInputs& in, const VarlenShapes<Int>& s) {
  const Tensor* slopes = present(in.alibi_slopes);
  if (!slopes) return;
  const bool fits = (slopes->dim() == 1 || (slopes->dim() == 2 && size_of<Int>(*slopes, 0) == s.sequences)) &&
                    size_of<Int>(*slopes, -1) == s.heads;
  TORCH_CHECK_VALUE(fits, "alibi_slopes: got shape ", slopes->sym_sizes(),
                    "; needs (heads,) or (sequences, heads) with ", s.heads, " heads and ", s.sequences, " sequences");
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
  TORCH_CHECK_VALUE(fits, "dropout_seed: got shape ", seed->sym_sizes(),
                    "; needs (2,) or (seeds, 2) with a number of seeds that divides that of the sequences, ",
                    s.sequences);
}

template <class Int>
void check_result(const Tensor& t, const char* name, const c10::SmallVector<Int, 5>& shape, at::ScalarType type,
                  const Tensor& query) {
  check_strided(t, name);
  bool fits = t.dim() == int64_t(shape.size());
  for (int64_t d = 0; fits && d < t.dim(); ++d) fits = size_of<Int>(t, d) == shape[d];
  TORCH_CHECK_VALUE(fits, name, ": got shape ", t.sym_sizes(), "; needs ", c10::ArrayRef<Int>(shape));
  TORCH_CHECK_TYPE(t.scalar_type() == type, name, ": got dtype ", dtype_name(t.scalar_type()), "; needs ",
                   dtype_name(type));
  TORCH_CHECK_VALUE(t.device() == query.device(), name, ": got a tensor on ", t.device(),
                    "; needs to be on query's device, ", query.device());
}

// cu_seq_q or cu_seq_k, number by number.
void check_bounds(const IndexView& cu_seq, const char* name, const Problem& p, int64_t total, const char* tensor) {
  TORCH_CHECK_VALUE(index_at(cu_seq, 0) == 0, name, ": starts with ", index_at(cu_seq, 0), "; needs to start with 0");
  for (int64_t b = 0; b < p.batch; ++b)
    TORCH_CHECK_VALUE(index_at(cu_seq, b) <= index_at(cu_seq, b + 1), name, ": goes down from ", index_at(cu_seq, b),
                      " to ", index_at(cu_seq, b + 1), " at number ", b + 1, "; needs numbers that never go down");
  TORCH_CHECK_VALUE(index_at(cu_seq, p.batch) == total, name, ": ends with ", index_at(cu_seq, p.batch),
                    "; needs to end with the number of rows of ", tensor, ", ", total);
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
VarlenShapes<Int> check_varlen(const VarlenInputs& in, const VarlenOptionArgs& o, bool needs_seed) {
  // What is said of sdpa's arguments does not look at shapes.
  const OptionalTensor no_mask;
  check_arguments({in.query, in.key, in.value, no_mask, in.alibi_slopes, in.dropout_seed}, o.of_sequence(), needs_seed);
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
  check_heads(o, s);
  check_lengths(in, s);
  check_slopes(in, s);
  check_seeds(in, s);
  TORCH_CHECK_VALUE(o.max_q >= 0, "max_q: got ", o.max_q, "; needs a number of at least 0");
  TORCH_CHECK_VALUE(o.max_k >= 0, "max_k: got ", o.max_k, "; needs a number of at least 0");
  TORCH_CHECK_VALUE(!o.num_splits || *o.num_splits >= 1, "num_splits: got ", *o.num_splits,
                    "; needs a number of at least 1, or None");
  return s;
}

template <class Int>
void check_varlen_backward(const VarlenBackwardArgs& args, const VarlenShapes<Int>& shapes) {
  const Tensor& query = args.inputs.query;
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !present(args.inputs.block_table),
      "block_table: keys and values in pages have no gradient; pass them packed, or without one");
  if (present(args.grad_output)) check_result<Int>(*args.grad_output, "grad_output", shapes.output(), type, query);
  if (present(args.grad_lse)) check_result<Int>(*args.grad_lse, "grad_lse", shapes.lse(), lse_dtype(type), query);
  check_result<Int>(args.output, "output", shapes.output(), type, query);
  check_result<Int>(args.lse, "lse", shapes.lse(), lse_dtype(type), query);
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

template VarlenShapes<int64_t> check_varlen(const VarlenInputs&, const VarlenOptionArgs&, bool);
template VarlenShapes<c10::SymInt> check_varlen(const VarlenInputs&, const VarlenOptionArgs&, bool);
template void check_varlen_backward(const VarlenBackwardArgs&, const VarlenShapes<int64_t>&);
template void check_varlen_backward(const VarlenBackwardArgs&, const VarlenShapes<c10::SymInt>&);

}  // namespace scaledot
