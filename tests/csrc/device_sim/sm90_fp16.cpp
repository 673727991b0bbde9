// The CUDA sources, compiled for the simulation.
#include "cuda/sm90/fp16.cu"
