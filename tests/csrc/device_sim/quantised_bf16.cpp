// The CUDA sources, compiled for the simulation.
#include "cuda/generic/quantised_bf16.cu"
