// The CUDA sources, compiled for the simulation.
#include "cuda/generic/bf16.cu"
