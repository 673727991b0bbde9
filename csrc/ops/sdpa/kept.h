// Whether autograd has the forward keep the softmax for the backward, and of how many keys. core/kept_weights.h has the
// rule of sizes. Sizes, dtype and options decide, so a call always has the same bits.
#pragma once

#include "ops/common/backend.h"
#include "ops/common/shapes.h"

namespace scaledot {

struct KeptChoice {
  int64_t keys;        // 0: none
  int64_t bytes;       // of their weights
  const char* reason;  // if not of all keys, why not
};

KeptChoice choose_kept(const Backend& backend, const SdpaArgs& args, const Shapes<int64_t>& shapes);

// The keys of a call that is recorded for a backward. 0 where sizes are symbolic.
int64_t kept_keys_for(const SdpaArgs& args);

// Turns the rule off or on for the whole process. Returns what was set before. SCALEDOT_KEEP_WEIGHTS=0 starts with off.
bool set_keep_weights(bool enabled);

}  // namespace scaledot
