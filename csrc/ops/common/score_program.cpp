#include "ops/common/score_program.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "ops/common/checks.h"

namespace scaledot {
namespace {

// score_program is `batches`, `captured_by`, the lengths of the forward's part and of the backward's, these parts, and
// the mask, which may be empty.
constexpr int64_t kHeader = 4;
constexpr int64_t kMostRegisters = 1024;  // of a space

// Reads a list of integers from its first on.
class Words {
 public:
  Words(const Tensor& words, int64_t begin, int64_t end)
      : words_(words.const_data_ptr<int64_t>()), next_(begin), end_(min(end, words.numel())) {}

  int64_t next() {
    TORCH_CHECK_VALUE(next_ < end_, "score_program: got a list that ends early; needs one that scaledot made");
    return words_[next_++];
  }
  int64_t next(int64_t least, int64_t most) {
    const int64_t word = next();
    TORCH_CHECK_VALUE(word >= least && word <= most, "score_program: got ", word, "; needs a number from ", least,
                      " to ", most, " there");
    return word;
  }

 private:
  const int64_t* words_;
  int64_t next_, end_;
};

// A register that an instruction for `space` may read.
ScoreRegister next_register(Words& words, const ScoreProgram& program, ScoreSpace space) {
  const auto own = ScoreSpace(words.next(0, kScoreSpaces - 1));
  const bool of_head = own == ScoreSpace::head && (space == ScoreSpace::row || space == ScoreSpace::distance);
  TORCH_CHECK_VALUE(own == space || own == ScoreSpace::constant || of_head || space == ScoreSpace::score,
                    "score_program: got a register that is not computed yet; needs a list that scaledot made");
  return {own, int32_t(words.next(0, program.registers[int(own)] - 1))};
}

ScoreInstruction next_instruction(Words& words, const ScoreProgram& program, ScoreSpace space) {
  ScoreInstruction i{};
  i.operation = ScoreOperation(words.next(0, int64_t(ScoreOperation::count) - 1));
  i.to = next_register(words, program, space);
  TORCH_CHECK_VALUE(i.to.space == space, "score_program: got an instruction out of order; needs them by space");
  for (ScoreRegister* operand : {&i.a, &i.b, &i.c}) *operand = next_register(words, program, space);
  i.integer = words.next();
  std::memcpy(&i.number, &i.integer, sizeof i.number);
  const ScoreSpace own = i.operation == ScoreOperation::score      ? ScoreSpace::score
                         : i.operation == ScoreOperation::key      ? ScoreSpace::key
                         : i.operation == ScoreOperation::distance ? ScoreSpace::distance
                         : i.operation == ScoreOperation::row      ? ScoreSpace::row
                         : i.operation == ScoreOperation::head     ? ScoreSpace::head
                         : i.operation == ScoreOperation::batch    ? ScoreSpace::head
                                                                   : space;
  const bool is_bound = i.operation == ScoreOperation::bound || i.operation == ScoreOperation::float_bound;
  TORCH_CHECK_VALUE(space == own && !(space == ScoreSpace::distance && is_bound),
                    "score_program: got an instruction in a wrong space; needs a list that scaledot made");
  return i;
}

Tensor contiguous(const OptionalTensor& tensor) {
  const Tensor* t = present(tensor);
  return t ? t->contiguous() : Tensor();
}

}  // namespace

std::vector<std::string> score_operations() {
  const std::vector<std::string> names = {"constant",
                                          "batch",
                                          "head",
                                          "row",
                                          "key",
                                          "distance",
                                          "score",
                                          "add",
                                          "subtract",
                                          "multiply",
                                          "divide",
                                          "minimum",
                                          "maximum",
                                          "power",
                                          "fmod",
                                          "remainder",
                                          "absolute",
                                          "exp",
                                          "log",
                                          "log1p",
                                          "expm1",
                                          "sqrt",
                                          "tanh",
                                          "sigmoid",
                                          "erf",
                                          "sin",
                                          "cos",
                                          "floor",
                                          "ceil",
                                          "trunc",
                                          "round",
                                          "sign",
                                          "less",
                                          "less_equal",
                                          "equal",
                                          "select",
                                          "to_float",
                                          "load",
                                          "int_constant",
                                          "int_add",
                                          "int_subtract",
                                          "int_multiply",
                                          "int_minimum",
                                          "int_maximum",
                                          "int_floor_divide",
                                          "int_truncate_divide",
                                          "int_remainder",
                                          "int_fmod",
                                          "int_and",
                                          "int_or",
                                          "int_xor",
                                          "int_shift_left",
                                          "int_shift_right",
                                          "int_less",
                                          "int_equal",
                                          "int_select",
                                          "to_int",
                                          "bound",
                                          "float_bound",
                                          "int_load"};
  TORCH_INTERNAL_ASSERT(names.size() == size_t(ScoreOperation::count));
  return names;
}

void check_score_arguments(const SdpaInputs& in, const AttentionOptions& o) {
  const Tensor *numbers = present(in.score_numbers), *integers = present(in.score_integers);
  const Tensor* program = present(in.score_program);
  if (!program) {
    TORCH_CHECK_VALUE(!numbers && !integers, "score_program: got None with captured tensors; needs a program");
    return;
  }
  const c10::Device device = in.query.device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta(), "score_mod: got tensors on ", device,
                              "; needs a CPU: no kernel for other devices runs score functions");
  const auto refuse = [](bool given, const char* name) {
    TORCH_CHECK_VALUE(!given, "score_mod: got one with ", name, "; needs one of them (scaledot.score_mods has ", name,
                      " as a score function: scaledot.score_mods.compose joins them)");
  };
  refuse(o.softcap.has_value(), "softcap");
  refuse(present(in.alibi_slopes), "alibi_slopes");
  refuse(present(in.relative_bias), "relative_bias");
  TORCH_CHECK_NOT_IMPLEMENTED(o.part.empty(), "score_mod: got one in a part of a larger attention; needs a whole call");
  check_result_dtype(*program, "score_program", at::kLong);
  if (numbers) check_result_dtype(*numbers, "score_numbers", lse_dtype(in.query.scalar_type()));
  if (integers) check_result_dtype(*integers, "score_integers", at::kLong);
}

void DecodedScoreProgram::Part::decode(const Tensor& list, int64_t begin, int64_t end) {
  Words words(list, begin, end);
  ScoreProgram& p = program;
  for (int32_t& count : p.counts) count = int32_t(words.next(0, end - begin));
  for (int32_t& count : p.registers) count = int32_t(words.next(0, kMostRegisters));
  TORCH_CHECK_VALUE(p.registers[0] > 0, "score_program: got no constant; needs a list that scaledot made");
  p.result = next_register(words, p, ScoreSpace::score);
  p.slope = next_register(words, p, ScoreSpace::score);
  gradients.resize(size_t(words.next(0, end - begin)));
  for (CapturedGradient& gradient : gradients) {
    gradient.index = next_register(words, p, ScoreSpace::score);
    gradient.factor = next_register(words, p, ScoreSpace::score);
  }
  for (int s = 0; s < kScoreSpaces; ++s)
    for (int32_t n = 0; n < p.counts[s]; ++n) instructions.push_back(next_instruction(words, p, ScoreSpace(s)));
  p.instructions = instructions.data();
  p.gradients = gradients.data();
  p.gradient_count = int32_t(gradients.size());
}

DecodedScoreProgram::DecodedScoreProgram(const SdpaInputs& in, Pass pass) {
  if (!present(in.score_program)) return;
  const Tensor list = contiguous(in.score_program);
  Words header(list, 0, kHeader);
  const int64_t batches = header.next(1, INT64_MAX);
  const auto captured_by = CapturedBy(header.next(0, int64_t(CapturedBy::batch_and_head)));
  const int64_t backward = kHeader + header.next(0, list.numel()), mask = backward + header.next(0, list.numel());
  pass == Pass::forward ? own_.decode(list, kHeader, backward) : own_.decode(list, backward, mask);
  ScoreProgram& p = own_.program;
  p.batches = batches;
  p.captured_by = captured_by;
  if (mask < list.numel()) {
    mask_.decode(list, mask, list.numel());
    p.mask = &mask_.program;
  }
  numbers_ = contiguous(in.score_numbers), integers_ = contiguous(in.score_integers);
  if (numbers_.defined()) {
    p.numbers = numbers_.const_data_ptr();
    p.number_count = numbers_.numel();
  }
  if (integers_.defined()) {
    p.integers = integers_.const_data_ptr<int64_t>();
    p.integer_count = integers_.numel();
  }
  p.out_of_bounds = &out_of_bounds_;
}

const ScoreProgram* DecodedScoreProgram::program(const Tensor& grad_numbers) {
  if (own_.instructions.empty()) return nullptr;
  if (grad_numbers.defined() && grad_numbers.numel() > 0) own_.program.grad_numbers = grad_numbers.mutable_data_ptr();
  return &own_.program;
}

void DecodedScoreProgram::check_indices() const {
  TORCH_CHECK_INDEX(!out_of_bounds_.found, "score_mod: got the index ", out_of_bounds_.index,
                    " for a dimension of a captured tensor that has ", out_of_bounds_.size,
                    " entries; needs an index within it");
}

}  // namespace scaledot
