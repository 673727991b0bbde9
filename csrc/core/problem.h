// Problem: everything an attention kernel needs, and nothing of torch.
//
// One Problem describes one call (forward or backward). Every field is plain data, and a Problem is trivially copyable,
// so it can be passed by value to a CUDA kernel. Fields have the names of the ops' schemas and of the case library.
//
// Logical shapes, with (...) the broadcast batch dimensions:
//   query (..., heads, query_length, head_dim)      output (..., heads, query_length, value_dim)
//   key   (..., kv_heads, key_length, head_dim)     lse    (..., heads, query_length)
//   value (..., kv_heads, key_length, value_dim)    weights, attn_mask (..., heads, query_length, key_length)
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define SCALEDOT_HOST_DEVICE __host__ __device__
#else
#define SCALEDOT_HOST_DEVICE
#endif
// Every function in core/ has internal linkage. Otherwise the linker could keep the copy of a shared inline function
// that was compiled for AVX-512, also for the default code: an illegal instruction on older CPUs. constexpr, so that
// static_assert can check index arithmetic.
#define SCALEDOT_FN SCALEDOT_HOST_DEVICE static inline constexpr

namespace scaledot {

// Those of 8 bits, without boolean, are those of quantised keys and values; int32 and int64 those of key_indices.
enum class DType : uint8_t {
  none,
  float32,
  float64,
  bfloat16,
  float16,
  boolean,
  float8_e4m3fn,
  float8_e5m2,
  int8,
  int32,
  int64
};

constexpr int kMaxBatchDims = 6;
constexpr int64_t kUnbounded = INT64_MAX / 4;  // a window side without a limit; far enough from overflow to add to

// A strided tensor: up to kMaxBatchDims batch dimensions, then head, row and column. Strides count elements. They are 0
// along a broadcast dimension, so nothing is ever expanded in memory. data == nullptr: the tensor is absent.
struct TensorView {
  void* data;
  int64_t batch_stride[kMaxBatchDims];
  int64_t head_stride;
  int64_t row_stride;
  int64_t col_stride;
  DType dtype;
};

// An array of int32 or int64. data == nullptr: it is absent.
struct IndexView {
  const void* data;
  bool wide;  // int64
};

SCALEDOT_FN int64_t index_at(const IndexView& view, int64_t k) {
  return view.wide ? static_cast<const int64_t*>(view.data)[k] : static_cast<const int32_t*>(view.data)[k];
}

// Keys and values in pages of a pool: row j of a sequence is row j % size of page table[j / size]. Forward only.
struct Pages {
  IndexView table;
  int64_t table_stride;  // from sequence to sequence
  int64_t table_length;  // pages of a sequence
  int64_t pool;          // pages in the pool
  int64_t size;          // rows of a page; 0: no pages, rows are row_stride apart
  int64_t key_stride;    // from page to page
  int64_t value_stride;
};

// The bits of the partial blocks of a block mask: (count, block_rows, words of 64 keys). core/block_mask.h reads them.
struct BlockBits {
  const uint64_t* words;
  int64_t count;
};

// Sequences of different lengths, one after the other in the rows of query, key and value. Such a Problem has `batch`
// sequences. query_length and key_length are upper bounds, and only alibi_slopes and relative_bias have a batch
// dimension. attn_mask is (..., heads, rows of query, mask_keys). core/varlen.h makes an ordinary Problem of each
// sequence, and kernels see only these: on the CPU they run one by one, on a GPU a block makes one.
struct Packed {
  // (batch + 1): sequence b has the rows [cu_seq_q[b], cu_seq_q[b + 1]). Absent: the problem is not packed.
  IndexView cu_seq_q;
  IndexView cu_seq_k;   // the same for keys; absent if keys are in pages
  IndexView seqused_k;  // (batch): how many of its keys a sequence uses; absent: all
  int64_t total_q;      // rows of query
  int64_t total_k;      // rows of key
  int64_t num_splits;   // the most parts into which a GPU may split the keys of a sequence; 0: no limit
  int64_t mask_keys;    // columns of attn_mask, which are of the last keys of a sequence
  bool lower_right;     // position.diagonal of a sequence: key_length - query_length instead of 0
};

// The keys that a query may attend to by position. Distance counts from the aligned diagonal: j - (i + diagonal).
struct PositionMask {
  int64_t diagonal;      // 0: upper_left; key_length - query_length: lower_right
  int64_t window_left;   // attends while distance >= -window_left; kUnbounded: no limit
  int64_t window_right;  // attends while distance <= window_right; is_causal makes it at most 0
};

// The distances that relative_bias has an entry for, both ends included. Those beyond have the entry of the nearer end.
struct DistanceRange {
  int64_t low, high;
};

// The place of a call in a larger attention that is computed in several calls, for example on several machines: the
// numbers that its first row, key, batch entry and head have there. Dropout counts from them, so that all parts
// together drop the same weights as one call. PositionMask::diagonal aligns positions. In the backward of a part,
// output and lse are over all keys.
struct Part {
  bool given;
  int64_t row, key, batch, head;
  int64_t heads;  // of the larger attention
};

struct ScoreProgram;  // core/score_program.h

struct Problem {
  // Sizes.
  int32_t batch_dims;
  int64_t batch_sizes[kMaxBatchDims];
  int64_t batch;  // product of batch_sizes
  int64_t heads;
  int64_t kv_heads;  // divides heads; query head h reads key and value head h / (heads / kv_heads)
  int64_t query_length;
  int64_t key_length;
  int64_t head_dim;
  int64_t value_dim;
  // The dtype of query, key, value, output, weights and the gradients of the first three. Packed keys and values may
  // have a dtype of 8 bits instead (is_quantised), forward only.
  DType dtype;

  // The formula.
  double scale;
  double softcap;  // 0: none
  double masked_score;
  double dropout_p;  // in [0, 1]
  PositionMask position;
  DistanceRange relative_range;  // of relative_bias
  Part part;
  const ScoreProgram* score_program;  // of the score function; nullptr: none. CPU only
  bool row_invariant;                 // CPU: a row's bits depend on nothing but its query, keys, values and options
  const int64_t* dropout_seed;        // (seed, offset) pairs; in host memory for CPU kernels, device memory for CUDA
  int64_t dropout_batch;              // batches that share a pair; 0: all share one
  int64_t dropout_offset;             // added to the offset: the number of a packed sequence, otherwise 0
  Packed packed;
  Pages pages;
  int64_t first_row;  // of a packed sequence, among the rows of all sequences; otherwise 0

  // Inputs. attn_mask: boolean (true = attend) or any floating dtype (added to the score).
  TensorView query;
  TensorView key;
  TensorView value;
  // Scales of quantised keys and values: number = stored * scale. float32, row and column strides 0; absent: 1.
  TensorView k_scale;
  TensorView v_scale;
  TensorView attn_mask;
  // The first key that attn_mask and grad_mask have an element for: those before it are allowed, and nothing is added
  // to their scores. 0 except for packed sequences, where `data` may point before the elements (core/varlen.h).
  int64_t mask_begin;
  TensorView alibi_slopes;  // row and column strides 0; float32 or float64
  // (..., heads, entries): a number for each distance of relative_range, in order. Row stride 0, column stride 1;
  // float32, or float64 for float64.
  TensorView relative_bias;
  // A block mask: the int32 number of each block, (..., heads, blocks of rows, blocks of keys).
  TensorView blocks;
  BlockBits block_bits;
  int64_t block_rows, block_keys;  // the sizes of a block
  // The keys that each row attends to, int32 or int64: (..., heads / heads_per_list, query_length, list_length). A
  // negative entry is none. Then weights has a column for each entry of the list. CPU only.
  TensorView key_indices;
  int64_t list_length;
  int64_t heads_per_list;  // 1, heads / kv_heads or heads; 0: no key_indices

  // Outputs of the forward, inputs of the backward. lse is float32 (float64 for float64) with column stride 0.
  TensorView output;
  TensorView lse;
  // The part that rounding to 16 bits took off output, in its dtype: output + low part is nearly the exact sum. A
  // forward saves it for its backward (core/saved.h). Absent: unknown. Column stride 1.
  TensorView output_low;
  // After dropout. Absent unless requested. With a head stride of 0: the mean over the heads (forward only).
  TensorView weights;

  // The backward. Any of these may be absent: an absent grad_output counts as zero, an absent grad_query is not
  // computed.
  TensorView grad_output;
  TensorView grad_lse;
  TensorView grad_weights;
  TensorView grad_query;
  TensorView grad_key;
  TensorView grad_value;
  TensorView grad_mask;           // strides 0 where attn_mask is broadcast: gradients are summed over those dimensions
  TensorView grad_relative_bias;  // the same; otherwise as relative_bias

  // The softmax that a forward saves for its backward (core/saved.h): (..., heads, query_length, columns), of lse's
  // dtype, column stride 1. Absent: nothing. CPU only.
  TensorView saved_softmax;
  int64_t saved_keys;  // the first keys of each row
};

// The entries of relative_bias for each head.
SCALEDOT_FN int64_t relative_entries(const Problem& p) { return p.relative_range.high - p.relative_range.low + 1; }

SCALEDOT_FN bool is_paged(const Problem& p) { return p.pages.size > 0; }
SCALEDOT_FN bool has_key_lists(const Problem& p) { return p.heads_per_list > 0; }
SCALEDOT_FN bool is_packed(const Problem& p) { return p.packed.cu_seq_q.data != nullptr; }

SCALEDOT_FN bool is_quantised(DType dtype) {
  return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2 || dtype == DType::int8;
}
SCALEDOT_FN bool is_quantised(const Problem& p) { return is_quantised(p.key.dtype); }

SCALEDOT_FN bool averages_weights(const Problem& p) {
  return p.weights.data && p.heads > 1 && p.weights.head_stride == 0;
}

// Inverted dropout: each weight of the keep mask is multiplied by this. It is 0 if all weights are dropped.
SCALEDOT_FN double dropout_scale(double dropout_p) { return dropout_p < 1.0 ? 1.0 / (1.0 - dropout_p) : 0.0; }
SCALEDOT_FN double dropout_scale(const Problem& p) { return dropout_scale(p.dropout_p); }

// Whether the problem has any score: at least one row and one key.
SCALEDOT_FN bool has_scores(const Problem& p) { return p.batch * p.heads * p.query_length > 0 && p.key_length > 0; }

// Offset in elements of (batch, head, row 0, column 0).
SCALEDOT_FN int64_t offset(const Problem& p, const TensorView& view, int64_t batch, int64_t head) {
  int64_t result = head * view.head_stride;
#if defined(__CUDA_ARCH__)
  using Number = uint32_t;  // there are at most 2^31 blocks, and a 64-bit division takes four times the instructions
#pragma unroll 1            // most tensors have one batch dimension
#else
  using Number = int64_t;
#endif
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    const Number size = Number(p.batch_sizes[d]), index = Number(batch) / size;
    result += (batch - int64_t(index * size)) * view.batch_stride[d];
    batch = index;
  }
  return result;
}

template <class T>
SCALEDOT_FN T* element_ptr(const Problem& p, const TensorView& view, int64_t batch, int64_t head) {
  return view.data ? static_cast<T*>(view.data) + offset(p, view, batch, head) : nullptr;
}

// k_scale or v_scale of a KV head; 1 if it is absent. An infinite one counts as NaN: infinity times a stored 0 is NaN,
// but kernels multiply sums of stored numbers, which need not be 0.
SCALEDOT_FN double cache_scale(const Problem& p, const TensorView& scale, int64_t batch, int64_t kv_head) {
  if (!scale.data) return 1.0;
  const double x = double(*element_ptr<const float>(p, scale, batch, kv_head));
  return x - x == 0 ? x : __builtin_nan("");
}

SCALEDOT_FN int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
    case DType::boolean:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
    case DType::int8: return 1;
    default: return 0;
  }
}

template <class T>
SCALEDOT_FN T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
SCALEDOT_FN T max(T a, T b) {
  return a < b ? b : a;
}
SCALEDOT_FN int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
SCALEDOT_FN int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace scaledot
