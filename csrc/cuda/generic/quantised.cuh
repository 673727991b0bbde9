// Quantised keys and values: from bytes in global memory to panels of 16-bit or float32 numbers in shared memory.
//
// The copy engine brings bytes to a buffer. When they have arrived, each thread widens the bytes that it copied itself,
// so no barrier is needed between. The widened panel holds the stored numbers: k_scale is part of the scale of a score,
// v_scale of the division by the sum.
#pragma once

#include "cuda/generic/decode.cuh"
#include "cuda/generic/panel.cuh"
#include "cuda/generic/widen.cuh"

namespace scaledot {
namespace {

// Keys and values share the widened panel: the product of one is computed before the other is widened.
template <class C>
struct alignas(16) GenericQuantisedShared {
  typename C::Storage query[C::kRows * C::kPitch];
  typename C::Storage widened[C::kKeys * C::kPitch];
  typename C::Storage weights[C::kRows * C::kScorePitch];
  uint8_t stored_key[C::kKeys * C::kPanel];
  uint8_t stored_value[C::kKeys * C::kPanel];
};

// The pipeline stage of quantised keys or values. `data` has the widened panel. It keeps little in registers: what it
// can read from the problem of the block, it reads again.
template <class C, int kBlockThreads>
struct QuantisedStage {
  typename C::Storage* data;
  uint8_t* stored;
  const Problem* problem;
  const TensorView* view;  // the key or value of `problem`
  int kv_head;
  Range keys = {0, 0};
  int panel = -1;
  bool arriving = false;  // bytes are being copied

  SCALEDOT_MEMBER void set_keys(Range other) { keys = other, panel = -1; }

  // Starts to copy a panel, as PanelStage does.
  SCALEDOT_MEMBER void prefetch(int wanted) {
    panel = wanted;
    arriving = true;
    const int first_col = wanted * C::kPanel, width = this->width();
    const auto* head = element_ptr<const uint8_t>(*problem, *view, 0, kv_head);
#pragma unroll 2
    for (int c = thread_index(); c < kAllChunks; c += kBlockThreads) {
      const int r = c / kChunks, col = c % kChunks * kChunk;
      if (col >= width) continue;
      uint8_t* to = stored + r * C::kPanel + col;
      const int available = r < int(count(keys)) ? min(cols() - first_col - col, kChunk) : 0;
      if (available <= 0) {
        shared_store(reinterpret_cast<AlignedVector<uint8_t, kChunk>*>(to), AlignedVector<uint8_t, kChunk>{});
        continue;
      }
      const uint8_t* from = head + row_offset(keys.begin + r) + (first_col + col) * view->col_stride;
      if (view->col_stride == 1 && reinterpret_cast<uintptr_t>(from) % kCopyBytes == 0) {
        cp_async(to, from, available);
      } else {
#pragma unroll 1
        for (int e = 0; e < kChunk; ++e)
          shared_store(to + e, e < available ? global_load(from + e * view->col_stride) : uint8_t(0));
      }
    }
  }

  // Widens what the thread has copied.
  SCALEDOT_MEMBER void arrive() {
    if (!arriving) return;
    arriving = false;
    with_quantised_storage(view->dtype, [&](auto type) { widen_own_chunks(type); });
  }

  SCALEDOT_MEMBER bool finite() const {
    return panel_is_finite<C, kBlockThreads>(data, int(count(keys)), cols(), panel);
  }

 private:
  static constexpr int kChunk = kCopyBytes, kChunks = C::kPanel / kChunk, kAllChunks = C::kKeys * kChunks;

  SCALEDOT_MEMBER int cols() const { return int(view == &problem->key ? problem->head_dim : problem->value_dim); }
  SCALEDOT_MEMBER int width() const { return panel_width(cols(), panel, C::kPanel); }
  SCALEDOT_MEMBER int64_t row_offset(int64_t j) const {
    const Pages& pages = problem->pages;
    if (!is_paged(*problem)) return j * view->row_stride;
    return paged_row(pages, view == &problem->key ? pages.key_stride : pages.value_stride, view->row_stride, j);
  }

  template <class Stored>
  SCALEDOT_MEMBER void widen_own_chunks(Type<Stored> type) {
    const int width = this->width();
#pragma unroll 1
    for (int c = thread_index(); c < kAllChunks; c += kBlockThreads) {
      const int r = c / kChunks, col = c % kChunks * kChunk;
      if (col >= width) continue;
      const auto bytes = shared_load(reinterpret_cast<const AlignedVector<uint32_t, 4>*>(stored + r * C::kPanel + col));
#pragma unroll
      for (int k = 0; k < 4; k += 2) widen_eight(bytes.x[k], bytes.x[k + 1], data + r * C::kPitch + col + 4 * k, type);
    }
  }
};

// The shared memory of a forward kernel, and its stages of keys and values.
template <class C, int kBlockThreads, bool kQuantised = C::kQuantised, bool kDecode = C::kDecode>
struct KeyStages {
  using Shared = GenericForwardShared<C>;
  using Stage = KeyStage<C, kBlockThreads>;
  static SCALEDOT_MEMBER Stage keys(Shared& shared, const Problem& p, const StackedTile& tile) {
    return Stage(shared.key, p, tile, p.key, p.head_dim);
  }
  static SCALEDOT_MEMBER Stage values(Shared& shared, const Problem& p, const StackedTile& tile) {
    return Stage(shared.value, p, tile, p.value, p.value_dim);
  }
};
template <class C, int kBlockThreads>
struct KeyStages<C, kBlockThreads, true, false> {
  using Shared = GenericQuantisedShared<C>;
  using Stage = QuantisedStage<C, kBlockThreads>;
  static SCALEDOT_MEMBER Stage keys(Shared& shared, const Problem& p, const StackedTile& tile) {
    return {shared.widened, shared.stored_key, &p, &p.key, tile.kv_head};
  }
  static SCALEDOT_MEMBER Stage values(Shared& shared, const Problem& p, const StackedTile& tile) {
    return {shared.widened, shared.stored_value, &p, &p.value, tile.kv_head};
  }
};

template <class C, int kBlockThreads, bool kQuantised>
struct KeyStages<C, kBlockThreads, kQuantised, true> {
  using Shared = DecodeShared<C>;
  using Stage = DecodeStage<C>;
  static SCALEDOT_MEMBER Stage keys(Shared& shared, const Problem& p, const StackedTile& tile) {
    return Stage(shared.key, shared.key_source, p, tile, p.key, p.head_dim);
  }
  static SCALEDOT_MEMBER Stage values(Shared& shared, const Problem& p, const StackedTile& tile) {
    return Stage(shared.value, shared.value_source, p, tile, p.value, p.value_dim);
  }
};

}  // namespace
}  // namespace scaledot
