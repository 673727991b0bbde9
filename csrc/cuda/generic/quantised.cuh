// Quantised keys and values: from bytes in global memory to panels of 16-bit or float32 numbers in shared memory.
//
// The copy engine brings bytes to a buffer. When they have arrived, each thread widens the bytes that it copied itself,
// so no barrier is needed between. The widened panel holds the stored numbers: k_scale is part of the scale of a score,
// v_scale of the division by the sum.
//
// float16 has all numbers of the three formats (4 bits of mantissa and 448 down to 2^-9; the upper half of a float16;
// -128 to 127). So a pair of bytes becomes a pair of float16 first, and then two float32, or a pair of bfloat16, which
// has them all too.
#pragma once

#include "cuda/generic/panel.cuh"
#include "cuda/ptx/convert.h"

namespace scaledot {
namespace {

// For select_bytes(four, 0, ...): two of the bytes, each in the upper half of 16 bits.
constexpr uint32_t kFirstTwo = 0x1404, kLastTwo = 0x3424;

SCALEDOT_FN uint32_t twice(uint16_t bits) { return uint32_t(bits) << 16 | bits; }

// The bytes of `two`, each in the upper half of 16 bits, as float16. Moved down by a bit, a number of e4m3 has the bits
// of a float16 that is kE4M3Power too small. Its NaN would be 480, next to 448, the largest number: multiplied by
// kOverflows only the former is infinite, and infinity times 0 is NaN.
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E4M3>) {
  constexpr uint32_t kPower = twice(0x5c00);      // 256
  constexpr uint32_t kOverflows = twice(0x7884);  // 36992: times 1.75 it is 64736, times 1.875 too large
  constexpr uint32_t kMinusZero = twice(0x8000);
  const uint32_t small = (two & 0x80008000u) | (two & 0x7f007f00u) >> 1;
  const uint32_t number = fma_pair(small, kPower, kMinusZero);
  return fma_pair(fma_pair(small, kOverflows, kMinusZero), 0, number);
}
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E5M2>) { return two; }
// x + 128 are the last 8 bits of the float16 1024 + (x + 128).
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Int8>) {
  constexpr uint32_t k1024 = twice(0x6400), kOne = twice(0x3c00), kMinus1152 = twice(0xe480);
  return fma_pair(((two ^ 0x80008000u) >> 8) | k1024, kOne, kMinus1152);
}

// Eight widened numbers in a row of a panel.
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], Float16* to) {
  shared_store(reinterpret_cast<AlignedVector<uint32_t, 4>*>(to),
               AlignedVector<uint32_t, 4>{pairs[0], pairs[1], pairs[2], pairs[3]});
}
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], BFloat16* to) {
  AlignedVector<uint32_t, 4> narrowed;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float low, high;
    widen_pair(pairs[k], low, high);
    narrowed.x[k] = narrow_pair(low, high, Type<BFloat16>{});
  }
  shared_store(reinterpret_cast<AlignedVector<uint32_t, 4>*>(to), narrowed);
}
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], float* to) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    AlignedVector<float, 4> four;
    widen_pair(pairs[k], four.x[0], four.x[1]);
    widen_pair(pairs[k + 1], four.x[2], four.x[3]);
    shared_store(reinterpret_cast<AlignedVector<float, 4>*>(to) + k / 2, four);
  }
}

// Keys and values share the buffer of bytes: those of one are widened before those of the other are copied.
template <class C>
struct alignas(16) GenericQuantisedShared : GenericForwardShared<C> {
  uint8_t stored[C::kSide * C::kPanel];
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
  Range keys;
  int panel;
  bool arriving;  // bytes are being copied

  // Starts to copy a panel, as PanelStage does.
  SCALEDOT_MEMBER void prefetch(int wanted) {
    panel = wanted;
    arriving = true;
    const int first_col = wanted * C::kPanel, width = this->width();
    const auto* head = at<const uint8_t>(*problem, *view, 0, kv_head);
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
  static constexpr int kChunk = kCopyBytes, kChunks = C::kPanel / kChunk, kAllChunks = C::kSide * kChunks;

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
      for (int k = 0; k < 4; k += 2) {
        const uint32_t pairs[4] = {float16_pair(select_bytes(bytes.x[k], 0, kFirstTwo), type),
                                   float16_pair(select_bytes(bytes.x[k], 0, kLastTwo), type),
                                   float16_pair(select_bytes(bytes.x[k + 1], 0, kFirstTwo), type),
                                   float16_pair(select_bytes(bytes.x[k + 1], 0, kLastTwo), type)};
        store_eight(pairs, data + r * C::kPitch + col + 4 * k);
      }
    }
  }
};

// The shared memory of a forward kernel, and its stages of keys and values.
template <class C, int kBlockThreads, bool kQuantised = C::kQuantised>
struct KeyStages {
  using Shared = GenericForwardShared<C>;
  using Stage = PanelStage<C, kBlockThreads, C::kPacked>;
  static SCALEDOT_MEMBER Stage over(Shared&, typename C::Storage* data) { return {data, {}, -1}; }
  // `stage` becomes the rows of these keys.
  static SCALEDOT_MEMBER void set_keys(Stage& stage, const Problem& p, const QueryTile& tile, const TensorView& view,
                                       Range keys, int64_t cols) {
    stage.set_rows(rows_of_keys<C, C::kPacked>(p, view, tile.batch, tile.kv_head, keys, cols));
  }
};
template <class C, int kBlockThreads>
struct KeyStages<C, kBlockThreads, true> {
  using Shared = GenericQuantisedShared<C>;
  using Stage = QuantisedStage<C, kBlockThreads>;
  static SCALEDOT_MEMBER Stage over(Shared& shared, typename C::Storage* data) {
    return {data, shared.stored, nullptr, nullptr, 0, {0, 0}, -1, false};
  }
  static SCALEDOT_MEMBER void set_keys(Stage& stage, const Problem& p, const QueryTile& tile, const TensorView& view,
                                       Range keys, int64_t) {
    stage.problem = &p, stage.view = &view, stage.kv_head = tile.kv_head, stage.keys = keys;
    stage.panel = -1;
  }
};

}  // namespace
}  // namespace scaledot
