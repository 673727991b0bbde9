// From tensors of any strides to panels in shared memory.
#pragma once

#include "cuda/generic/packed.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

// The pages that rows are stored in, if any.
template <bool kPaged>
struct PagedRows {};
template <>
struct PagedRows<true> {
  const Pages* pages;  // nullptr: not paged
  int64_t stride;
  int64_t first;  // row of the sequence
};

// The rows that a panel is loaded from: `count` rows, `per_head` of each head.
template <class C, bool kPaged = false>
struct PanelRows {
  const typename C::Storage* data;
  const TensorView* view;  // in the kernel's parameters, where its strides take no registers
  int per_head, count, cols;
  PagedRows<kPaged> in;

  SCALEDOT_MEMBER bool paged() const {
    if constexpr (kPaged)
      return in.pages;
    else
      return false;
  }
};

template <class C>
SCALEDOT_DEVICE PanelRows<C> rows_of_keys(const Problem& p, const TensorView& view, int64_t batch, int64_t kv_head,
                                          Range keys, int64_t cols) {
  const auto* data = element_ptr<const typename C::Storage>(p, view, batch, kv_head) + keys.begin * view.row_stride;
  return {data, &view, int(count(keys)), int(count(keys)), int(cols), {}};
}

template <class C>
SCALEDOT_DEVICE PanelRows<C> rows_of_tile(const Problem& p, const TensorView& view, const StackedTile& tile,
                                          int64_t cols) {
  const auto* data =
      element_ptr<const typename C::Storage>(p, view, tile.batch, tile.first_head) + tile.rows.begin * view.row_stride;
  return {data, &view, int(count(tile.rows)), tile_rows(tile), int(cols), {}};
}

// Whether all elements of a panel in shared memory are finite; the same answer in all threads of the block.
template <class C, int kBlockThreads>
SCALEDOT_DEVICE bool panel_is_finite(const typename C::Storage* data, int rows, int cols, int panel) {
  using Storage = typename C::Storage;
  constexpr int kChunk = 16 / int(sizeof(Storage)), kChunks = C::kPanel / kChunk;
  const int width = panel_width(cols, panel, C::kPanel);
  bool found = false;
  for (int c = thread_index(); c < rows * kChunks; c += kBlockThreads) {
    if (c % kChunks * kChunk >= width) continue;
    const auto chunk = shared_load(
        reinterpret_cast<const AlignedVector<Storage, kChunk>*>(data + c / kChunks * C::kPitch + c % kChunks * kChunk));
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const auto x = widen(chunk.x[e]);
      found |= !(x - x == 0);
    }
  }
  return !barrier_or(found);
}

// The pipeline stage of one operand: its buffer of kPanelRows rows in shared memory, and which panel the buffer holds.
template <class C, int kBlockThreads, bool kPaged = false, int kPanelRows = C::kKeys>
struct PanelStage {
  using Storage = typename C::Storage;
  Storage* data;
  PanelRows<C, kPaged> rows;
  int panel;  // loaded or being loaded; -1: none

  SCALEDOT_MEMBER void set_rows(const PanelRows<C, kPaged>& other) {
    rows = other;
    panel = -1;
  }

  // Starts to load a panel; missing rows and columns become 0. A barrier must separate this from the last read of the
  // buffer.
  SCALEDOT_MEMBER void prefetch(int wanted) {
    constexpr int kChunk = 16 / int(sizeof(Storage)), kChunks = C::kPanel / kChunk;
    panel = wanted;
    const int width = C::kWholePanels ? C::kPanel : panel_width(rows.cols, wanted, C::kPanel);
    const int first_col = wanted * C::kPanel;
    for (int c = thread_index(); c < kPanelRows * kChunks; c += kBlockThreads) {
      const int r = c / kChunks, col = c % kChunks * kChunk;
      if (col >= width) continue;
      Storage* to = data + r * C::kPitch + col;
      const int available = r < rows.count ? min(rows.cols - first_col - col, kChunk) : 0;
      if (available <= 0) {
        shared_store(reinterpret_cast<AlignedVector<Storage, kChunk>*>(to), AlignedVector<Storage, kChunk>{});
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

  // Finishes the panel once the thread's copies have arrived.
  SCALEDOT_MEMBER void arrive() {}

  SCALEDOT_MEMBER bool finite() const { return panel_is_finite<C, kBlockThreads>(data, rows.count, rows.cols, panel); }

 private:
  SCALEDOT_MEMBER const Storage* row(int r) const {
    if constexpr (kPaged)
      if (rows.in.pages)
        return rows.data + paged_row(*rows.in.pages, rows.in.stride, rows.view->row_stride, rows.in.first + r);
    if (rows.per_head == rows.count) return rows.data + r * rows.view->row_stride;
    return rows.data + (r / rows.per_head) * rows.view->head_stride + (r % rows.per_head) * rows.view->row_stride;
  }
};

// The stage of the keys or values of one KV head, for the forward, where they may be in pages. The address of a head
// takes a division, so it is computed once.
template <class C, int kBlockThreads>
struct KeyStage : PanelStage<C, kBlockThreads, C::kPacked> {
  using Base = PanelStage<C, kBlockThreads, C::kPacked>;
  using Storage = typename C::Storage;
  const Storage* head;

  SCALEDOT_MEMBER KeyStage(Storage* data, const Problem& p, const StackedTile& tile, const TensorView& view,
                           int64_t cols)
      : Base{data, {nullptr, &view, 0, 0, int(cols), {}}, -1},
        head(element_ptr<const Storage>(p, view, tile.batch, tile.kv_head)) {
    if constexpr (C::kPacked)
      if (is_paged(p)) this->rows.in = {&p.pages, &view == &p.key ? p.pages.key_stride : p.pages.value_stride, 0};
  }
  SCALEDOT_MEMBER void set_keys(Range keys) {
    this->panel = -1;
    this->rows.count = this->rows.per_head = int(count(keys));
    if constexpr (C::kPacked) this->rows.in.first = keys.begin;
    this->rows.data = this->rows.paged() ? head : head + keys.begin * this->rows.view->row_stride;
  }
};

// Waits until both stages hold the given panels, and loads those that were not prefetched. `pending`: some prefetch has
// not been waited for. Ends with a barrier if anything was loaded.
template <class StageA, class StageB>
SCALEDOT_DEVICE void wait_for_panels(StageA& a, int panel_a, StageB& b, int panel_b, bool& pending) {
  if (a.panel != panel_a || b.panel != panel_b) {
    barrier();
    if (a.panel != panel_a) a.prefetch(panel_a);
    if (b.panel != panel_b) b.prefetch(panel_b);
    pending = true;
  }
  if (!pending) return;
  cp_async_wait_all();
  a.arrive();
  b.arrive();
  barrier();
  pending = false;
}

}  // namespace
}  // namespace scaledot
