// The table entry that an instruction-set file makes of forward.h and backward.h.
#pragma once

#include "cpu/cpu.h"
#include "cpu/simd/attention/backward.h"
#include "cpu/simd/attention/forward.h"
#include "cpu/simd/task_state.h"

namespace scaledot {
namespace {

// Why a kernel that needs the instruction sets of a level cannot run; and one that takes bfloat16 only.
template <Capability kLeast>
const char* why_not_at(const Problem& p, Pass pass) {
  if (const char* reason = why_below(kLeast)) return reason;
  if (has_key_lists(p)) return "there are key_indices";
  return is_quantised(p) && pass == Pass::backward ? "quantised keys and values have no backward" : nullptr;
}
template <Capability kLeast>
const char* why_not_bf16_pairs_at(const Problem& p, Pass pass) {
  const char* reason = why_not_at<kLeast>(p, pass);
  return reason || p.dtype == DType::bfloat16 ? reason : "the dtype is not bfloat16";
}

// The operand types of a kernel: elements in the type that they are summed in. bf16_pairs.h defines others.
struct PlainOperands {
  // Calls body(Type<Operand>{}).
  template <class Body>
  static void with_operands(const Problem& p, const Body& body) {
    p.dtype == DType::float64 ? body(Type<double>{}) : body(Type<float>{});
  }
};

template <class Operands>
int64_t tiled_workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  Operands::with_operands(p, [&]<class Operand>(Type<Operand>) {
    if (pass == Pass::forward) {
      plan_forward<Operand>(p, workers, arena);
      return;
    }
    const int64_t splits = plan_backward<Operand>(p, workers, arena).splits;
    MaskGradient<SumOf<Operand>>(p, splits, arena);
    RelativeGradient<SumOf<Operand>>(p, splits, arena);
    CapturedGradients<SumOf<Operand>>(p, splits, arena);
  });
  return arena.used;
}

template <class Operands>
void tiled_forward(const Problem& p, const Executor& executor) {
  Operands::with_operands(p, [&]<class Operand>(Type<Operand>) { forward_pass<Operand>(p, executor); });
}

template <class Operands>
void tiled_backward(const Problem& p, const Executor& executor) {
  Operands::with_operands(p, [&]<class Operand>(Type<Operand>) { backward_pass<Operand>(p, executor); });
}

template <class Operands>
constexpr Kernel tiled_kernel(const char* name, const char* (*why_not)(const Problem&, Pass)) {
  return {name, why_not, tiled_workspace<Operands>, with_state<tiled_forward<Operands>>,
          with_state<tiled_backward<Operands>>};
}

}  // namespace
}  // namespace scaledot
