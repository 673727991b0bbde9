// The ops on dense tensors, once for all devices: check, allocate, make the Problem, run a kernel.
#pragma once

#include "ops/common/backend.h"
#include "ops/sdpa/op.h"

namespace scaledot {

Tensor3 sdpa_dense(const Backend& backend, const SdpaArgs& args);
Tensor5 sdpa_backward_dense(const Backend& backend, const SdpaBackwardArgs& args);
std::string explain_dense(const Backend& backend, const SdpaArgs& args);
// What core/mask.h and core/philox.h decide, written out: for the formula of the double backward and for tests.
Tensor2 sdpa_mask_dense(const Backend& backend, const SdpaMaskArgs& args);
Tensor dropout_mask_dense(const Backend& backend, const DropoutMaskArgs& args);

}  // namespace scaledot
