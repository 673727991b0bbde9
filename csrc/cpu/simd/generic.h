// 16-byte vectors that every compiler target has (SSE2, NEON, ...).
#pragma once

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kStripRows = 6;  // 6 x 2 sums, 2 vectors of B and one of A in 16 registers

template <class V>
inline V multiply_add(V a, V b, V c) {
  return a * b + c;
}
template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

using Floats = float __attribute__((vector_size(kVectorBytes)));

inline Floats widen_halves(const Float16* from) {
  return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
inline void narrow_halves(Float16* to, Floats x) {
  for (int k = 0; k < 4; ++k) narrow(x[k], to[k]);
}

}  // namespace
}  // namespace scaledot
