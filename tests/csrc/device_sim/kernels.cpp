// The CUDA sources, compiled for the simulation.
#include "cuda/kernels.cu"
#include "cuda/masks.cu"
