// The CUDA sources, compiled for the simulation.
#include "cuda/sm90/forward_bf16.cu"
