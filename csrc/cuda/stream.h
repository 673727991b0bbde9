// cudaStream_t, declared here so that neither the ops nor the tests need CUDA's headers.
#pragma once

struct CUstream_st;

namespace scaledot {
using DeviceStream = CUstream_st*;
}
