// What autograd has the forward keep for the backward (core/saved.h): its softmax, and of how many keys, or what
// rounding took off its output. Sizes, dtype and options decide, so a call always has the same bits.
#pragma once

#include "ops/common/backend.h"
#include "ops/common/shapes.h"

namespace scaledot {

struct SavedChoice {
  int64_t keys;                  // 0: no weights
  int64_t bytes;                 // of their weights
  const char* reason;            // if not of all keys, why not
  int64_t output_low_bytes = 0;  // 0: no low part
};

SavedChoice choose_saved(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes);

// What a call that is recorded for a backward keeps, besides what its options say. No weights where sizes are symbolic.
struct Kept {
  int64_t keys = 0;
  bool output_low = false;
};
Kept saved_for(const SdpaArgs& args);

// Whether calls of this dtype keep the low part of their output, if they have enough keys for their device.
bool may_save_output_low(at::ScalarType type);

// The third result of a sdpa that returns weights and keeps the low part: both in one dimension, the low part first.
// The two are views.
struct WeightsAndOutputLow {
  Tensor weights, output_low;
};
WeightsAndOutputLow split_weights(const Tensor& both, c10::SymIntArrayRef weights_sizes,
                                  c10::SymIntArrayRef output_sizes);

// Turns the rule off or on for the whole process. Returns what was set before. SCALEDOT_SAVE_FOR_BACKWARD=0 starts with
// off.
bool set_save_for_backward(bool enabled);

}  // namespace scaledot
