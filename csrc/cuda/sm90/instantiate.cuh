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
template <class Number, bool kGeneral, class Body>
auto with_sm90_dim(const Problem& p, const Body& body) {
  const int64_t dim = larger(p.head_dim, p.value_dim);
  if (dim <= 64) return body(Sm90Config<Number, 64, kGeneral>{});
  if (dim <= 128) return body(Sm90Config<Number, 128, kGeneral>{});
  return body(Sm90Config<Number, 256, kGeneral>{});
}
template <class Number, class Body>
auto with_sm90_config(const Problem& p, const Body& body) {
  return is_general(p) ? with_sm90_dim<Number, true>(p, body) : with_sm90_dim<Number, false>(p, body);
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
