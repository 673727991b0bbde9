// The loops of peaks.h for vectors of kBytes bytes. Internal linkage and no STL, as in every file with its own flags
// (csrc/core/problem.h says why).
#pragma once

#include "peaks.h"

namespace scaledot::bench {
namespace {

// To keep two FMA units busy with a latency of 4 to 5 cycles takes 8 to 10 chains. 12 chains and two constants fit
// into the 16 registers of AVX2.
constexpr int kChains = 12;

template <class T, int kBytes>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = kBytes / int(sizeof(T));
};

// Adds whole vectors first: reading the lanes of an array one by one would keep the array in memory.
template <int kCount, class V>
double sum_of(const V* vectors) {
  V sum = vectors[0];
#pragma GCC unroll 16
  for (int k = 1; k < kCount; ++k) sum += vectors[k];
  double total = 0;
  for (int k = 0; k < int(sizeof(V) / sizeof(sum[0])); ++k) total += double(sum[k]);
  return total;
}

// x = x * a + b converges to b / (1 - a): no overflow and no subnormals, which would slow down the CPU.
template <class T, int kBytes>
double fma(int64_t rounds) {
  using V = typename Vector<T, kBytes>::type;
  V a = V{} + T(0.75), b = V{} + T(0.25), x[kChains];
  asm(""
      : "+v"(a), "+v"(b));  // unknown to the compiler, which could otherwise compute a chain that starts at b / (1 - a)
  for (int k = 0; k < kChains; ++k) x[k] = V{} + T(k);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) x[k] = x[k] * a + b;
  }
  return sum_of<kChains>(x);
}

template <class T, int kBytes>
constexpr double multiply_add_flops() {
  return 2.0 * kChains * Vector<T, kBytes>::kLanes;
}

// Each stream is a contiguous part of the data. Two lines a stream and step keep the address arithmetic small.
template <int kBytes, int kStreams>
float read(const float* data, int64_t count) {
  using V = typename Vector<float, kBytes>::type;
  typedef V Unaligned __attribute__((aligned(4), may_alias));
  constexpr int kLanes = Vector<float, kBytes>::kLanes, kStep = 128 / int(sizeof(float));
  static_assert(kReadBlock % (kStreams * kStep) == 0);
  const int64_t part = count / kStreams;
  V sum[kStreams] = {};
  for (int64_t k = 0; k < part; k += kStep)
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s)
#pragma GCC unroll 4
      for (int j = 0; j < kStep; j += kLanes) sum[s] += *reinterpret_cast<const Unaligned*>(data + s * part + k + j);
  return float(sum_of<kStreams>(sum));
}

// Block by block, each as kStreams streams.
template <int kBytes, int kStreams>
float read_blocks(const float* data, int64_t count) {
  float sum = 0;
  for (int64_t k = 0; k < count; k += kReadBlock) sum += read<kBytes, kStreams>(data + k, kReadBlock);
  return sum;
}

}  // namespace
}  // namespace scaledot::bench
