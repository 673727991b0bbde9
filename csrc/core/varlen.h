// From packed sequences to ordinary problems, for host and device.
#pragma once

#include "core/mask.h"

namespace scaledot {

SCALEDOT_FN int64_t clamped(int64_t x, int64_t least, int64_t most) { return min(max(x, least), most); }

struct RowSpan {
  int64_t first, count;
};

// The rows of sequence b. On the CPU the numbers were validated before. Not validated on a GPU (it would need a sync):
// bad values select wrong rows but never read out of bounds.
SCALEDOT_FN RowSpan rows_between(const IndexView& cu_seq, int64_t b, int64_t total) {
  const int64_t first = clamped(index_at(cu_seq, b), 0, total);
  return {first, clamped(index_at(cu_seq, b + 1), first, total) - first};
}

SCALEDOT_FN RowSpan query_rows(const Problem& packed, int64_t b) {
  const RowSpan rows = rows_between(packed.packed.cu_seq_q, b, packed.packed.total_q);
  return {rows.first, min(rows.count, packed.query_length)};
}

// The first key of sequence b, and how many keys there is room for. `first` is 0 if keys are in pages.
SCALEDOT_FN RowSpan key_slot(const Problem& packed, int64_t b) {
  if (is_paged(packed)) return {0, packed.pages.table_length * packed.pages.size};
  return rows_between(packed.packed.cu_seq_k, b, packed.packed.total_k);
}

SCALEDOT_FN RowSpan key_rows(const Problem& packed, int64_t b) {
  const RowSpan slot = key_slot(packed, b);
  const IndexView& used = packed.packed.seqused_k;
  const int64_t count = used.data ? clamped(index_at(used, b), 0, slot.count) : slot.count;
  return {slot.first, min(count, packed.key_length)};
}

// Points `view` to the element of `packed` that is `count` elements after the first one.
SCALEDOT_FN void skip_elements(TensorView& view, const TensorView& packed, int64_t count) {
  if (packed.data) view.data = static_cast<char*>(packed.data) + count * element_size(packed.dtype);
}
SCALEDOT_FN void skip_rows(TensorView& view, const TensorView& packed, int64_t rows) {
  skip_elements(view, packed, rows * packed.row_stride);
}

// Gives `p`, a copy of a packed problem or another of its sequences, the lengths of sequence b.
SCALEDOT_FN void narrow_lengths(const Problem& packed, RowSpan query, RowSpan key, Problem& p) {
  p.packed.cu_seq_q.data = nullptr;
  p.batch_dims = 0;
  p.batch = 1;
  p.query_length = query.count;
  p.key_length = key.count;
  p.position.diagonal = packed.packed.lower_right ? p.key_length - p.query_length : 0;
  p.first_row = query.first;
}

// Gives `p`, a copy of a packed problem or another of its sequences, the pages of sequence b, if any.
SCALEDOT_FN void narrow_pages(const Problem& packed, int64_t b, Problem& p) {
  if (!is_paged(packed)) return;
  const int64_t bytes = packed.pages.table.wide ? int64_t(sizeof(int64_t)) : int64_t(sizeof(int32_t));
  p.pages.table.data = static_cast<const char*>(packed.pages.table.data) + b * packed.pages.table_stride * bytes;
}

// Gives `p` the mask of its sequence. The last column is of the last key, so the element of key j is in column
// j - (key.count - mask_keys). With fewer columns than keys `data` points before the row, to where key 0 would be.
SCALEDOT_FN void narrow_mask(const Problem& packed, RowSpan query, RowSpan key, Problem& p) {
  const int64_t before = key.count - packed.packed.mask_keys;
  p.mask_begin = max<int64_t>(before, 0);
  const auto skip = [&](TensorView& view, const TensorView& all) {
    skip_elements(view, all, query.first * all.row_stride - before * all.col_stride);
  };
  skip(p.attn_mask, packed.attn_mask);
  skip(p.grad_mask, packed.grad_mask);
}

// Turns `p`, a copy of a packed problem or another of its sequences, into an ordinary problem of sequence b: batch 1,
// its lengths, pointers to its first rows. Dropout is that of a call on this sequence alone with the seed
// (seed[0], seed[1] + b). With several seeds, each belongs to dropout_batch consecutive sequences, and b counts within
// these.
SCALEDOT_FN void narrow_to_sequence(const Problem& packed, int64_t b, Problem& p) {
  const RowSpan query = query_rows(packed, b), key = key_rows(packed, b);
  narrow_lengths(packed, query, key, p);
  p.dropout_offset = b;
  if (packed.dropout_batch > 0) {
    p.dropout_seed = packed.dropout_seed + 2 * (b / packed.dropout_batch);
    p.dropout_offset = b % packed.dropout_batch;
  }
  skip_rows(p.query, packed.query, query.first);
  skip_rows(p.output, packed.output, query.first);
  skip_rows(p.output_low, packed.output_low, query.first);
  skip_rows(p.lse, packed.lse, query.first);
  skip_rows(p.grad_output, packed.grad_output, query.first);
  skip_rows(p.grad_lse, packed.grad_lse, query.first);
  skip_rows(p.grad_query, packed.grad_query, query.first);
  narrow_mask(packed, query, key, p);
  skip_rows(p.key, packed.key, key.first);
  skip_rows(p.value, packed.value, key.first);
  skip_rows(p.grad_key, packed.grad_key, key.first);
  skip_rows(p.grad_value, packed.grad_value, key.first);
  if (packed.batch_dims > 0) {
    skip_elements(p.k_scale, packed.k_scale, b * packed.k_scale.batch_stride[0]);
    skip_elements(p.v_scale, packed.v_scale, b * packed.v_scale.batch_stride[0]);
    skip_elements(p.alibi_slopes, packed.alibi_slopes, b * packed.alibi_slopes.batch_stride[0]);
    skip_elements(p.relative_bias, packed.relative_bias, b * packed.relative_bias.batch_stride[0]);
    skip_elements(p.grad_relative_bias, packed.grad_relative_bias, b * packed.grad_relative_bias.batch_stride[0]);
  }
  narrow_pages(packed, b, p);
}

static inline Problem sequence(const Problem& packed, int64_t b) {
  Problem p = packed;
  narrow_to_sequence(packed, b, p);
  trim_relative_bias(p);
  return p;
}

// Where row j of a sequence is: the page in the pool, and the row in the page.
struct PageRow {
  int64_t page;
  int row;
};
SCALEDOT_FN PageRow page_row(const Pages& pages, int64_t j) {
  const uint32_t row = uint32_t(j), size = uint32_t(pages.size);  // 64-bit division is slow on a GPU
  return {clamped(index_at(pages.table, row / size), 0, pages.pool - 1), int(row % size)};
}

// Offset in elements of row j of key or value, from the start of its head. `page_stride`: pages.key_stride or
// value_stride.
SCALEDOT_FN int64_t paged_row(const Pages& pages, int64_t page_stride, int64_t row_stride, int64_t j) {
  const PageRow at = page_row(pages, j);
  return at.page * page_stride + at.row * row_stride;
}

}  // namespace scaledot
