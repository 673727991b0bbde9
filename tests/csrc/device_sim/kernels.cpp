// The kernels of csrc/cuda for the host: the very source that nvcc compiles.
#include "cuda/kernels.cu"
#include "cuda/masks.cu"
