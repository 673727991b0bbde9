// From tensors of any strides to shared memory.
#pragma once

#include "cuda/generic/packed.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

// In which pages rows lie, if they do.
template <bool kPaged>
struct InPages {};
template <>
struct InPages<true> {
  const Pages* pages;  // nullptr: in none
  int64_t stride;
  int64_t first;  // row of the sequence
};

// The rows that a panel is a part of: `count` rows, of which each head has `per_head`.
template <class C, bool kPaged = false>
struct Rows {
  const typename C::Storage* data;
  const TensorView* view;  // a kernel's parameter: its strides cost no registers
  int per_head, count, cols;
  InPages<kPaged> in;
};

// kPaged: they may lie in pages, which only the forward knows.
template <class C, bool kPaged = false>
SCALEDOT_DEVICE Rows<C, kPaged> rows_of_keys(const Problem& p, const TensorView& view, int64_t batch, int64_t kv_head,
                                             Range keys, int64_t cols) {
  const auto* data = at<const typename C::Storage>(p, view, batch, kv_head);
  Rows<C, kPaged> rows = {data, &view, int(count(keys)), int(count(keys)), int(cols), {}};
  if constexpr (kPaged)
    if (is_paged(p)) {
      rows.in = {&p.pages, &view == &p.key ? p.pages.key_stride : p.pages.value_stride, keys.begin};
      return rows;
    }
  rows.data += keys.begin * view.row_stride;
  return rows;
}

template <class C>
SCALEDOT_DEVICE Rows<C> rows_of_tile(const Problem& p, const TensorView& view, const RowTile& tile, int64_t cols) {
  const auto* data =
      at<const typename C::Storage>(p, view, tile.batch, tile.first_head) + tile.rows.begin * view.row_stride;
  return {data, &view, int(count(tile.rows)), tile_rows(tile), int(cols), {}};
}

// Neighbouring numbers that are loaded or stored at once.
template <class Number, int kCount>
struct alignas(sizeof(Number) * kCount) Few {
  Number x[kCount];
};

// One operand's place in shared memory.
template <class C, int kBlockThreads, bool kPaged = false>
struct Stage {
  using Storage = typename C::Storage;
  Storage* data;
  Rows<C, kPaged> rows;
  int panel;  // the one that is there or on its way; -1: none

  // Other rows from now on.
  SCALEDOT_MEMBER void point_to(const Rows<C, kPaged>& other) {
    rows = other;
    panel = -1;
  }

  // Starts to load a panel; missing rows and columns are 0. Since the place was last read, all threads have passed a barrier.
  SCALEDOT_MEMBER void request(int wanted) {
    constexpr int kChunk = 16 / int(sizeof(Storage)), kChunks = C::kPanel / kChunk;
    panel = wanted;
    const int width = panel_width(rows.cols, wanted, C::kPanel), first_col = wanted * C::kPanel;
    for (int c = thread_index(); c < C::kSide * kChunks; c += kBlockThreads) {
      const int r = c / kChunks, col = c % kChunks * kChunk;
      if (col >= width) continue;
      Storage* to = data + r * C::kPitch + col;
      const int available = r < rows.count ? min(rows.cols - first_col - col, kChunk) : 0;
      if (available <= 0) {
        shared_store(reinterpret_cast<Few<Storage, kChunk>*>(to), Few<Storage, kChunk>{});
        continue;
      }
      const Storage* from = row(r) + (first_col + col) * rows.view->col_stride;
      if (rows.view->col_stride == 1 && reinterpret_cast<uintptr_t>(from) % kCopyBytes == 0) {
        cp_async(to, from, available * int(sizeof(Storage)));
      } else {
        for (int e = 0; e < kChunk; ++e)
          shared_store(to + e, e < available ? global_load(from + e * rows.view->col_stride) : Storage{});
      }
    }
  }

  // Whether none of the loaded panel's numbers is NaN or inf, for all threads alike.
  SCALEDOT_MEMBER bool finite() const {
    constexpr int kChunk = 16 / int(sizeof(Storage)), kChunks = C::kPanel / kChunk;
    const int width = panel_width(rows.cols, panel, C::kPanel);
    bool found = false;
    for (int c = thread_index(); c < rows.count * kChunks; c += kBlockThreads) {
      if (c % kChunks * kChunk >= width) continue;
      const auto chunk = shared_load(
          reinterpret_cast<const Few<Storage, kChunk>*>(data + c / kChunks * C::kPitch + c % kChunks * kChunk));
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const auto x = widen(chunk.x[e]);
        found |= !(x - x == 0);
      }
    }
    return !barrier_or(found);
  }

 private:
  SCALEDOT_MEMBER const Storage* row(int r) const {
    if constexpr (kPaged)
      if (rows.in.pages)
        return rows.data + paged_row(*rows.in.pages, rows.in.stride, rows.view->row_stride, rows.in.first + r);
    if (rows.per_head == rows.count) return rows.data + r * rows.view->row_stride;
    return rows.data + (r / rows.per_head) * rows.view->head_stride + (r % rows.per_head) * rows.view->row_stride;
  }
};

// Waits until both stages have the panels asked for, and loads them if nobody did. `arriving`: there are requests that nobody
// has waited for. Ends with a barrier if anything was loaded.
template <class StageA, class StageB>
SCALEDOT_DEVICE void bring(StageA& a, int panel_a, StageB& b, int panel_b, bool& arriving) {
  if (a.panel != panel_a || b.panel != panel_b) {
    barrier();
    if (a.panel != panel_a) a.request(panel_a);
    if (b.panel != panel_b) b.request(panel_b);
    arriving = true;
  }
  if (!arriving) return;
  cp_async_wait_all();
  barrier();
  arriving = false;
}

}  // namespace
}  // namespace scaledot
