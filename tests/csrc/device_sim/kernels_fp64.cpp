// The CUDA sources, compiled for the simulation.
#include "cuda/generic/fp64.cu"
