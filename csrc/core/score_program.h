// Score programs: a score function of the user, as a list of operations on vectors.
//
//   score' = f(scale * dot(query[i], key[j]), batch, head, i, j, captured tensors)
//
// Python traces the function once (python/scaledot/_score/). A kernel runs the program on one row of a tile of
// scores at a time. Each register belongs to a space, which says what its value depends on, and so how often it is
// computed:
//
//   constant   nothing                     once for each tile
//   head       batch, head                 once for each row of a tile
//   row        row, batch, head            once for each row of a tile
//   key        key                         once for each key of a tile
//   distance   key - row, batch, head      once for each diagonal of a tile and each of its heads
//   score      all, and the dot product    once for each score
//
// A backward program also computes d score' / d score (`slope`), and d score' / d x for each number x that the function
// loads and that has a gradient (CapturedGradient).
//
// A function may mask by itself: where(condition, score, -inf). If the condition does not read the score, the program
// has a mask: another program, whose result is 0 wherever score' is -inf. Kernels skip the tiles where it is 0.
#pragma once

#include "core/problem.h"

namespace scaledot {

// Floating operations first, then those of integers. Booleans are 0 and 1 in floating registers. ops/common/
// score_program.cpp has the names, in this order.
enum class ScoreOperation : uint8_t {
  constant,
  batch,
  head,
  row,
  key,
  distance,
  score,
  add,
  subtract,
  multiply,
  divide,
  minimum,
  maximum,
  power,
  fmod,
  remainder,
  absolute,
  exp,
  log,
  log1p,
  expm1,
  sqrt,
  tanh,
  sigmoid,
  erf,
  sin,
  cos,
  floor,
  ceil,
  trunc,
  round,
  sign,
  less,
  less_equal,
  equal,
  select,
  to_float,
  load,
  int_constant,
  int_add,
  int_subtract,
  int_multiply,
  int_minimum,
  int_maximum,
  int_floor_divide,
  int_truncate_divide,
  int_remainder,
  int_fmod,
  int_and,
  int_or,
  int_xor,
  int_shift_left,
  int_shift_right,
  int_less,
  int_equal,
  int_select,
  to_int,
  bound,
  float_bound,
  int_load,
  count
};

constexpr int kScoreSpaces = 6;
enum class ScoreSpace : int32_t { constant, head, row, key, distance, score };

struct ScoreRegister {
  ScoreSpace space;
  int32_t number;  // in its space
};

// to = operation(a, b, c). Operands that an operation does not have are register 0 of the constants.
//   constant, int_constant   `number` or `integer`
//   distance                 `integer` (key - row)
//   select, int_select       a != 0 ? b : c
//   bound, float_bound       an index of a dimension of `integer` numbers: a negative one counts from the end
//   load, int_load           captured number a + b; `integer`: 1 if b grows by 1 from key to key, otherwise 0
struct ScoreInstruction {
  ScoreOperation operation;
  ScoreRegister to, a, b, c;
  double number;
  int64_t integer;
};

// A load whose number has a gradient: number `index` gets dS * `factor`.
struct CapturedGradient {
  ScoreRegister index, factor;
};

// Which KV groups load different numbers, for the sums of their gradients.
enum class CapturedBy : int32_t { any, head, batch_and_head };

struct ScoreProgram {
  const ScoreInstruction* instructions;  // by space, in the order of ScoreSpace
  int32_t counts[kScoreSpaces];          // of instructions
  int32_t registers[kScoreSpaces];
  ScoreRegister result;
  ScoreRegister slope;  // of a backward
  int64_t batches;      // batch entries as the function counts them; torch.vmap adds others before them
  // Nothing but instructions, registers and the result, and all bounds of the program. nullptr: no mask is known.
  const ScoreProgram* mask;
  // The captured tensors, one after the other.
  const void* numbers;  // float, or double for float64
  int64_t number_count;
  const int64_t* integers;
  int64_t integer_count;
  // A backward also has the loads that have a gradient, and a sum for each of `numbers`. nullptr: none is wanted.
  const CapturedGradient* gradients;
  int32_t gradient_count;
  CapturedBy captured_by;
  void* grad_numbers;
  // An index out of bounds, and its dimension. Kernels set `found` last.
  struct OutOfBounds {
    int64_t index, size;
    bool found;
  };
  OutOfBounds* out_of_bounds;
};

}  // namespace scaledot
