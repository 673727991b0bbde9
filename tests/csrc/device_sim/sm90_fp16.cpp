// The kernels of csrc/cuda for the host: the very source that nvcc compiles.
#include "cuda/sm90/fp16.cu"
