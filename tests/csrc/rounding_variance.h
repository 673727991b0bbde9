// Variances of rounding errors: of one rounding, and of a sum. rounding_limits.h says how they add up.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/problem.h"

namespace scaledot::testing {

// Largest relative error of one rounding.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::float64: return 0x1p-53;
    case DType::float32: return 0x1p-24;
    case DType::float16: return 0x1p-11;
    default: return 0x1p-8;
  }
}
// Half the distance of the numbers next to 0: the largest error of one rounding there.
inline double half_smallest(DType dtype) {
  switch (dtype) {
    case DType::float64: return 0;  // the numbers of the tests do not come near
    case DType::float16: return 0x1p-25;
    case DType::bfloat16: return 0x1p-134;
    default: return 0x1p-150;
  }
}
inline double square(double x) { return x * x; }
inline double variance_of(double unit) { return square(unit) / 3; }

// The largest error, in standard deviations. The tests and the fuzzer compare some 10^10 numbers. One in 10^10 of a
// normal distribution is beyond 6.5.
constexpr double kDeviations = 6.5;
// The variance whose limit is `bound`, for errors that may be as large as that.
inline double variance_of_bound(double bound) { return square(bound / kDeviations); }
// Variance of a library function (exp, tanh, log), in roundings: its error may be 3 units.
constexpr double kFunction = 9;

// The sum of terms[k] is made by `count` additions in any order. A partial sum of a part f of the terms is about
// sqrt(f sum of squares) + f sum. A run of r equal terms adds up to r / 3 units of error, at most. Powers of 2 add up
// without one.
struct Sum {
  static constexpr double kEqual = 0x1p-40;  // relative difference of terms that are equal but for the oracle's errors
  double sum = 0, squares = 0;
  static constexpr double kLongRun = 16;  // from here on, the errors of runs may all have one sign
  double last = 0, run = 0, runs = 0;     // runs: the sum of r^2
  double in_long_runs = 0;                // the sum of r
  void add(double term) {
    sum += term, squares += square(term);
    int exponent;
    const bool equal = std::abs(term - last) <= kEqual * std::abs(term);
    run = equal && std::abs(std::frexp(term, &exponent)) != 0.5 ? run + 1 : 1;
    last = term, runs += 2 * run - 1;
    if (run >= kLongRun) in_long_runs += run == kLongRun ? run : 1;
  }
  // By how much the variance is larger if all terms have one relative error, in units of that error's variance.
  double excess() const { return max(square(sum) - squares, 0.); }
  // Variances of the roundings of partial sums, in units of the square of the sum.
  double additions(double count) const {
    return max(count / 3, max(runs, square(in_long_runs)) * variance_of_bound(1. / 3) / variance_of(1));
  }
  double variance(double count, double rounding) const {
    return rounding * (count * squares / 2 + additions(count) * square(sum));
  }
};

}  // namespace scaledot::testing
