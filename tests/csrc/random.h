// Random numbers that are equal on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace scaledot::testing {

// splitmix64, Box and Muller.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
  std::vector<double> normals(int64_t count, double spread = 1) {
    std::vector<double> result(static_cast<size_t>(count));
    for (double& x : result) x = normal() * spread;
    return result;
  }

 private:
  uint64_t state_;
};

}  // namespace scaledot::testing
