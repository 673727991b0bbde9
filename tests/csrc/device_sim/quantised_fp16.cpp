// The CUDA sources, compiled for the simulation.
#include "cuda/generic/quantised_fp16.cu"
