// cudaStream_t by its own definition, so that neither torch's side nor the tests need CUDA's headers.
#pragma once

struct CUstream_st;

namespace scaledot {
using DeviceStream = CUstream_st*;
}
