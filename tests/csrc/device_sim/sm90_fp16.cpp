// The CUDA sources, compiled for the simulation.
#include "cuda/sm90/forward_fp16.cu"
