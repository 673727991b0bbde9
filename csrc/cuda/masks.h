// What core/mask.h and core/philox.h decide, written out on a GPU: for the formula of the double backward, and for tests. Each
// returns nullptr, or what CUDA says is wrong. All memory is the device's and contiguous.
#pragma once

#include "core/problem.h"
#include "cuda/stream.h"

namespace scaledot {

// attends[i, j]: whether row i attends to key j by position.
const char* write_attends(const Problem& p, bool* attends, DeviceStream stream);

// bias[head, i, j] = -slope * |distance|; float32 or float64, as `dtype` says.
const char* write_bias(const Problem& p, void* bias, DType dtype, DeviceStream stream);

// kept[batch, head, i, j]: whether dropout keeps the weight.
const char* write_dropout_mask(const Problem& p, bool* kept, DeviceStream stream);

}  // namespace scaledot
