// The keys and values of decode, the forward of few rows: how the one warp of a block copies them, and its products.
//
// Quantised numbers stay bytes in shared memory, and each lane widens those that it multiplies. For that, a lane takes
// neighbouring bytes, and the products take their columns in another order: Q K^T is a sum over the columns, and those
// of P V are put right when they are stored (out_column).
#pragma once

#include <type_traits>

#include "cuda/generic/product.cuh"
#include "cuda/generic/widen.cuh"

namespace scaledot {
namespace {

// The keys or values of a KV head. In shared memory, where they take no registers.
template <class Element>
struct DecodeSource {
  const Element* head;  // its address takes a division, so it is computed once
  int cols;
  bool in_chunks;  // rows are whole chunks of kCopyBytes, and aligned
};

// The pipeline stage of keys or values: kKeys rows of a panel, in chunks of kCopyBytes.
template <class C>
struct DecodeStage {
  using Element = std::conditional_t<C::kQuantised, uint8_t, typename C::Storage>;
  using Source = DecodeSource<Element>;
  static constexpr int kChunk = kCopyBytes / int(sizeof(Element)), kChunks = C::kPanel / kChunk;
  static constexpr int kStep = kWarpSize / kChunks;  // rows that the warp copies at once
  static constexpr int kPitch = C::kQuantised ? C::kPanel : C::kPitch;
  static_assert(C::kKeys == kWarpSize && kWarpSize % kChunks == 0);

  Element* data;
  Source* source;
  const Problem* problem;
  const TensorView* view;  // the key or value of `problem`
  int64_t first = 0;
  int count = 0;  // of rows
  int panel = -1;

  // A barrier of the warp has to follow.
  SCALEDOT_MEMBER DecodeStage(Element* data_, Source& source_, const Problem& p, const StackedTile& tile,
                              const TensorView& view_, int64_t cols)
      : data(data_), source(&source_), problem(&p), view(&view_) {
    if (thread_index() != 0) return;
    source->head = element_ptr<const Element>(p, view_, tile.batch, tile.kv_head);
    source->cols = int(cols);
    const uint64_t misaligned = reinterpret_cast<uintptr_t>(source->head) |
                                uint64_t(view_.row_stride) * sizeof(Element) |
                                (paged() ? uint64_t(page_stride()) * sizeof(Element) : 0);
    source->in_chunks = cols % kChunk == 0 && view_.col_stride == 1 && misaligned % kCopyBytes == 0;
  }
  SCALEDOT_MEMBER void set_keys(Range keys) { first = keys.begin, count = int(scaledot::count(keys)), panel = -1; }
  SCALEDOT_MEMBER int cols() const { return source->cols; }

  // Where a chunk of a row is. Chunks of bytes have no padding; their order keeps lanes that read at the same time out
  // of each other's banks.
  static SCALEDOT_HOST_DEVICE constexpr int moved(int row) {
    return C::kQuantised ? ((row & 1) << 2 ^ (row >> 1 & 3) << 1) & (kChunks - 1) : 0;
  }
  static SCALEDOT_HOST_DEVICE constexpr int place(int row, int chunk) {
    return row * kPitch + (chunk ^ moved(row)) * kChunk;
  }

  // Starts to load a panel; missing rows become 0, and missing columns as far as products read them.
  SCALEDOT_MEMBER void prefetch(int wanted) {
    panel = wanted;
    const int chunk = thread_index() % kChunks, row = thread_index() / kChunks,
              col = wanted * C::kPanel + chunk * kChunk;
    const int width = C::kWholePanels ? C::kPanel : panel_width(cols(), wanted, C::kPanel);
    const bool wants = chunk * kChunk < width, has = col < cols();
    if (!source->in_chunks) return load_elements(row, chunk, col, wants);
    const int64_t lane_row = paged() ? row_offset(min(lane_index(), count - 1)) : 0;
    const int64_t stride = view->row_stride;
    const Element* from = source->head + col + (paged() ? 0 : (first + row) * stride);
    if (paged()) {
#pragma unroll
      for (int r = 0; r < C::kKeys; r += kStep) {
        const int64_t offset = shuffle_from(lane_row, row + r);
        if (wants) cp_async(to(row, r, chunk), from + offset, has && row + r < count ? kCopyBytes : 0);
      }
    } else if (wants && has && count == C::kKeys) {
#pragma unroll
      for (int r = 0; r < C::kKeys; r += kStep) cp_async(to(row, r, chunk), from + r * stride, kCopyBytes);
    } else if (wants) {
#pragma unroll 1
      for (int r = 0; r < C::kKeys; r += kStep)
        cp_async(to(row, r, chunk), from + r * stride, has && row + r < count ? kCopyBytes : 0);
    }
  }

  SCALEDOT_MEMBER void arrive() {}

  // The number in a row and column of the panel.
  SCALEDOT_MEMBER float number(int row, int col) const {
    const Element* at = data + place(row, col / kChunk) + col % kChunk;
    float x = 0;
    if constexpr (C::kQuantised)
      with_quantised_storage(view->dtype, [&](auto type) {
        x = widen(shared_load(reinterpret_cast<const typename decltype(type)::type*>(at)));
      });
    else
      x = widen(shared_load(at));
    return x;
  }

  // Whether all numbers are finite; the same answer in all lanes.
  SCALEDOT_MEMBER bool finite() const {
    const NumberBits bits = number_bits();
    const int width = C::kWholePanels ? C::kPanel : panel_width(cols(), panel, C::kPanel);
    uint32_t found = 0;
#pragma unroll 1
    for (int k = lane_index(); k < C::kKeys * kChunks; k += kWarpSize) {
      if (k % kChunks * kChunk >= width) continue;
      const auto words =
          shared_load(reinterpret_cast<const AlignedVector<uint32_t, 4>*>(data + place(k / kChunks, k % kChunks)));
#pragma unroll
      for (int w = 0; w < 4; ++w) found |= (words.x[w] & bits.exponent) + bits.last;
    }
    return !barrier_or((found & bits.sign) != 0);
  }

 private:
  // Bits of two or four numbers. A number is not finite if all bits of `exponent` are 1: adding `last` then carries
  // into the sign. All of an int8 are finite. The only one of e4m3 that is not has ones in its mantissa, too.
  struct NumberBits {
    uint32_t exponent, last, sign;
  };
  SCALEDOT_MEMBER NumberBits number_bits() const {
    if constexpr (std::is_same_v<Element, BFloat16>) return {0x7f807f80u, 0x00800080u, 0x80008000u};
    if constexpr (std::is_same_v<Element, Float16>) return {0x7c007c00u, 0x04000400u, 0x80008000u};
    if (view->dtype == DType::float8_e4m3fn) return {0x7f7f7f7fu, 0x01010101u, 0x80808080u};
    if (view->dtype == DType::float8_e5m2) return {0x7c7c7c7cu, 0x04040404u, 0x80808080u};
    return {0, 0, 0};
  }
  SCALEDOT_MEMBER bool paged() const { return C::kPacked && is_paged(*problem); }
  SCALEDOT_MEMBER int64_t page_stride() const {
    return view == &problem->key ? problem->pages.key_stride : problem->pages.value_stride;
  }
  // From the head to a row of the tile.
  SCALEDOT_MEMBER int64_t row_offset(int r) const {
    if (paged()) return paged_row(problem->pages, page_stride(), view->row_stride, first + r);
    return (first + r) * view->row_stride;
  }
  // Where a chunk of row `row` + r is. r is a multiple of kStep, which `row` is less than.
  SCALEDOT_MEMBER Element* to(int row, int r, int chunk) const {
    return data + (row + r) * kPitch + (chunk ^ moved(row) ^ moved(r)) * kChunk;
  }

  SCALEDOT_MEMBER void load_elements(int row, int chunk, int col, bool wants) {
    if (!wants) return;
#pragma unroll 1
    for (int r = row; r < C::kKeys; r += kStep) {
      const int available = r < count ? cols() - col : 0;
      const Element* from = available > 0 ? source->head + row_offset(r) + col * view->col_stride : nullptr;
#pragma unroll 1
      for (int e = 0; e < kChunk; ++e)
        shared_store(data + place(r, chunk) + e, e < available ? global_load(from + e * view->col_stride) : Element{});
    }
  }
};

template <class C>
struct alignas(16) DecodeShared {
  typename C::Storage query[C::kRows * C::kPitch];
  typename DecodeStage<C>::Element key[C::kKeys * DecodeStage<C>::kPitch];
  typename DecodeStage<C>::Element value[C::kKeys * DecodeStage<C>::kPitch];
  typename C::Storage weights[C::kRows * C::kScorePitch];  // where some are masked and values are not finite
  ForwardTile<typename C::T> tile;
  typename DecodeStage<C>::Source key_source, value_source;
};

// The column of P V that a thread's element (n, j) belongs to.
template <class C>
SCALEDOT_DEVICE int out_column(int n, int j, int lane = lane_index()) {
  const int within = mma_column(lane, j);
  return C::kDecode && C::kQuantised ? C::kPanel / 8 * within + n : 8 * n + within;
}

// S += Q K^T with keys as bytes. A lane takes 16 neighbouring columns of 64: four for each step of the product.
template <class C, class Stored>
SCALEDOT_DEVICE void multiply_stored_keys(float (&s)[C::kKeys / 8][4], const typename C::Storage* query,
                                          const DecodeStage<C>& keys, Type<Stored> stored) {
  constexpr Type<typename C::Storage> type = {};
  using Words = AlignedVector<uint32_t, 4>;
  const int lane = thread_index_volatile(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int group = 0; group < C::kPanel / 64; ++group) {
    Words q[2][2];  // of rows g and g + 8
#pragma unroll
    for (int k = 0; k < 4; ++k)
      q[k / 2][k % 2] = shared_load(
          reinterpret_cast<const Words*>(query + (g + k / 2 * 8) * C::kPitch + 64 * group + 16 * t + k % 2 * 8));
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
      const Words bytes =
          shared_load(reinterpret_cast<const Words*>(keys.data + keys.place(g, 4 * group + t) + 8 * n * keys.kPitch));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int w = 2 * (step % 2);
        const uint32_t a[4] = {q[0][step / 2].x[w], q[1][step / 2].x[w], q[0][step / 2].x[w + 1],
                               q[1][step / 2].x[w + 1]};
        uint32_t b[2];
        widen_four(bytes.x[step], b[0], b[1], stored, type);
        mma_m16n8k16(s[n], a, b[0], b[1], type);
      }
    }
  }
}

// O += P V with values as bytes. A lane takes kPanel / 8 neighbouring columns, one for each tile of columns of the
// sums.
template <class C, class Stored>
SCALEDOT_DEVICE void multiply_stored_values(float (&out)[C::kPanel / 8][4], const float (&weights)[C::kKeys / 8][4],
                                            const DecodeStage<C>& values, Type<Stored> stored) {
  constexpr Type<typename C::Storage> type = {};
  constexpr uint32_t kFirst = 0x5140, kLast = 0x7362;  // for select_bytes: two bytes of each row, in turn
  using Words = AlignedVector<uint32_t, 2>;
  const int lane = thread_index_volatile(), g = lane / 4, t = lane % 4;
  uint32_t a[C::kKeys / 16][4];
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k) operand_of(weights, 2 * k, a[k], type);
#pragma unroll
  for (int half = 0; half < C::kPanel / 64; ++half)
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      const int col = C::kPanel / 8 * g + 8 * half;
      Words rows[4];  // of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of the step
#pragma unroll
      for (int r = 0; r < 4; ++r)
        rows[r] = shared_load(reinterpret_cast<const Words*>(values.data + values.place(2 * t + r % 2, col / 16) +
                                                             (16 * k + r / 2 * 8) * values.kPitch + col % 16));
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t b[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t even = rows[2 * r].x[w], odd = rows[2 * r + 1].x[w];
          widen_four(select_bytes(even, odd, kFirst), b[r][0], b[r][1], stored, type);
          widen_four(select_bytes(even, odd, kLast), b[r][2], b[r][3], stored, type);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) mma_m16n8k16(out[8 * half + 4 * w + n], a[k], b[0][n], b[1][n], type);
      }
    }
}

// S += Q K^T over the panel that both stages hold.
template <class C>
SCALEDOT_DEVICE void multiply_decode_keys(float (&s)[C::kKeys / 8][4], const typename C::Storage* query,
                                          const DecodeStage<C>& keys) {
  if constexpr (C::kQuantised)
    with_quantised_storage(keys.view->dtype, [&](auto stored) { multiply_stored_keys<C>(s, query, keys, stored); });
  else
    multiply<ALayout::rows, BLayout::by_column, 4>(s, SharedMatrix<typename C::Storage>{query, C::kPitch},
                                                   SharedMatrix<typename C::Storage>{keys.data, C::kPitch},
                                                   panel_width(keys.cols(), keys.panel, C::kPanel), C::kKeys / 8);
}

// O += P V, with P in registers.
template <class C>
SCALEDOT_DEVICE void multiply_decode_values(float (&out)[C::kPanel / 8][4], const float (&weights)[C::kKeys / 8][4],
                                            const DecodeStage<C>& values) {
  if constexpr (C::kQuantised)
    with_quantised_storage(values.view->dtype,
                           [&](auto stored) { multiply_stored_values<C>(out, weights, values, stored); });
  else
    multiply_registers(out, weights, SharedMatrix<typename C::Storage>{values.data, C::kPitch},
                       panel_width(values.cols(), values.panel, C::kPanel) / 8);
}

// O += P V element by element, without masked terms (multiply_unmasked). P is in shared memory. The sums move on
// by one tile of columns in each step of the loop, so that its code is small.
template <class C>
SCALEDOT_DEVICE void multiply_decode_unmasked(float (&out)[C::kPanel / 8][4], const typename C::Storage* weights,
                                              const DecodeStage<C>& values) {
  constexpr int kTiles = C::kPanel / 8;
  const int g = lane_index() / 4;
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n) {
    float sum[4] = {out[0][0], out[0][1], out[0][2], out[0][3]};
    const bool exists = C::kWholePanels || 8 * n < panel_width(values.cols(), values.panel, C::kPanel);
#pragma unroll 1
    for (int k = 0; k < C::kKeys && exists; ++k) {
      const float y[2] = {values.number(k, out_column<C>(n, 0)), values.number(k, out_column<C>(n, 1))};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const typename C::Storage x = shared_load(weights + (g + 8 * half) * C::kScorePitch + k);
        if (is_skip(x)) continue;
        sum[2 * half] += widen(x) * y[0];
        sum[2 * half + 1] += widen(x) * y[1];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int to = 0; to < kTiles - 1; ++to) out[to][e] = out[to + 1][e];
      out[kTiles - 1][e] = sum[e];
    }
  }
}

}  // namespace
}  // namespace scaledot
