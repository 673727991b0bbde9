// The tiles that a score function masks by itself (the mask of a score program: core/score_program.h).
//
// A mask is computed once a tile and not for each score: each register holds the least and the largest value that it
// may have there. Rows and keys of a tile are neighbours, so that is exact for the usual masks, by distances and by
// documents. Where it says too little, the tile is computed, and the program masks its scores.
#pragma once

#include "cpu/simd/attention/score_program.h"

namespace scaledot {
namespace {

constexpr int kMaskRegisters = 64;           // of a space; larger masks are not used
constexpr int64_t kLoadsOfMask = 1024;       // captured numbers that a load is compared over
constexpr double kExact = int64_t(1) << 53;  // integers up to here are exact

class ScoreMask {
 public:
  ScoreMask(const Problem& p, const QueryTile& tile, Range keys)
      : program_(*p.score_program), single_(p.dtype != DType::float64), tile_(tile), keys_(keys) {}

  // Whether every score of the tile is -inf.
  SCALEDOT_NOINLINE bool hides_all() {
    const ScoreProgram& mask = *program_.mask;
    const ScoreInstruction* instruction = mask.instructions;
    for (int s = 0; s < kScoreSpaces; ++s) {
      if (mask.registers[s] > kMaskRegisters) return false;
      for (int n = 0; n < mask.registers[s]; ++n) registers_[s][n] = kAnything;
    }
    registers_[0][0] = {0, 0};  // the operand that an operation does not have
    for (int s = 0; s < kScoreSpaces; ++s)
      for (int n = 0; n < mask.counts[s]; ++n, ++instruction) {
        const ScoreInstruction& i = *instruction;
        // An index that may be out of bounds has to be met, and reported.
        if (is_bound(i.operation) && !is_inside(at(i.a), i.integer)) return false;
        at(i.to) = values(i, at(i.a), at(i.b), at(i.c));
      }
    return is_zero(at(mask.result));
  }

 private:
  // From the least value to the largest; both are finite. Otherwise any value, and NaN.
  struct Interval {
    double low, high;
  };
  static constexpr Interval kAnything = {-__builtin_inf(), __builtin_inf()};

  static bool is_known(Interval x) { return x.low > -__builtin_inf() && x.high < __builtin_inf(); }
  static bool is_zero(Interval x) { return x.low == 0 && x.high == 0; }
  static Interval hull(Interval x, Interval y) { return {min(x.low, y.low), max(x.high, y.high)}; }
  static Interval truth(bool always, bool never) { return {always ? 1.0 : 0.0, never ? 0.0 : 1.0}; }
  static bool is_bound(ScoreOperation o) { return o == ScoreOperation::bound || o == ScoreOperation::float_bound; }
  static bool is_inside(Interval x, int64_t size) { return x.low >= -double(size) && x.high < double(size); }

  Interval& at(ScoreRegister r) { return registers_[int(r.space)][r.number]; }

  // Numbers are rounded as the program's are. Rounding keeps their order.
  Interval numbers(double low, double high) const {
    const Interval x = single_ ? Interval{double(float(low)), double(float(high))} : Interval{low, high};
    return is_known(x) ? x : kAnything;
  }
  static Interval integers(double low, double high) {
    return low >= -kExact && high <= kExact ? Interval{low, high} : kAnything;
  }
  template <class F>
  Interval rising(Interval a, const F& f) const {
    return numbers(f(a.low), f(a.high));
  }

  Interval values(const ScoreInstruction& i, Interval a, Interval b, Interval c) const {
    using Operation = ScoreOperation;
    switch (i.operation) {
      case Operation::constant: return numbers(i.number, i.number);
      case Operation::int_constant: return integers(double(i.integer), double(i.integer));
      case Operation::batch: return place(tile_.batch % program_.batches, 1);
      case Operation::head: return place(tile_.first_head, tile_.heads);
      case Operation::row: return place(tile_.rows.begin, count(tile_.rows));
      case Operation::key: return place(keys_.begin, count(keys_));
      case Operation::distance: return distance(double(i.integer));
      case Operation::less:
      case Operation::int_less: return truth(a.high < b.low, a.low >= b.high);
      case Operation::less_equal: return truth(a.high <= b.low, a.low > b.high);
      case Operation::equal:
      case Operation::int_equal: return truth(a.low == b.high && a.high == b.low, a.high < b.low || b.high < a.low);
      case Operation::select:
      case Operation::int_select: return is_zero(a) ? c : a.low > 0 || a.high < 0 ? b : hull(b, c);
      default: return is_known(a) && is_known(b) ? arithmetic(i, a, b) : kAnything;
    }
  }
  static Interval place(int64_t first, int64_t number) { return integers(double(first), double(first + number - 1)); }
  Interval distance(double sign) const {
    const double low = double(keys_.begin - tile_.rows.end + 1), high = double(keys_.end - 1 - tile_.rows.begin);
    return integers(sign < 0 ? -high : low, sign < 0 ? -low : high);
  }

  // The operands are finite. An operation that is missing here may give anything.
  Interval arithmetic(const ScoreInstruction& i, Interval a, Interval b) const {
    using Operation = ScoreOperation;
    switch (i.operation) {
      case Operation::add: return numbers(a.low + b.low, a.high + b.high);
      case Operation::int_add: return integers(a.low + b.low, a.high + b.high);
      case Operation::subtract: return numbers(a.low - b.high, a.high - b.low);
      case Operation::int_subtract: return integers(a.low - b.high, a.high - b.low);
      case Operation::multiply: {
        const Interval x = product(a, b);
        return numbers(x.low, x.high);
      }
      case Operation::int_multiply: {
        const Interval x = product(a, b);
        return integers(x.low, x.high);
      }
      case Operation::divide:
        if (b.low <= 0) return kAnything;
        return numbers(a.low / (a.low < 0 ? b.low : b.high), a.high / (a.high < 0 ? b.high : b.low));
      case Operation::minimum:
      case Operation::int_minimum: return {min(a.low, b.low), min(a.high, b.high)};
      case Operation::maximum:
      case Operation::int_maximum: return {max(a.low, b.low), max(a.high, b.high)};
      case Operation::absolute: return {max(max(a.low, -a.high), 0.0), max(-a.low, a.high)};
      case Operation::floor: return rising(a, [](double x) { return scalar_floor(x); });
      case Operation::ceil: return rising(a, [](double x) { return scalar_ceil(x); });
      case Operation::trunc: return rising(a, [](double x) { return scalar_trunc(x); });
      case Operation::to_float: return numbers(a.low, a.high);
      case Operation::to_int: return integers(scalar_trunc(a.low), scalar_trunc(a.high));
      case Operation::bound:
      case Operation::float_bound: return index(a, double(i.integer));
      case Operation::load:
        return single_ ? loaded(static_cast<const float*>(program_.numbers), program_.number_count, a, b)
                       : loaded(static_cast<const double*>(program_.numbers), program_.number_count, a, b);
      case Operation::int_load: return loaded(program_.integers, program_.integer_count, a, b);
      default: return kAnything;
    }
  }

  static Interval product(Interval a, Interval b) {
    const double x[] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
    return {min(min(x[0], x[1]), min(x[2], x[3])), max(max(x[0], x[1]), max(x[2], x[3]))};
  }

  // An index that is inside of its dimension: a negative one counts from the end.
  static Interval index(Interval a, double size) {
    if (a.low >= 0) return {scalar_trunc(a.low), scalar_trunc(a.high)};
    return a.high <= -1 ? Interval{scalar_trunc(a.low + size), scalar_trunc(a.high + size)} : Interval{0, size - 1};
  }

  // The least and the largest of all captured numbers from the first that is read to the last. Not inlined: gcc would
  // not vectorise the loop.
  template <class T>
  SCALEDOT_NOINLINE static Interval loaded(const T* data, int64_t size, Interval a, Interval b) {
    const Interval place = {a.low + b.low, a.high + b.high};
    if (place.low < 0 || place.high >= double(size) || place.high - place.low >= double(kLoadsOfMask)) return kAnything;
    const T* const first = data + int64_t(place.low);
    const int64_t count = int64_t(place.high - place.low) + 1;
    T low = *first, high = low, zero = T(0);  // x - x is 0 for finite x, NaN otherwise
    for (int64_t n = 0; n < count; ++n) {
      low = first[n] < low ? first[n] : low;
      high = first[n] > high ? first[n] : high;
      zero += first[n] - first[n];
    }
    return zero == T(0) ? bounded(low, high) : kAnything;
  }
  static Interval bounded(int64_t low, int64_t high) { return integers(double(low), double(high)); }
  static Interval bounded(double low, double high) { return {low, high}; }

  const ScoreProgram& program_;
  const bool single_;  // numbers are float
  const QueryTile& tile_;
  const Range keys_;
  Interval registers_[kScoreSpaces][kMaskRegisters];
};

// Whether the score function itself masks the whole tile.
inline bool masked_by_program(const Problem& p, const QueryTile& tile, Range keys) {
  return p.score_program && p.score_program->mask && ScoreMask(p, tile, keys).hides_all();
}

}  // namespace
}  // namespace scaledot
