// What autograd has the forward keep for the backward (core/kept_weights.h): its softmax, and of how many keys, or what
// rounding took off its output. Sizes, dtype and options decide, so a call always has the same bits.
#pragma once

#include "ops/common/backend.h"
#include "ops/common/shapes.h"

namespace scaledot {

struct KeptChoice {
  int64_t keys;                 // 0: no weights
  int64_t bytes;                // of their weights
  const char* reason;           // if not of all keys, why not
  int64_t remainder_bytes = 0;  // 0: no remainder
};

KeptChoice choose_kept(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes);

// What a call that is recorded for a backward keeps, besides what its options say. No weights where sizes are symbolic.
struct Kept {
  int64_t keys = 0;
  bool remainder = false;
};
Kept kept_for(const SdpaArgs& args);

// Whether calls of this dtype keep the remainder of their output, if they have enough keys for their device.
bool may_keep_remainder(at::ScalarType type);

// The third result of a sdpa that returns weights and keeps the remainder: both in one dimension, the remainder first.
// The two are views.
struct WeightsAndRemainder {
  Tensor weights, remainder;
};
WeightsAndRemainder split_weights(const Tensor& both, c10::SymIntArrayRef weights_sizes,
                                  c10::SymIntArrayRef output_sizes);

// Turns the rule off or on for the whole process. Returns what was set before. SCALEDOT_KEEP_WEIGHTS=0 starts with off.
bool set_keep_weights(bool enabled);

}  // namespace scaledot
