// The table entry that an instruction-set file makes of forward.h and backward.h.
#pragma once

#include "cpu/cpu.h"
#include "cpu/simd/attention/backward.h"
#include "cpu/simd/attention/forward.h"

namespace scaledot {
namespace {

// The operand types of a kernel: elements in the type that they are summed in. avx512_bf16.cpp defines others.
struct PlainOperands {
  // Calls body(Type<Storage>{}, Type<OperandTraits>{}).
  template <class Body>
  static void with_types(const Problem& p, const Body& body) {
    with_storage(p.dtype, [&](auto storage) {
      body(storage, Type<typename Compute<typename decltype(storage)::type>::type>{});
    });
  }
};

template <class Operands>
int64_t tiled_workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  Operands::with_types(p, [&](auto, auto operand) {
    using E = typename decltype(operand)::type;
    if (pass == Pass::forward)
      plan_forward<E>(p, workers, arena);
    else
      MaskGradient<SumOf<E>>(p, plan_backward<E>(p, workers, arena).splits, arena);
  });
  return arena.used;
}

template <class Operands>
void tiled_forward(const Problem& p, const Executor& executor) {
  Operands::with_types(p, [&](auto storage, auto operand) {
    forward_pass<typename decltype(storage)::type, typename decltype(operand)::type>(p, executor);
  });
}

template <class Operands>
void tiled_backward(const Problem& p, const Executor& executor) {
  Operands::with_types(p, [&](auto storage, auto operand) {
    backward_pass<typename decltype(storage)::type, typename decltype(operand)::type>(p, executor);
  });
}

template <class Operands>
constexpr Kernel tiled_kernel(const char* name, const char* (*why_not)(const Problem&, Pass)) {
  return {name, why_not, tiled_workspace<Operands>, tiled_forward<Operands>, tiled_backward<Operands>};
}

}  // namespace
}  // namespace scaledot
