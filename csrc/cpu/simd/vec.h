// Vec<T>: a hardware vector of floats or doubles, the only thing the algorithms know of an instruction set.
//
// An instruction-set file (generic.h, avx2.h, avx512.h) names the vector's size and the microkernel's shape, and supplies
// the few operations that the compiler's own vector types (GCC and Clang, "Vector Extensions") lack or do badly:
//   kVectorBytes, kStripRows, multiply_add, maximum, widen_halves, narrow_halves
// Everything here is in an unnamed namespace: each instruction set compiles its own copy, invisible to the linker.
#pragma once

#include "core/number.h"

#define SCALEDOT_INLINE inline __attribute__((always_inline))

namespace scaledot {
namespace {

template <class T>
struct Lanes;  // integers of T's width
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

// N elements of type E in a vector; `loose` is the same, at any address and over any type.
template <class E, int N>
struct VectorOf {
  typedef E type __attribute__((vector_size(sizeof(E) * N)));
  typedef E loose __attribute__((vector_size(sizeof(E) * N), aligned(1), may_alias));
};
template <class T>
using Native = typename VectorOf<T, kVectorBytes / int(sizeof(T))>::type;
template <class E, int N>
using Small = typename VectorOf<E, N>::type;
template <class E, int N>
using Loose = typename VectorOf<E, N>::loose;

// All lanes of an integer vector are 0 or -1: what a comparison of Vecs gives and select takes.
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
SCALEDOT_INLINE Vec<T> multiply_add(Vec<T> a, Vec<T> b, Vec<T> c) {  // a * b + c
  return multiply_add(a.v, b.v, c.v);
}
// a > b ? a : b, so a NaN in a is dropped and one in b stays.
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

SCALEDOT_INLINE Vec<float> widen_load(const float* from) { return load(from); }
SCALEDOT_INLINE Vec<double> widen_load(const double* from) { return load(from); }
SCALEDOT_INLINE Vec<float> widen_load(const BFloat16* from) {
  const Small<uint16_t, kLanes<float>> bits = *reinterpret_cast<const Loose<uint16_t, kLanes<float>>*>(from);
  return Native<float>(__builtin_convertvector(bits, Native<uint32_t>) << 16);
}
SCALEDOT_INLINE Vec<float> widen_load(const Float16* from) { return widen_halves(from); }

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

// Lanes where bytes[lane] == value.
template <class T>
SCALEDOT_INLINE Mask<T> bytes_equal(const uint8_t* bytes, uint8_t value) {
  using Integers = Native<typename Lanes<T>::integer>;
  const Small<uint8_t, kLanes<T>> small = *reinterpret_cast<const Loose<uint8_t, kLanes<T>>*>(bytes);
  return {__builtin_convertvector(small, Integers) == (Integers{} + value)};
}

// ---------------------------------------------------------------------------------------------------- reductions
// Halves the vector until one number is left: a fixed order, whatever the data.
template <class T, int N, class Combine>
SCALEDOT_INLINE T reduce(Small<T, N> x, Combine combine) {
  if constexpr (N == 2) {
    return combine(x[0], x[1]);
  } else {
    struct Halves {
      Small<T, N / 2> low, high;
    };
    const Halves h = __builtin_bit_cast(Halves, x);
    if constexpr (N == 4) {
      return combine(combine(h.low[0], h.high[0]), combine(h.low[1], h.high[1]));
    } else {
      Small<T, N / 2> joined;
      for (int k = 0; k < N / 2; ++k) joined[k] = combine(h.low[k], h.high[k]);
      return reduce<T, N / 2>(joined, combine);
    }
  }
}
template <class T>
SCALEDOT_INLINE T sum_of(Vec<T> x) {
  return reduce<T, kLanes<T>>(x.v, [](T a, T b) { return a + b; });
}
template <class T>
SCALEDOT_INLINE T maximum_of(Vec<T> x) {
  return reduce<T, kLanes<T>>(x.v, [](T a, T b) { return a > b ? a : b; });
}

// ---------------------------------------------------------------------------------------------------- functions
// 2^t = 2^n 2^f with n = round(t) and |f| <= 1/2. Adding kRound leaves n in the low bits of the sum, ready to be shifted
// into the exponent. Results below the smallest normal number are 0; NaN stays NaN; t must be below the largest exponent.
//   float: 2^f by a minimax polynomial of degree 6, relative error 2e-9;  double: Taylor series of degree 13, 4e-18
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr int kMantissaBits = 23;
  static constexpr float kLowest = -126.0f;
  static constexpr float kCoefficients[] = {1.535336178e-04f, 1.339887446e-03f, 9.618437358e-03f, 5.550332471e-02f,
                                            2.402264791e-01f, 6.931472029e-01f, 1.0f};
};
template <>
struct Exp2<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52;
  static constexpr double kLowest = -1022.0;
  static constexpr double kCoefficients[] = {
      1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011233e-9,
      1.0178086009239699e-7,  1.3215486790144310e-6,  1.5252733804059841e-5,  1.5403530393381608e-4,
      1.3333558146428443e-3,  9.6181291076284772e-3,  5.5504108664821580e-2,  2.4022650695910072e-1,
      6.9314718055994531e-1,  1.0};
};

template <class T>
SCALEDOT_INLINE Vec<T> exp2(Vec<T> t) {
  using C = Exp2<T>;
  using Words = Native<typename Lanes<T>::word>;
  const Vec<T> shifted = t + Vec<T>(C::kRound);
  const Vec<T> f = t - (shifted - Vec<T>(C::kRound));
  Vec<T> y(C::kCoefficients[0]);
  for (unsigned k = 1; k < sizeof(C::kCoefficients) / sizeof(T); ++k)
    y = multiply_add(y, f, Vec<T>(C::kCoefficients[k]));
  const Vec<T> scaled = Native<T>(Words(y.v) + (Words(shifted.v) << C::kMantissaBits));
  return select(t < Vec<T>(C::kLowest), Vec<T>(T(0)), scaled);
}

constexpr double kLog2e = 1.4426950408889634074;

// exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1) with x = n ln 2 + r: no cancellation for small x, where n = 0.
template <class T>
SCALEDOT_INLINE Vec<T> expm1(Vec<T> x) {
  using Words = Native<typename Lanes<T>::word>;
  constexpr T kLn2High = sizeof(T) == 4 ? T(0.693359375) : T(0.693147180369123816490);
  constexpr T kLn2Low = sizeof(T) == 4 ? T(-2.12194440054690583e-4) : T(1.90821492927058770002e-10);
  constexpr int kDegree = sizeof(T) == 4 ? 8 : 14;
  const Vec<T> shifted = multiply_add(x, Vec<T>(T(kLog2e)), Vec<T>(Exp2<T>::kRound));
  const Vec<T> n = shifted - Vec<T>(Exp2<T>::kRound);
  const Vec<T> r = multiply_add(n, Vec<T>(-kLn2Low), multiply_add(n, Vec<T>(-kLn2High), x));
  T factorial[kDegree + 1] = {T(1)};
  for (int k = 1; k <= kDegree; ++k) factorial[k] = factorial[k - 1] * T(k);
  Vec<T> y(T(1) / factorial[kDegree]);
  for (int k = kDegree - 1; k >= 1; --k) y = multiply_add(y, r, Vec<T>(T(1) / factorial[k]));
  const Vec<T> one(T(1));
  const Vec<T> power = Native<T>(Words(one.v) + (Words(shifted.v) << Exp2<T>::kMantissaBits));
  return multiply_add(power, y * r, power - one);
}

// tanh(x) = e / (e + 2) with e = exp(2 x) - 1; |x| is cut where tanh is 1 to the last bit.
template <class T>
SCALEDOT_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> limit(sizeof(T) == 4 ? T(10) : T(20));
  const Vec<T> low = select(limit < x, limit, x);  // keeps NaN
  const Vec<T> cut = select(low < Vec<T>(T(0)) - limit, Vec<T>(T(0)) - limit, low);
  const Vec<T> e = expm1(cut + cut);
  return e / (e + Vec<T>(T(2)));
}

}  // namespace
}  // namespace scaledot
