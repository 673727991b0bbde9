// Runs a score program (core/score_program.h) on the scores of a tile, a row at a time.
//
// An operation reads and writes whole arrays of numbers, so deciding which it is costs little. A register has 8 bytes
// for each number. Values that depend on the row or the key alone are computed once a tile, for all rows or all keys.
// Those that depend on their distance and the head are computed when a head of the tile begins, for all diagonals. A
// row's distances are neighbours, so it reads them where they are.
#pragma once

#include "core/arena.h"
#include "core/score_program.h"
#include "cpu/simd/attention/query_tiles.h"

namespace scaledot {
namespace {

// Numbers in a register of each space, whole vectors. A constant has as many numbers as any other register.
constexpr int64_t kRegisterRows = (kTileRows + kUnitSide - 1) / kUnitSide * kUnitSide;
constexpr int64_t kRegisterDiagonals = kRegisterRows + kTileKeys;
constexpr int64_t kRegisterSizes[kScoreSpaces] = {kRegisterDiagonals, kRegisterRows,      kRegisterRows,
                                                  kTileKeys,          kRegisterDiagonals, kTileKeys};
// Whether a register has a number for each row of a tile, not one for each key or diagonal.
constexpr bool is_by_row(ScoreSpace space) { return space == ScoreSpace::head || space == ScoreSpace::row; }
constexpr int64_t kRegisterBytes = 8;  // of a number
constexpr int kOperands = 3;

// -------------------------------------------------------------------------------------------------- arithmetic
using scaledot::exp;  // the scalar overloads: the vector one below would hide them

// exp(x) = 2^t (1 + ln 2 (x log2 e - t)), where t is x log2(e), rounded.
template <class T>
SCALEDOT_INLINE Vec<T> exp(Vec<T> x) {
  constexpr bool kSingle = sizeof(T) == sizeof(float);
  constexpr T kLog2eLow = kSingle ? T(kLog2e - double(float(kLog2e))) : T(2.0355273740931033e-17);
  constexpr T kHighest = kSingle ? T(88.72283) : T(709.782712893384), kLowest = kSingle ? T(-110) : T(-750);
  const Vec<T> bounded = maximum(Vec<T>(kLowest), x), log2e{T(kLog2e)}, t = bounded * log2e;
  const Vec<T> rest = fma(bounded, Vec<T>(kLog2eLow), fma(bounded, log2e, Vec<T>(T(0)) - t));
  const Vec<T> power = exp2(t), result = fma(power, rest * Vec<T>(T(1 / kLog2e)), power);
  return select(Vec<T>(kHighest) < x, Vec<T>(T(__builtin_inf())), result);
}
template <class T>
SCALEDOT_INLINE Vec<T> sigmoid(Vec<T> x) {
  const Vec<T> one(T(1));
  return one / (one + exp(Vec<T>(T(0)) - x));
}

// Divides many numbers by one with the bits of a division, which takes several times as long.
//   q = x (1 / y)     twice: q + (x - q y) (1 / y)
// Each remainder is exact, and the second correction is rounded as x / y is: Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990.
template <class T>
struct Divisor {
  T y, inverse;
  explicit Divisor(T by) : y(by), inverse(T(1) / by) {}

  // Whether no step can overflow or underflow if the quotient does not.
  bool works() const {
    constexpr T kLeast = sizeof(T) == sizeof(float) ? T(0x1p-60) : T(0x1p-500);
    const T size = y < T(0) ? -y : y;
    return kFmaRoundsOnce && size > kLeast && size < 1 / kLeast;
  }
  SCALEDOT_INLINE Vec<T> divide(Vec<T> x) const {
    const Vec<T> minus_y(-y), r(inverse), q = x * r;
    const Vec<T> once = fma(fma(q, minus_y, x), r, q), twice = fma(fma(once, minus_y, x), r, once);
    return select(twice == twice, twice, q);  // the remainder of an infinite quotient is NaN
  }
};

// The functions that have no vector form here; double has its own overloads.
#define SCALEDOT_SCALAR_FUNCTION(name)                                   \
  inline float scalar_##name(float x) { return __builtin_##name##f(x); } \
  inline double scalar_##name(double x) { return __builtin_##name(x); }
SCALEDOT_SCALAR_FUNCTION(log1p)
SCALEDOT_SCALAR_FUNCTION(expm1)
SCALEDOT_SCALAR_FUNCTION(erf)
SCALEDOT_SCALAR_FUNCTION(sin)
SCALEDOT_SCALAR_FUNCTION(cos)
SCALEDOT_SCALAR_FUNCTION(sqrt)
SCALEDOT_SCALAR_FUNCTION(floor)
SCALEDOT_SCALAR_FUNCTION(ceil)
SCALEDOT_SCALAR_FUNCTION(trunc)
SCALEDOT_SCALAR_FUNCTION(rint)
#undef SCALEDOT_SCALAR_FUNCTION
inline float scalar_pow(float a, float b) { return __builtin_powf(a, b); }
inline double scalar_pow(double a, double b) { return __builtin_pow(a, b); }
inline float scalar_fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline double scalar_fmod(double a, double b) { return __builtin_fmod(a, b); }

// The remainder with the sign of the divisor, as Python's %.
template <class T>
inline T float_remainder(T a, T b) {
  const T rest = scalar_fmod(a, b);
  return rest != T(0) && (rest < T(0)) != (b < T(0)) ? rest + b : rest;
}

// Integers wrap around, as torch's do. A division by 0, which torch refuses, gives 0.
using Word = uint64_t;
inline int64_t int_truncate_divide(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? int64_t(-Word(a)) : a / b; }
inline int64_t int_fmod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
inline int64_t int_remainder(int64_t a, int64_t b) {
  const int64_t rest = int_fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
inline int64_t int_floor_divide(int64_t a, int64_t b) {
  return int_truncate_divide(a, b) - (b != 0 && int_fmod(a, b) != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
// Truncates; the nearest end of the range for numbers beyond it, and 0 for NaN.
template <class T>
inline int64_t to_int(T x) {
  constexpr T kEnd = T(9.2e18);
  return x != x ? 0 : int64_t(x < -kEnd ? -kEnd : x > kEnd ? kEnd : x);
}

// -------------------------------------------------------------------------------------------------- loops
// `to` may be one of the operands, so the compiler has to be told that iterations are independent.
#ifdef __clang__
#define SCALEDOT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SCALEDOT_INDEPENDENT _Pragma("GCC ivdep")
#endif
template <class To, class A, class F>
SCALEDOT_INLINE void for_each(Range span, To* to, const A* a, const F& f) {
  SCALEDOT_INDEPENDENT
  for (int64_t k = span.begin; k < span.end; ++k) to[k] = f(a[k]);
}
template <class To, class A, class F>
SCALEDOT_INLINE void for_each(Range span, To* to, const A* a, const A* b, const F& f) {
  SCALEDOT_INDEPENDENT
  for (int64_t k = span.begin; k < span.end; ++k) to[k] = f(a[k], b[k]);
}
template <class To, class C, class A, class F>
SCALEDOT_INLINE void for_each(Range span, To* to, const C* c, const A* a, const A* b, const F& f) {
  SCALEDOT_INDEPENDENT
  for (int64_t k = span.begin; k < span.end; ++k) to[k] = f(c[k], a[k], b[k]);
}
#undef SCALEDOT_INDEPENDENT
template <class Sum, class F>
SCALEDOT_INLINE void for_each_vector(Range span, Sum* to, const Sum* a, const F& f) {
  for (int64_t k = span.begin; k < span.end; k += kLanes<Sum>) store(to + k, f(load(a + k)));
}

// -------------------------------------------------------------------------------------------------- the program
// Which of the numbers that are computed belong to a score that is not masked: only their indices have to be in bounds.
struct LiveNumbers {
  bool (*is_live)(const void* context, int64_t k);
  const void* context;
};

// The registers of one row of scores, and of the tile that it is in. Register 0 of the scores is the row of scores
// itself.
template <class Sum>
struct ScoreRegisters {
  char* memory[kScoreSpaces];
  char* spread[kOperands];  // a number of the row as an array
  Sum* result;              // (kTileKeys): scores after the program, if any of them is -inf
  bool* hides;              // whether one is: it masks its key
  int64_t row;              // of the tile
  int64_t head;             // of the row; the numbers of distances are this head's
  int64_t diagonal;         // of the row and the tile's first key: the place of their distance

  template <class T>
  T* at(ScoreRegister r) const {
    const int s = int(r.space);
    return reinterpret_cast<T*>(memory[s] + r.number * kRegisterSizes[s] * kRegisterBytes);
  }
  // Where the numbers of the row begin in a register: one of distances has those of all rows.
  int64_t first(ScoreRegister r, ScoreSpace space) const {
    return space == ScoreSpace::score && r.space == ScoreSpace::distance ? diagonal : 0;
  }
  // The numbers of a register, one for each of span. A register of rows has one for all keys or diagonals.
  template <class T>
  const T* operand(ScoreRegister r, ScoreSpace space, Range span, int number) const {
    const T* const from = at<T>(r) + first(r, space);
    if (!is_by_row(r.space) || is_by_row(space)) return from;
    T* const to = reinterpret_cast<T*>(spread[number]);
    const T x = from[row];
    for (int64_t k = span.begin; k < span.end; ++k) to[k] = x;
    return to;
  }
};

template <class Sum>
ScoreRegisters<Sum> lay_out_registers(const Problem& p, Arena& arena) {
  ScoreRegisters<Sum> registers = {};
  if (!p.score_program) return registers;
  for (int s = 0; s < kScoreSpaces; ++s)
    registers.memory[s] = take<char>(arena, p.score_program->registers[s] * kRegisterSizes[s] * kRegisterBytes);
  for (char*& one : registers.spread) one = take<char>(arena, kRegisterDiagonals * kRegisterBytes);
  registers.result = take<Sum>(arena, kTileKeys);
  registers.hides = take<bool>(arena, 1);
  return registers;
}

template <class Sum>
class ScoreInterpreter {
 public:
  ScoreInterpreter(const Problem& p, const ScoreRegisters<Sum>& registers)
      : program_(*p.score_program), registers_(registers) {}

  // The place of the distance of row r and the tile's first key. Distances grow from the last row and the first key on.
  static int64_t diagonal_of(const QueryTile& tile, int64_t r) { return tile.rows.end - 1 - row_of(tile, r); }

  // Computes what depends on nothing, the head, the row or the key.
  SCALEDOT_NOINLINE void begin_tile(const QueryTile& tile, Range keys) const {
    run_whole(ScoreSpace::constant, kRegisterSizes[0], tile, keys);
    run_whole(ScoreSpace::head, tile_rows(tile), tile, keys);
    run_whole(ScoreSpace::row, tile_rows(tile), tile, keys);
    run_whole(ScoreSpace::key, count(keys), tile, keys);
  }

  // Computes what depends on the distance, for the head of the registers' row.
  SCALEDOT_NOINLINE void begin_head(const QueryTile& tile, Range keys) const {
    const int64_t diagonals = diagonal_of(tile, 0) + round_up(count(keys), int64_t(kLanes<Sum>));
    run_whole(ScoreSpace::distance, diagonals, tile, keys);
  }

  // scale * scores[k] to the program's result for k in `span`, in place. `slopes`: d result / d (scale * score), unless
  // it is nullptr.
  SCALEDOT_NOINLINE void run_row(Range span, Sum scale, LiveNumbers live, Sum* scores, Sum* slopes) {
    scores_ = scores;
    run(ScoreSpace::score, span, {}, {}, scale, live);
    const Vec<Sum> masked(-Sum(__builtin_inf())), zero(Sum(0));
    const Sum* const result = operand<Sum>(program_.result, ScoreSpace::score, span, 0);
    const Sum* const slope = slopes ? operand<Sum>(program_.slope, ScoreSpace::score, span, 1) : nullptr;
    Finite<Sum> finite;
    for (int64_t k = span.begin; k < span.end; k += kLanes<Sum>) {
      const Vec<Sum> x = load(result + k);
      finite.add(x);
      if (slopes) store(slopes + k, select(x == masked, zero, load(slope + k)));  // may be the row of scores
      if (result != scores) store(scores + k, x);
    }
    *registers_.hides = !finite.all();
    if (*registers_.hides)
      for (int64_t k = span.begin; k < span.end; k += kLanes<Sum>) store(registers_.result + k, load(scores + k));
  }

 private:
  // A space without single scores. It has `count` numbers in a register.
  void run_whole(ScoreSpace space, int64_t count, const QueryTile& tile, Range keys) const {
    const auto is_live = [](const void* self, int64_t k) { return k < *static_cast<const int64_t*>(self); };
    run(space, {0, round_up(count, int64_t(kLanes<Sum>))}, tile, keys, Sum(0), {is_live, &count});
  }

  // `scale`: in the space of scores; `tile`, `keys`: in the others.
  void run(ScoreSpace space, Range span, const QueryTile& tile, Range keys, Sum scale, LiveNumbers live) const {
    const ScoreInstruction* instruction = program_.instructions;
    for (int s = 0; s < int(space); ++s) instruction += program_.counts[s];
    for (int n = 0; n < program_.counts[int(space)]; ++n, ++instruction) {
      switch (instruction->operation) {
        case ScoreOperation::score:
          for_each(span, at<Sum>(instruction->to), scores_, [scale](Sum x) { return x * scale; });
          break;
        case ScoreOperation::batch:
        case ScoreOperation::head:
        case ScoreOperation::row:
        case ScoreOperation::key:
        case ScoreOperation::distance: write_place(*instruction, span, tile, keys); break;
        case ScoreOperation::bound: bound<int64_t>(*instruction, span, live); break;
        case ScoreOperation::float_bound: bound<Sum>(*instruction, span, live); break;
        case ScoreOperation::load:
          load_captured(*instruction, span, static_cast<const Sum*>(program_.numbers), program_.number_count);
          break;
        case ScoreOperation::int_load:
          load_captured(*instruction, span, program_.integers, program_.integer_count);
          break;
        default:
          instruction->operation < ScoreOperation::int_constant ? floats(*instruction, span)
                                                                : integers(*instruction, span);
      }
    }
  }

  template <class T>
  T* at(ScoreRegister r) const {
    if (r.space == ScoreSpace::score && r.number == 0) return reinterpret_cast<T*>(scores_);
    return registers_.template at<T>(r);
  }
  template <class T>
  const T* operand(ScoreRegister r, ScoreSpace space, Range span, int number) const {
    if (r.space == ScoreSpace::score) return at<T>(r);
    return registers_.template operand<T>(r, space, span, number);
  }
  template <class T>
  const T* operand(const ScoreInstruction& i, ScoreRegister r, Range span, int number) const {
    return operand<T>(r, i.to.space, span, number);
  }

  template <class To, class From, class F>
  SCALEDOT_INLINE void one(const ScoreInstruction& i, Range span, const F& f) const {
    for_each(span, at<To>(i.to), operand<From>(i, i.a, span, 0), f);
  }
  // A number of the row is not spread: it stays in a register of the CPU.
  template <class To, class From, class F>
  SCALEDOT_INLINE void two(const ScoreInstruction& i, Range span, const F& f) const {
    const auto of_row = [&](ScoreRegister r) { return is_by_row(r.space) && !is_by_row(i.to.space); };
    const auto numbers = [&](ScoreRegister r) { return at<From>(r) + registers_.first(r, i.to.space); };
    if (of_row(i.a))
      for_each(span, at<To>(i.to), numbers(i.b), [&f, x = at<From>(i.a)[registers_.row]](From y) { return f(x, y); });
    else if (of_row(i.b))
      for_each(span, at<To>(i.to), numbers(i.a), [&f, y = at<From>(i.b)[registers_.row]](From x) { return f(x, y); });
    else
      for_each(span, at<To>(i.to), numbers(i.a), numbers(i.b), f);
  }

  void write_place(const ScoreInstruction& i, Range span, const QueryTile& tile, Range keys) const {
    int64_t* const to = at<int64_t>(i.to);
    for (int64_t k = span.begin; k < span.end; ++k) {
      const int64_t r = min(k, max<int64_t>(tile_rows(tile) - 1, 0));
      to[k] = i.operation == ScoreOperation::key        ? keys.begin + k
              : i.operation == ScoreOperation::distance ? i.integer * (keys.begin + k - (tile.rows.end - 1))
              : i.operation == ScoreOperation::row      ? row_of(tile, r)
              : i.operation == ScoreOperation::head     ? head_of(tile, r)
                                                        : tile.batch % program_.batches;
    }
  }

  // An index of a dimension of `integer` numbers to one from 0 on. One that is out of bounds becomes 0.
  template <class T>
  void bound(const ScoreInstruction& i, Range span, LiveNumbers live) const {
    const T* a = operand<T>(i, i.a, span, 0);
    const int64_t count = i.integer;
    const T size = T(count);
    int outside = 0;
    for (int64_t k = span.begin; k < span.end; ++k) outside |= int(!(a[k] >= -size && a[k] < size));
    if (outside) report_out_of_bounds(a, count, span, live);
    for_each(span, at<int64_t>(i.to), a, [size](T x) {
      const T from_first = x < T(0) ? x + size : x;
      return int64_t(from_first >= T(0) && from_first < size ? from_first : T(0));
    });
  }
  template <class T>
  SCALEDOT_RARE void report_out_of_bounds(const T* a, int64_t size, Range span, LiveNumbers live) const {
    for (int64_t k = span.begin; k < span.end; ++k) {
      if ((a[k] >= T(-size) && a[k] < T(size)) || !live.is_live(live.context, k)) continue;
      bool expected = false;
      // Threads may meet several; the first one is reported.
      if (__atomic_compare_exchange_n(&program_.out_of_bounds->found, &expected, true, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
        program_.out_of_bounds->index = int64_t(a[k]);
        program_.out_of_bounds->size = size;
      }
      return;
    }
  }

  // Never reads outside, whatever the index.
  template <class T>
  void load_captured(const ScoreInstruction& i, Range span, const T* data, int64_t size) const {
    const int64_t *a = operand<int64_t>(i, i.a, span, 0), *b = operand<int64_t>(i, i.b, span, 1);
    T* const to = at<T>(i.to);
    const int64_t first = a[span.begin] + b[span.begin], length = count(span);
    const bool uniform_a = i.a.space == ScoreSpace::constant || is_by_row(i.a.space);
    if (i.integer == 1 && i.to.space >= ScoreSpace::key && uniform_a && first >= 0 && first + length <= size &&
        b[span.end - 1] - b[span.begin] == length - 1) {
      for_each(span, to, data + first - span.begin, [](T x) { return x; });
      return;
    }
    if (size == 0) return for_each(span, to, a, [](int64_t) { return T(0); });
    for_each(span, to, a, b, [data, size](int64_t x, int64_t y) {
      const int64_t index = x + y;
      return data[index < 0 || index >= size ? 0 : index];
    });
  }

  void floats(const ScoreInstruction& i, Range span) const {
    using Operation = ScoreOperation;
    const auto alone = [&](const auto& f) { one<Sum, Sum>(i, span, f); };
    const auto pair = [&](const auto& f) { two<Sum, Sum>(i, span, f); };
    const auto vector = [&](const auto& f) { for_each_vector(span, at<Sum>(i.to), at<Sum>(i.a), f); };
    switch (i.operation) {
      case Operation::to_float: return one<Sum, int64_t>(i, span, [](int64_t x) { return Sum(x); });
      case Operation::constant: return alone([x = Sum(i.number)](Sum) { return x; });
      case Operation::add: return pair([](Sum x, Sum y) { return x + y; });
      case Operation::subtract: return pair([](Sum x, Sum y) { return x - y; });
      case Operation::multiply: return pair([](Sum x, Sum y) { return x * y; });
      case Operation::divide: return divide(i, span);
      // NaN in either is passed on.
      case Operation::minimum: return pair([](Sum x, Sum y) { return x < y || x != x ? x : y; });
      case Operation::maximum: return pair([](Sum x, Sum y) { return x > y || x != x ? x : y; });
      case Operation::power: return pair([](Sum x, Sum y) { return scalar_pow(x, y); });
      case Operation::fmod: return pair([](Sum x, Sum y) { return scalar_fmod(x, y); });
      case Operation::remainder: return pair([](Sum x, Sum y) { return float_remainder(x, y); });
      case Operation::absolute: return alone([](Sum x) { return x < Sum(0) ? -x : x; });
      case Operation::exp: return vector([](Vec<Sum> x) { return exp(x); });
      case Operation::tanh: return vector([](Vec<Sum> x) { return tanh(x); });
      case Operation::sigmoid: return vector([](Vec<Sum> x) { return sigmoid(x); });
      case Operation::log: return alone([](Sum x) { return scaledot::log(x); });
      case Operation::log1p: return alone([](Sum x) { return scalar_log1p(x); });
      case Operation::expm1: return alone([](Sum x) { return scalar_expm1(x); });
      case Operation::sqrt: return alone([](Sum x) { return scalar_sqrt(x); });
      case Operation::erf: return alone([](Sum x) { return scalar_erf(x); });
      case Operation::sin: return alone([](Sum x) { return scalar_sin(x); });
      case Operation::cos: return alone([](Sum x) { return scalar_cos(x); });
      case Operation::floor: return alone([](Sum x) { return scalar_floor(x); });
      case Operation::ceil: return alone([](Sum x) { return scalar_ceil(x); });
      case Operation::trunc: return alone([](Sum x) { return scalar_trunc(x); });
      case Operation::round: return alone([](Sum x) { return scalar_rint(x); });  // half to even
      case Operation::sign: return alone([](Sum x) { return x > Sum(0) ? Sum(1) : x < Sum(0) ? Sum(-1) : x * Sum(0); });
      case Operation::less: return pair([](Sum x, Sum y) { return x < y ? Sum(1) : Sum(0); });
      case Operation::less_equal: return pair([](Sum x, Sum y) { return x <= y ? Sum(1) : Sum(0); });
      case Operation::equal: return pair([](Sum x, Sum y) { return x == y ? Sum(1) : Sum(0); });
      default:  // select
        return for_each(span, at<Sum>(i.to), operand<Sum>(i, i.a, span, 0), operand<Sum>(i, i.b, span, 1),
                        operand<Sum>(i, i.c, span, 2), [](Sum x, Sum y, Sum z) { return x != Sum(0) ? y : z; });
    }
  }

  void divide(const ScoreInstruction& i, Range span) const {
    const bool by_row = is_by_row(i.b.space);
    if (i.to.space == ScoreSpace::score && (by_row || i.b.space == ScoreSpace::constant)) {
      const Divisor<Sum> by(at<Sum>(i.b)[by_row ? registers_.row : 0]);
      const Sum* const from = operand<Sum>(i, i.a, span, 0);
      Sum* const to = at<Sum>(i.to);
      if (by.works()) {
        for (int64_t k = span.begin; k < span.end; k += kLanes<Sum>) store(to + k, by.divide(load(from + k)));
        return;
      }
    }
    two<Sum, Sum>(i, span, [](Sum x, Sum y) { return x / y; });
  }

  void integers(const ScoreInstruction& i, Range span) const {
    using Operation = ScoreOperation;
    const auto pair = [&](const auto& f) { two<int64_t, int64_t>(i, span, f); };
    const auto compare = [&](const auto& f) { two<Sum, int64_t>(i, span, f); };
    switch (i.operation) {
      case Operation::to_int: return one<int64_t, Sum>(i, span, [](Sum x) { return to_int(x); });
      case Operation::int_constant: return one<int64_t, int64_t>(i, span, [x = i.integer](int64_t) { return x; });
      case Operation::int_add: return pair([](int64_t x, int64_t y) { return int64_t(Word(x) + Word(y)); });
      case Operation::int_subtract: return pair([](int64_t x, int64_t y) { return int64_t(Word(x) - Word(y)); });
      case Operation::int_multiply: return pair([](int64_t x, int64_t y) { return int64_t(Word(x) * Word(y)); });
      case Operation::int_minimum: return pair([](int64_t x, int64_t y) { return x < y ? x : y; });
      case Operation::int_maximum: return pair([](int64_t x, int64_t y) { return x > y ? x : y; });
      case Operation::int_floor_divide: return pair([](int64_t x, int64_t y) { return int_floor_divide(x, y); });
      case Operation::int_truncate_divide: return pair([](int64_t x, int64_t y) { return int_truncate_divide(x, y); });
      case Operation::int_remainder: return pair([](int64_t x, int64_t y) { return int_remainder(x, y); });
      case Operation::int_fmod: return pair([](int64_t x, int64_t y) { return int_fmod(x, y); });
      case Operation::int_and: return pair([](int64_t x, int64_t y) { return x & y; });
      case Operation::int_or: return pair([](int64_t x, int64_t y) { return x | y; });
      case Operation::int_xor: return pair([](int64_t x, int64_t y) { return x ^ y; });
      case Operation::int_shift_left: return pair([](int64_t x, int64_t y) { return int64_t(Word(x) << (y & 63)); });
      case Operation::int_shift_right: return pair([](int64_t x, int64_t y) { return x >> (y & 63); });
      case Operation::int_less: return compare([](int64_t x, int64_t y) { return x < y ? Sum(1) : Sum(0); });
      case Operation::int_equal: return compare([](int64_t x, int64_t y) { return x == y ? Sum(1) : Sum(0); });
      default:  // int_select
        return for_each(span, at<int64_t>(i.to), operand<Sum>(i, i.a, span, 0), operand<int64_t>(i, i.b, span, 1),
                        operand<int64_t>(i, i.c, span, 2),
                        [](Sum x, int64_t y, int64_t z) { return x != Sum(0) ? y : z; });
    }
  }

  const ScoreProgram& program_;
  const ScoreRegisters<Sum>& registers_;
  Sum* scores_ = nullptr;  // of the row
};

}  // namespace
}  // namespace scaledot
