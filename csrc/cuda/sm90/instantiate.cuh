// What a file of one storage type makes of the kernels for Hopper.
#pragma once

#include "cuda/generic/generic.h"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/sm90.h"

namespace scaledot {
namespace {

// Whether scores need terms of their own, beyond what positions mask.
inline bool is_general(const Problem& p) {
  return p.attn_mask.data || p.alibi_slopes.data || p.softcap > 0 || p.dropout_p > 0 || !(p.scale > 0);
}

// Calls body with the Config for the problem.
template <class Number, class Body>
auto with_sm90_config(const Problem& p, const Body& body) {
  return with_padded_dim(p, [&](auto dim) {
    return is_general(p) ? body(Sm90Config<Number, dim.value, true>{}) : body(Sm90Config<Number, dim.value, false>{});
  });
}

template <class Number>
struct Sm90 {
  static int64_t workspace(const Problem& p) {
    return with_sm90_config<Number>(p, [&](auto config) {
      Arena arena = {nullptr, 0};
      plan_sm90_forward<decltype(config)>(p, arena);
      return arena.used;
    });
  }
  static const char* forward(const Problem& p, const DeviceExecutor& executor) {
    const GenericKernels& generic = p.dtype == DType::bfloat16 ? kGenericBFloat16 : kGenericFloat16;
    return with_sm90_config<Number>(
        p, [&](auto config) { return run_sm90_forward<decltype(config)>(p, executor, generic.weights); });
  }
  static constexpr Sm90Kernels kernels = {workspace, forward};
};

}  // namespace
}  // namespace scaledot
