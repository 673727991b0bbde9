// Runs a kernel on random inputs. Prints its largest error against float64, and its time next to that of the first
// rung.
#pragma once

#include <chrono>
#include <cstdio>
#include <random>

#include "naive.h"

using Kernel = void(const float* query, const float* key, const float* value, float* output);

inline double milliseconds(Kernel* kernel, const std::vector<float>& in, float* out) {
  double best = 1e9;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    kernel(in.data(), in.data() + kRows * kDim, in.data() + (kRows + kKeys) * kDim, out);
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

inline int check(const char* name, Kernel* kernel) {
  std::mt19937 bits(0);
  std::normal_distribution<float> normal;
  std::vector<float> in((kRows + 2 * kKeys) * kDim), out(kRows * kDim);
  for (float& x : in) x = normal(bits);
  const std::vector<double> exact(in.begin(), in.end());
  std::vector<double> expected(out.size());
  naive(exact.data(), exact.data() + kRows * kDim, exact.data() + (kRows + kKeys) * kDim, expected.data());

  const double first = milliseconds(naive<float>, in, out.data()), time = milliseconds(kernel, in, out.data());
  double error = 0;
  for (size_t k = 0; k < out.size(); ++k) error = std::max(error, std::fabs(out[k] - expected[k]));
  std::printf("%s: largest error %.1e, %.2f ms, %.2f of the time of naive\n", name, error, time, time / first);
  return error < 1e-6 ? 0 : 1;
}
