// The ops on dense tensors, once for all devices: check, allocate, make the Problem, run a kernel.
#pragma once

#include "ops/common/backend.h"
#include "ops/sdpa/op.h"

namespace scaledot {

Tensor3 run_sdpa(const Backend& backend, const SdpaArgs& args);
Tensor2 run_sdpa_out(const Backend& backend, const SdpaOutArgs& args);
Tensor4 run_sdpa_recorded(const Backend& backend, const SdpaRecordedArgs& args);
SdpaGradients run_sdpa_backward(const Backend& backend, const SdpaBackwardArgs& args);
std::string run_explain(const Backend& backend, const ExplainArgs& args);
// These write out what core/mask.h and core/philox.h decide, for the formula of the double backward and for tests.
Tensor2 run_sdpa_mask(const Backend& backend, const SdpaMaskArgs& args);
Tensor run_dropout_mask(const Backend& backend, const DropoutMaskArgs& args);

}  // namespace scaledot
