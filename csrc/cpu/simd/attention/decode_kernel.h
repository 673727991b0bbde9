// The table entry that an instruction-set file makes of decode.h and decode_backward.h.
#pragma once

#include "cpu/simd/attention/decode.h"
#include "cpu/simd/attention/kernel.h"

namespace scaledot {
namespace {

int64_t decode_workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  PlainOperands::with_operands(p, [&]<class Sum>(Type<Sum>) {
    if (pass == Pass::forward)
      plan_decode<Sum>(p, workers, arena);
    else
      lay_out_decode_backward<Sum>(p, workers, arena);
  });
  return arena.used;
}

void decode_forward(const Problem& p, const Executor& executor) {
  const auto run = [&]<class Storage>(Type<Storage>) {
    using Sum = typename Compute<Storage>::type;
    decode_pass<DecodeProducts<Storage, Sum>, Sum>(p, executor);
  };
  is_quantised(p) ? with_quantised_storage(p.key.dtype, run) : with_storage(p.dtype, run);
}

void decode_backward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype, [&]<class Storage>(Type<Storage>) { decode_backward_pass<Storage>(p, executor); });
}

// Table entry.
constexpr Kernel decode_kernel(const char* name, const char* (*why_not)(const Problem&, Pass)) {
  return {name, why_not, decode_workspace, with_state<decode_forward>, with_state<decode_backward>};
}

}  // namespace
}  // namespace scaledot
