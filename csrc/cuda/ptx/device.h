// Device functions, and a thread's position in the grid. Kernels use neither CUDA's keywords nor its built-in
// variables, so nvcc compiles their source for a GPU, and a plain C++ compiler for the simulation
// (tests/csrc/device_sim). The simulation implements each wrapper of this folder on the host.
#pragma once

#include "core/math.h"
#include "core/number.h"
#include "cuda/stream.h"

#if defined(__CUDACC__)

#define SCALEDOT_DEVICE static __device__ __forceinline__
#define SCALEDOT_MEMBER __device__ __forceinline__  // for member functions
#define SCALEDOT_KERNEL(threads) static __global__ void __launch_bounds__(threads, 1)
// At least `blocks` of its blocks are to share a multiprocessor: that limits the registers of a thread.
#define SCALEDOT_SHARED_KERNEL(threads, blocks) static __global__ void __launch_bounds__(threads, blocks)
#define SCALEDOT_PARAM const __grid_constant__
// Whether this compilation may use instructions of sm_90a. Otherwise the kernels that need them are empty.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SCALEDOT_SM90 1
#else
#define SCALEDOT_SM90 0
#endif

namespace scaledot {

SCALEDOT_DEVICE int thread_index() { return int(threadIdx.x); }
// thread_index(), read anew: values derived from it are recomputed and do not stay in registers through a loop.
SCALEDOT_DEVICE int thread_index_volatile() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}
SCALEDOT_DEVICE int64_t block_index() { return int64_t(blockIdx.x); }
SCALEDOT_DEVICE int64_t block_count() { return int64_t(gridDim.x); }

// The block's dynamic shared memory, aligned to 1024 bytes.
SCALEDOT_DEVICE void* shared_memory() {
  extern __shared__ __align__(1024) unsigned char scaledot_shared[];
  return scaledot_shared;
}

// Optimization barrier: the compiler knows nothing about the result. Values derived from it are computed after this
// point, and not before a loop whose registers they would take.
SCALEDOT_DEVICE int opt_barrier(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
SCALEDOT_DEVICE uint32_t opt_barrier(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
SCALEDOT_DEVICE float opt_barrier(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

}  // namespace scaledot

#else

#include "device_sim/device_sim.h"

#define SCALEDOT_DEVICE static inline
#define SCALEDOT_MEMBER inline
#define SCALEDOT_KERNEL(threads) static void
#define SCALEDOT_SHARED_KERNEL(threads, blocks) static void
#define SCALEDOT_PARAM const
#define SCALEDOT_SM90 1
#define SCALEDOT_SM90A 1  // for nvcc: defined by cmake if kernels are compiled for sm_90a

namespace scaledot {

SCALEDOT_DEVICE int thread_index() { return sim::thread_index(); }
SCALEDOT_DEVICE int thread_index_volatile() { return sim::thread_index(); }
SCALEDOT_DEVICE int64_t block_index() { return sim::block_index(); }
SCALEDOT_DEVICE int64_t block_count() { return sim::block_count(); }
SCALEDOT_DEVICE void* shared_memory() { return sim::shared_memory(); }
SCALEDOT_DEVICE int opt_barrier(int x) { return x; }
SCALEDOT_DEVICE uint32_t opt_barrier(uint32_t x) { return x; }
SCALEDOT_DEVICE float opt_barrier(float x) { return x; }

}  // namespace scaledot

#endif

namespace scaledot {

constexpr int kWarpSize = 32;

SCALEDOT_DEVICE int lane_index() { return thread_index() % kWarpSize; }
SCALEDOT_DEVICE int warp_index() { return thread_index() / kWarpSize; }

}  // namespace scaledot
