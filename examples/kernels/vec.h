// A vector of kLanes floats, as GCC and Clang know it, with exp. The real one is csrc/cpu/simd/vec.h.
#pragma once

constexpr int kLanes = 8;
using Vector = float __attribute__((vector_size(4 * kLanes)));
using Ints = int __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* from) {
  Vector x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Vector x) { __builtin_memcpy(to, &x, sizeof x); }

// exp(x) = 2^n 2^f with n = round(x log2 e), for -87 < x <= 0. std::exp takes one number at a time.
inline Vector exp_of(Vector x) {
  x = x < -87.f ? Vector{} - 87.f : x;
  const Vector y = x * 1.44269504f, shifted = y + 12582912.f, f = (y - (shifted - 12582912.f)) * 0.693147181f;
  const Vector power = 1 + f * (1 + f * (1 / 2.f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f / 720.f)))));
  return Vector(Ints(power) + (Ints(shifted) << 23));
}
