// Pair: two bfloat16 that are neighbours along the depth of a product. It is the operand of AVX512_BF16's vdpbf16ps and
// ARM's bfdot:
//   sum + a.first * b.first + a.second * b.second, in float32.
// With Vec<Pair> and OperandTraits<Pair>, gemm.h multiplies Pairs as it multiplies floats.
//
// Include the header of an instruction set with Pairs first (isa/avx512_bf16.h, isa/neon_bf16.h). It defines
// multiply_pairs, narrow_to_bfloat16, and halves_as_words for a vector.
#pragma once

#include "cpu/simd/gemm.h"

namespace scaledot {
namespace {

struct Pair {
  BFloat16 first, second;
};

// Each lane has a Pair's first element in its low half.
template <>
struct Vec<Pair> {
  Native<uint32_t> v;
  SCALEDOT_INLINE Vec() = default;
  SCALEDOT_INLINE Vec(Native<uint32_t> native) : v(native) {}
  SCALEDOT_INLINE explicit Vec(Pair x) : v(Native<uint32_t>{} + __builtin_bit_cast(uint32_t, x)) {}
};

using LoosePairs = Loose<uint32_t, kLanes<uint32_t>>;
SCALEDOT_INLINE Vec<Pair> load(const Pair* from) {
  return Native<uint32_t>(*reinterpret_cast<const LoosePairs*>(from));
}
SCALEDOT_INLINE void store(Pair* to, Vec<Pair> x) { *reinterpret_cast<LoosePairs*>(to) = x.v; }
SCALEDOT_INLINE Vec<float> fma(Vec<Pair> a, Vec<Pair> b, Vec<float> c) { return multiply_pairs(a.v, b.v, c.v); }

template <>
struct OperandTraits<Pair> {
  using Sum = float;
  using Element = BFloat16;
  static constexpr int kElements = 2;

  static float element(Pair x, int part) { return widen(part ? x.second : x.first); }
  SCALEDOT_INLINE static Vec<Pair> along_row(const BFloat16* row, int64_t depth) {
    return load(reinterpret_cast<const Pair*>(row) + depth);
  }
  SCALEDOT_INLINE static Vec<Pair> across_rows(const BFloat16* rows, int64_t width) {
    return join(halves_as_words(&rows->bits), halves_as_words(&rows[width].bits));
  }
  SCALEDOT_INLINE static void store_along(Pair* row, int64_t k, Vec<float> x) {
    *reinterpret_cast<Loose<uint16_t, kLanes<float>>*>(reinterpret_cast<BFloat16*>(row) + k) = narrow_to_bfloat16(x.v);
  }
  SCALEDOT_INLINE static void store_across(Pair* columns, const Vec<float>* x) {
    store(columns, join(narrowed_words(x[0]), narrowed_words(x[1])));
  }

 private:
  SCALEDOT_INLINE static Native<uint32_t> narrowed_words(Vec<float> x) {
    return Native<uint32_t>(halves_as_words(narrow_to_bfloat16(x.v)));
  }
  // first[0], second[0], first[1], second[1], ...
  template <class Words>
  SCALEDOT_INLINE static Vec<Pair> join(Words first, Words second) {
    return Native<uint32_t>(first) | Native<uint32_t>(second) << 16;
  }
};

// The operand type of a kernel with Pairs, for tiled_kernel (attention/kernel.h).
struct PairOperands {
  template <class Body>
  static void with_operands(const Problem&, const Body& body) {
    body(Type<Pair>{});
  }
};

}  // namespace
}  // namespace scaledot
