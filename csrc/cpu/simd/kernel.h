// The rows of the table that an instruction-set file makes of the algorithms.
#pragma once

#include "cpu/cpu.h"
#include "cpu/simd/backward.h"
#include "cpu/simd/few_rows.h"

namespace scaledot {
namespace {

// Calls body(Type<Storage>{}, Type<Compute>{}).
template <class Body>
void with_types(const Problem& p, const Body& body) {
  with_storage(p.dtype, [&](auto storage) {
    using Storage = typename decltype(storage)::type;
    body(storage, Type<typename Compute<Storage>::type>{});
  });
}

int64_t tiled_workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  with_types(p, [&](auto, auto compute) {
    using T = typename decltype(compute)::type;
    if (pass == Pass::forward)
      plan_forward<T>(p, workers, arena);
    else
      plan_backward<T>(p, workers, arena);
  });
  return arena.used;
}

void tiled_forward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype, [&](auto storage) { run_forward<typename decltype(storage)::type>(p, executor); });
}

void tiled_backward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype, [&](auto storage) { run_backward<typename decltype(storage)::type>(p, executor); });
}

const char* few_rows_why_not(const Problem& p, Pass pass) {
  if (pass == Pass::backward) return "it has no backward";
  if (p.heads / p.kv_heads * p.query_length > kFewRows) return "more than 16 query rows share a key head";
  if (p.weights.data) return "return_weights is set";
  if (p.key.col_stride != 1 || p.value.col_stride != 1) return "the last stride of key or value is not 1";
  return nullptr;
}

int64_t few_rows_workspace(const Problem& p, Pass, int workers) {
  Arena arena = {nullptr, 0};
  with_types(p, [&](auto, auto compute) { plan_few_rows<typename decltype(compute)::type>(p, workers, arena); });
  return arena.used;
}

void few_rows_forward(const Problem& p, const Executor& executor) {
  with_storage(p.dtype, [&](auto storage) { run_few_rows<typename decltype(storage)::type>(p, executor); });
}

}  // namespace
}  // namespace scaledot
