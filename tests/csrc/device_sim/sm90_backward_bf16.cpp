// The CUDA sources, compiled for the simulation.
#include "cuda/sm90/backward_bf16.cu"
