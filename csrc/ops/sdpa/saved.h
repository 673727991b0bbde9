// This rule says what a recorded forward saves for its backward (core/saved.h): the softmax of so many keys, or the low
// part of the output. Sizes, dtype and options decide, so a call always has the same bits.
#pragma once

#include "ops/common/backend.h"
#include "ops/common/shapes.h"
#include "ops/sdpa/op.h"

namespace scaledot {

struct SavedPlan {
  int64_t keys;                  // whose softmax is saved; 0: none
  int64_t bytes;                 // of their softmax
  const char* reason;            // why these are not all keys; empty if they are
  int64_t output_low_bytes = 0;  // 0: no low part
};
SavedPlan plan_saved(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes);

// The call with what its forward is to save. Nothing depends on sizes that are symbolic: there no softmax is saved.
SdpaRecordedArgs recorded(const SdpaArgs& args);
inline SdpaRecordedArgs recorded_with(const SdpaArgs& args, int64_t keys, bool output_low) {
  return {args, keys > 0 ? std::optional<c10::SymInt>(keys) : std::nullopt, output_low};
}

// Whether calls of this dtype save the low part of their output, if they have enough keys for their device.
bool may_save_output_low(at::ScalarType type);

// Turns the rule off or on for the whole process. Returns what was set before. It starts as off if
// SCALEDOT_SAVE_FOR_BACKWARD is 0.
bool set_save_for_backward(bool enabled);

}  // namespace scaledot
