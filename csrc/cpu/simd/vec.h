// Vec<T>: a hardware vector of floats or doubles. The algorithms use nothing else of an instruction set.
//
// An instruction-set file (isa/default.h, isa/avx2.h, isa/neon.h, ...) defines the vector's size and the few
// operations that the compiler's own vector types (GCC and Clang, "Vector Extensions") lack or do badly:
//   kVectorBytes, kVectorRegisters, kFmaRoundsOnce, kHasLdexp, fma, maximum, any_above, multiply_words, exclusive_or,
//   bytes_as_words, bytes_as_longs, halves_as_words, words_as_longs, widen_halves, widen_bytes, widen_small,
//   narrow_halves, stream, end_streams, round_to_integer or, where it has instructions for them, ldexp and
//   off_integer, and first_bytes if it has an instruction for it.
// Everything here is in an unnamed namespace: each instruction set compiles its own copy, invisible to the linker.
#pragma once

#include "core/math.h"
#include "core/number.h"

#define SCALEDOT_INLINE inline __attribute__((always_inline))
// For functions that are called once a row or a tile. Inlined in several places, they would multiply the code, and with
// it the time to compile.
#define SCALEDOT_NOINLINE __attribute__((noinline))
// For code that runs only if an input is NaN or inf: not inlined, and optimised for size.
#define SCALEDOT_RARE __attribute__((noinline, cold))

namespace scaledot {
namespace {

template <class T>
struct Lanes;  // the integer types of T's width
template <>
struct Lanes<float> {
  using integer = int32_t;
  using word = uint32_t;
};
template <>
struct Lanes<double> {
  using integer = int64_t;
  using word = uint64_t;
};

template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

// A vector of N elements of type Operand. `loose` is the same at any address, and may alias any type.
template <class Operand, int N>
struct VectorOf {
  typedef Operand type __attribute__((vector_size(sizeof(Operand) * N)));
  typedef Operand loose __attribute__((vector_size(sizeof(Operand) * N), aligned(1), may_alias));
};
template <class T>
using Native = typename VectorOf<T, kVectorBytes / int(sizeof(T))>::type;
template <class Operand, int N>
using Small = typename VectorOf<Operand, N>::type;
template <class Operand, int N>
using Loose = typename VectorOf<Operand, N>::loose;

// Lanes of 0 or -1: the result of comparing two Vecs, and the condition of select.
template <class T>
struct Mask {
  Native<typename Lanes<T>::integer> bits;
};

template <class T>
struct Vec {
  Native<T> v;
  SCALEDOT_INLINE Vec() = default;
  SCALEDOT_INLINE Vec(Native<T> native) : v(native) {}
  SCALEDOT_INLINE explicit Vec(T x) : v(x - Native<T>{}) {}
};

template <class T>
SCALEDOT_INLINE Vec<T> operator+(Vec<T> a, Vec<T> b) {
  return a.v + b.v;
}
template <class T>
SCALEDOT_INLINE Vec<T> operator-(Vec<T> a, Vec<T> b) {
  return a.v - b.v;
}
template <class T>
SCALEDOT_INLINE Vec<T> operator*(Vec<T> a, Vec<T> b) {
  return a.v * b.v;
}
template <class T>
SCALEDOT_INLINE Vec<T> operator/(Vec<T> a, Vec<T> b) {
  return a.v / b.v;
}
template <class T>
SCALEDOT_INLINE Mask<T> operator<(Vec<T> a, Vec<T> b) {
  return {a.v < b.v};
}
template <class T>
SCALEDOT_INLINE Mask<T> operator==(Vec<T> a, Vec<T> b) {
  return {a.v == b.v};
}
template <class T>
SCALEDOT_INLINE Vec<T> select(Mask<T> mask, Vec<T> a, Vec<T> b) {
  return mask.bits ? a.v : b.v;
}

template <class T>
SCALEDOT_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {  // a * b + c
  return fma(a.v, b.v, c.v);
}
template <class T>
SCALEDOT_INLINE bool any_above(Vec<T> x, T limit) {
  return any_above(x.v, limit);
}
// 0, 1, 2, ...
template <class T>
SCALEDOT_INLINE Vec<T> lane_numbers() {
  Native<T> numbers;
#pragma GCC unroll 16
  for (int l = 0; l < kLanes<T>; ++l) numbers[l] = T(l);
  return numbers;
}
// a > b ? a : b: a NaN in a is dropped, a NaN in b stays.
template <class T>
SCALEDOT_INLINE Vec<T> maximum(Vec<T> a, Vec<T> b) {
  return maximum(a.v, b.v);
}

// ---------------------------------------------------------------------------------------------------- memory
template <class T>
SCALEDOT_INLINE Vec<T> load(const T* from) {
  return Native<T>(*reinterpret_cast<const Loose<T, kLanes<T>>*>(from));
}
template <class T>
SCALEDOT_INLINE void store(T* to, Vec<T> x) {
  *reinterpret_cast<Loose<T, kLanes<T>>*>(to) = x.v;
}

// The first `bytes` bytes of a vector, at least one, and zeros.
template <class Bytes>
SCALEDOT_INLINE Bytes first_bytes(const void* from, int64_t bytes, Bytes) {
  alignas(Bytes) uint8_t result[sizeof(Bytes)] = {};
  const uint8_t* const first = static_cast<const uint8_t*>(from);
  int64_t k = 0;
  for (; k + 8 <= bytes; k += 8) __builtin_memcpy(result + k, first + k, 8);
  for (; k + 2 <= bytes; k += 2) __builtin_memcpy(result + k, first + k, 2);
  for (; k < bytes; ++k) result[k] = first[k];
  return __builtin_bit_cast(Bytes, result);
}
template <class V, class Element>
SCALEDOT_INLINE V first_elements(const Element* from, int64_t n) {
  return __builtin_bit_cast(V, first_bytes(from, n * int64_t(sizeof(Element)), Native<uint8_t>{}));
}

// A non-temporal store to an aligned address. No other thread may read it before end_streams().
SCALEDOT_INLINE void stream(float* to, Vec<float> x) { stream(to, x.v); }

SCALEDOT_INLINE Vec<float> widen_load(const float* from) { return load(from); }
SCALEDOT_INLINE Vec<double> widen_load(const double* from) { return load(from); }
SCALEDOT_INLINE Vec<float> widen_load(const BFloat16* from) {
  return Native<float>(Native<uint32_t>(halves_as_words(&from->bits)) << 16);
}
// The even or odd elements of two vectors: half the instructions of widening neighbours.
SCALEDOT_INLINE Native<uint32_t> load_words(const BFloat16* from) {
  return *reinterpret_cast<const Loose<uint32_t, kLanes<float>>*>(from);
}
SCALEDOT_INLINE Vec<float> widen_even(const BFloat16* from) { return Native<float>(load_words(from) << 16); }
SCALEDOT_INLINE Vec<float> widen_odd(const BFloat16* from) { return Native<float>(load_words(from) & 0xffff0000u); }
SCALEDOT_INLINE Vec<float> widen_load(const Float16* from) { return widen_halves(from); }
SCALEDOT_INLINE Vec<float> widen_load(const Float8E4M3* from) { return widen_bytes(from); }
SCALEDOT_INLINE Vec<float> widen_load(const Float8E5M2* from) { return widen_bytes(from); }
SCALEDOT_INLINE Vec<float> widen_load(const Int8* from) { return widen_bytes(from); }

// The first n elements of a vector, at least one, widened, and zeros.
template <class T, class Storage>
SCALEDOT_INLINE Vec<T> widen_first(const Storage* from, int64_t n) {
  const auto bits = first_elements<Native<uint8_t>>(from, n);
  return widen_load(reinterpret_cast<const Storage*>(&bits));
}

SCALEDOT_INLINE void narrow_store(float* to, Vec<float> x) { store(to, x); }
SCALEDOT_INLINE void narrow_store(double* to, Vec<double> x) { store(to, x); }
SCALEDOT_INLINE void narrow_store(BFloat16* to, Vec<float> x) {
  using Words = Native<uint32_t>;
  const Words bits = Words(x.v);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = x.v != x.v ? Words{} + 0x7fc0u : rounded;
  *reinterpret_cast<Loose<uint16_t, kLanes<float>>*>(to) =
      __builtin_convertvector(quiet, Small<uint16_t, kLanes<float>>);
}
SCALEDOT_INLINE void narrow_store(Float16* to, Vec<float> x) { narrow_halves(to, x.v); }
// Numbers that bfloat16 has, or NaN with a bit set in the upper half: nothing is rounded.
SCALEDOT_INLINE void upper_store(BFloat16* to, Vec<float> x) {
  *reinterpret_cast<Loose<uint16_t, kLanes<float>>*>(to) =
      __builtin_convertvector(Native<uint32_t>(x.v) >> 16, Small<uint16_t, kLanes<float>>);
}

// kLanes<T> unsigned integers, widened to T's width.
template <class T>
SCALEDOT_INLINE Native<typename Lanes<T>::word> as_lanes(const uint8_t* from) {
  if constexpr (sizeof(T) == sizeof(float))
    return Native<uint32_t>(bytes_as_words(from));
  else
    return Native<uint64_t>(bytes_as_longs(from));
}
template <class T>
SCALEDOT_INLINE Native<typename Lanes<T>::word> as_lanes(const uint32_t* from) {
  if constexpr (sizeof(T) == sizeof(float))
    return *reinterpret_cast<const Loose<uint32_t, kLanes<T>>*>(from);
  else
    return Native<uint64_t>(words_as_longs(from));
}

// Lanes where bytes[lane] == value.
template <class T>
SCALEDOT_INLINE Mask<T> bytes_equal(const uint8_t* bytes, uint8_t value) {
  return {as_lanes<T>(bytes) == (Native<typename Lanes<T>::word>{} + value)};
}

// ---------------------------------------------------------------------------------------------------- reductions
template <class T>
SCALEDOT_INLINE Native<typename Lanes<T>::word> lanes_apart(int distance) {
  Native<typename Lanes<T>::word> lanes;
#pragma GCC unroll 16
  for (int l = 0; l < kLanes<T>; ++l) lanes[l] = typename Lanes<T>::word(l ^ distance);
  return lanes;
}

// Lane l of the result is lane lanes[l] of a and b, numbered from a's first to b's last. V and W have as many lanes.
template <class V, class W>
SCALEDOT_INLINE V shuffle(V a, V b, W lanes) {
#ifdef __clang__  // its __builtin_shufflevector takes literal lanes only
  constexpr int kCount = int(sizeof(V) / sizeof(a[0]));
  V result;
#pragma GCC unroll 16
  for (int l = 0; l < kCount; ++l) result[l] = int(lanes[l]) < kCount ? a[lanes[l]] : b[lanes[l] - kCount];
  return result;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Combines lane l with lane l + distance, and halves the distance each time: the order is fixed.
template <class T, int kDistance = kLanes<T> / 2, class Combine>
SCALEDOT_INLINE T reduce(Native<T> x, Combine combine) {
  if constexpr (kDistance == 0) {
    return x[0];
  } else {
    return reduce<T, kDistance / 2>(combine(x, shuffle(x, x, lanes_apart<T>(kDistance))), combine);
  }
}
template <class T>
SCALEDOT_INLINE T sum_of(Vec<T> x) {
  return reduce<T>(x.v, [](Native<T> a, Native<T> b) { return a + b; });
}
template <class T>
SCALEDOT_INLINE T maximum_of(Vec<T> x) {
  return reduce<T>(x.v, [](Native<T> a, Native<T> b) { return a > b ? a : b; });
}

// ---------------------------------------------------------------------------------------------------- functions
using scaledot::tanh;  // the scalar overloads: the vector one below would hide them

// 2^x = 2^n 2^r with n = round(x), |r| <= 1/2.
//   float: 2^r by a minimax polynomial of degree 6, relative error 2e-09
//   double: the Taylor series of exp(r ln 2), degree 13, relative error 4e-18
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float kLowest = -126.0f;  // below this, 2^x is not a normal number
  static constexpr float kArgument = 1.0f;   // what r is multiplied by
  static constexpr float kCoefficients[] = {
      1.534582055e-04f, 1.339993126e-03f, 9.618488923e-03f, 5.550328777e-02f, 2.402264689e-01f, 6.931472057e-01f, 1.0f};
};
template <>
struct Exp2<double> {
  static constexpr double kLowest = -1022.0;
  static constexpr double kArgument = 0.6931471805599453094;
  static constexpr double kCoefficients[] = {1.6059043836821613e-10,
                                             2.08767569878681e-09,
                                             2.505210838544172e-08,
                                             2.755731922398589e-07,
                                             2.7557319223985893e-06,
                                             2.48015873015873e-05,
                                             0.0001984126984126984,
                                             0.001388888888888889,
                                             0.008333333333333333,
                                             0.041666666666666664,
                                             0.16666666666666666,
                                             0.5,
                                             1.0,
                                             1.0};
};

// The first coefficient is that of the highest power.
template <class T, size_t kTerms>
SCALEDOT_INLINE Vec<T> polynomial(const T (&coefficients)[kTerms], Vec<T> r) {
  Vec<T> y(coefficients[0]);
#pragma GCC unroll 16
  for (size_t k = 1; k < kTerms; ++k) y = fma(y, r, Vec<T>(coefficients[k]));
  return y;
}

// y 2^n for an integer n. Without an instruction for it, n is at least kLowest - 1, for which the result is 0: adding
// 1.5 * 2^(mantissa bits) leaves n in the low bits of the sum. Shifted left, they are added to the exponent of 1.
template <class T>
struct Exponent;
template <>
struct Exponent<float> {
  static constexpr float kRound = 12582912.0f;
  static constexpr int kMantissaBits = 23;
};
template <>
struct Exponent<double> {
  static constexpr double kRound = 6755399441055744.0;
  static constexpr int kMantissaBits = 52;
};
template <class T>
SCALEDOT_INLINE Vec<T> ldexp(Vec<T> y, Vec<T> n) {
  if constexpr (kHasLdexp) {
    return ldexp(y.v, n.v);
  } else {
    using Words = Native<typename Lanes<T>::word>;
    const Words shifted = Words((n + Vec<T>(Exponent<T>::kRound)).v), one = Words(Vec<T>(T(1)).v);
    return y * Vec<T>(Native<T>(one + (shifted << Exponent<T>::kMantissaBits)));
  }
}

// x = n + r with n = round(x). Infinities are integers where there is an instruction for r.
template <class T>
struct SplitNumber {
  Vec<T> n, r;
};
template <class T>
SCALEDOT_INLINE SplitNumber<T> split(Vec<T> x) {
  if constexpr (kHasLdexp) {
    const Vec<T> r = off_integer(x.v);
    return {x - r, r};
  } else {
    const Vec<T> n = round_to_integer(x.v);
    return {n, x - n};
  }
}

// 2^x, where x is below the largest exponent. NaN stays NaN. A result below the smallest normal number may be 0.
template <class T>
SCALEDOT_INLINE Vec<T> exp2(Vec<T> x) {
  if constexpr (!kHasLdexp) x = maximum(Vec<T>(Exp2<T>::kLowest - T(1)), x);  // NaN stays
  auto [n, r] = split(x);
  if constexpr (Exp2<T>::kArgument != T(1)) r = r * Vec<T>(Exp2<T>::kArgument);
  return ldexp(polynomial(Exp2<T>::kCoefficients, r), n);
}

// The polynomial R of 1 - 2^r = r R(r), |r| <= 1/2.
//   float: minimax, fitted to the relative error by weighted least squares (Lawson's iteration): 1.1e-08
//   double: the Taylor series, terms -ln(2)^k / k!; relative error 3e-19
template <class T>
struct OneMinusExp2;
template <>
struct OneMinusExp2<float> {
  static constexpr float kCoefficients[] = {-1.5403495e-04f, -1.3390735e-03f, -9.618238e-03f,
                                            -5.5503573e-02f, -2.4022649e-01f, -6.931472e-01f};
};
template <>
struct OneMinusExp2<double> {
  static constexpr double kCoefficients[] = {
      -6.77872635482254563e-14, -1.36914888539041289e-12, -2.56784359934882051e-11, -4.4455382718708115e-10,
      -7.05491162080112333e-9,  -1.01780860092396997e-7,  -1.32154867901443095e-6,  -0.0000152527338040598403,
      -0.0001540353039338161,   -0.00133335581464284434,  -0.00961812910762847716,  -0.05550410866482158,
      -0.240226506959100712,    -0.693147180559945309};
};

// tanh(x) = w / (2 - w) with the sign of x, and w = 1 - exp(-2 |x|).
//   w = 1 - 2^n 2^r = 2^n (1 - 2^r) + (1 - 2^n): no cancellation for small x, where n = 0
// n stops where w has long been rounded to 1. NaN stays NaN.
template <class T>
SCALEDOT_INLINE Vec<T> tanh(Vec<T> x) {
  using Words = Native<typename Lanes<T>::word>;
  constexpr T kLowest = -64;
  const Words sign = Words(Vec<T>(T(-0.0)).v);
  const Vec<T> size = Native<T>(Words(x.v) & ~sign), one(T(1));
  const Vec<T> exponent = maximum(Vec<T>(kLowest), size * Vec<T>(T(-2 * kLog2e)));
  const auto [n, r] = split(exponent);
  const Vec<T> y = polynomial(OneMinusExp2<T>::kCoefficients, r), power = ldexp(one, n);
  const Vec<T> w = fma(power, r * y, one - power);
  const Vec<T> result = w / (Vec<T>(T(2)) - w);
  return Native<T>(Words(result.v) | (Words(x.v) & sign));
}

}  // namespace
}  // namespace scaledot
