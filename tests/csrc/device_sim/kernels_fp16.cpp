// The kernels of csrc/cuda for the host: the very source that nvcc compiles.
#include "cuda/generic/fp16.cu"
