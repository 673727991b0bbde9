// Masks, biases and dropout (core/mask.h, core/philox.h) written out as tensors on a GPU, for the formula of the double
// backward and for tests. Each function returns nullptr, or CUDA's error message. All memory is contiguous device
// memory.
#pragma once

#include "core/problem.h"
#include "cuda/stream.h"

namespace scaledot {

// attends[i, j]: whether row i may attend to key j by position.
const char* write_attends(const Problem& p, bool* attends, DeviceStream stream);

// bias[head, i, j] = -slope * |distance|, in float32 or float64 (`dtype`).
const char* write_bias(const Problem& p, void* bias, DType dtype, DeviceStream stream);

// keep_mask[batch, head, i, j]: whether dropout keeps the weight.
const char* write_dropout_mask(const Problem& p, bool* keep_mask, DeviceStream stream);

}  // namespace scaledot
