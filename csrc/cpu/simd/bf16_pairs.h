// Bf16Pair: two bfloat16 that are neighbours along the depth of a product. It is the operand of AVX512_BF16's vdpbf16ps
// and ARM's bfdot:
//   sum + a.first * b.first + a.second * b.second, in float32.
// With Vec<Bf16Pair> and OperandTraits<Bf16Pair>, gemm.h multiplies Bf16Pairs as it multiplies floats.
//
// Include the header of an instruction set with Bf16Pairs first (isa/avx512_bf16.h, isa/neon_bf16.h). It defines
// multiply_bf16_pairs, narrow_to_bfloat16, and halves_as_words for a vector.
#pragma once

#include "cpu/simd/gemm.h"

namespace scaledot {
namespace {

struct Bf16Pair {
  BFloat16 first, second;
};

// Each lane has a Bf16Pair's first element in its low half.
template <>
struct Vec<Bf16Pair> {
  Native<uint32_t> v;
  SCALEDOT_INLINE Vec() = default;
  SCALEDOT_INLINE Vec(Native<uint32_t> native) : v(native) {}
  SCALEDOT_INLINE explicit Vec(Bf16Pair x) : v(Native<uint32_t>{} + __builtin_bit_cast(uint32_t, x)) {}
};

using LooseBf16Pairs = Loose<uint32_t, kLanes<uint32_t>>;
SCALEDOT_INLINE Vec<Bf16Pair> load(const Bf16Pair* from) {
  return Native<uint32_t>(*reinterpret_cast<const LooseBf16Pairs*>(from));
}
SCALEDOT_INLINE void store(Bf16Pair* to, Vec<Bf16Pair> x) { *reinterpret_cast<LooseBf16Pairs*>(to) = x.v; }
SCALEDOT_INLINE Vec<float> fma(Vec<Bf16Pair> a, Vec<Bf16Pair> b, Vec<float> c) {
  return multiply_bf16_pairs(a.v, b.v, c.v);
}

template <>
struct OperandTraits<Bf16Pair> {
  using Sum = float;
  using Element = BFloat16;
  static constexpr int kElements = 2;

  static float element(Bf16Pair x, int part) { return widen(part ? x.second : x.first); }
  SCALEDOT_INLINE static Vec<Bf16Pair> along_row(const BFloat16* row, int64_t depth) {
    return load(reinterpret_cast<const Bf16Pair*>(row) + depth);
  }
  SCALEDOT_INLINE static Vec<Bf16Pair> across_rows(const BFloat16* rows, int64_t width) {
    return join(halves_as_words(&rows->bits), halves_as_words(&rows[width].bits));
  }
  SCALEDOT_INLINE static void store_along(Bf16Pair* row, int64_t k, Vec<float> x) {
    *reinterpret_cast<Loose<uint16_t, kLanes<float>>*>(reinterpret_cast<BFloat16*>(row) + k) = narrow_to_bfloat16(x.v);
  }
  SCALEDOT_INLINE static void store_across(Bf16Pair* columns, const Vec<float>* x) {
    store(columns, join(narrowed_words(x[0]), narrowed_words(x[1])));
  }

 private:
  SCALEDOT_INLINE static Native<uint32_t> narrowed_words(Vec<float> x) {
    return Native<uint32_t>(halves_as_words(narrow_to_bfloat16(x.v)));
  }
  // first[0], second[0], first[1], second[1], ...
  template <class Words>
  SCALEDOT_INLINE static Vec<Bf16Pair> join(Words first, Words second) {
    return Native<uint32_t>(first) | Native<uint32_t>(second) << 16;
  }
};

// The operand type of a kernel with Bf16Pairs, for tiled_kernel (attention/kernel.h).
struct Bf16PairOperands {
  template <class Body>
  static void with_operands(const Problem&, const Body& body) {
    body(Type<Bf16Pair>{});
  }
};

}  // namespace
}  // namespace scaledot
