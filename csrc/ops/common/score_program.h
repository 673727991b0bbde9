// A score program (core/score_program.h) as ops take it: the tensor score_program, a list of integers, and
// score_numbers and score_integers, which hold the captured tensors one after the other, in any shape.
#pragma once

#include <vector>

#include "core/kernel.h"
#include "core/score_program.h"
#include "ops/common/arguments.h"

namespace scaledot {

// The names of the operations, in the order of their numbers.
std::vector<std::string> score_operations();

// Everything but the program itself.
void check_score_arguments(const SdpaInputs& inputs, const AttentionOptions& options);
// A program that is checked: no register is outside of its space, and none is read in a space computed before its own.
// Kernels check the indices of loads.
class DecodedScoreProgram {
 public:
  // `pass`: the forward's program, or the backward's.
  DecodedScoreProgram(const SdpaInputs& inputs, Pass pass);
  DecodedScoreProgram(const DecodedScoreProgram&) = delete;

  // nullptr if there is no score function. `grad_numbers`: the sums of a backward; may be undefined.
  const ScoreProgram* program(const Tensor& grad_numbers);

  // After a pass: an IndexError if a captured tensor was indexed out of bounds.
  void check_indices() const;

 private:
  // A part of the list, and what it refers to.
  struct Part {
    ScoreProgram program{};
    std::vector<ScoreInstruction> instructions;
    std::vector<CapturedGradient> gradients;
    void decode(const Tensor& list, int64_t begin, int64_t end);
  };
  Part own_, mask_;
  Tensor numbers_, integers_;
  ScoreProgram::OutOfBounds out_of_bounds_{};
};

}  // namespace scaledot
