// A GPU for tests: runs the kernels of csrc/cuda on the host, one block after the other, every thread of a block a fiber. The
// wrappers of csrc/cuda/ptx call the functions below where nvcc would emit an instruction. What goes wrong throws Failure,
// which names the wrapper call:
//   - a deadlock: no thread can go on, because some wait where others never come
//   - threads of one warp that meet at different warp-wide calls
//   - shared or global memory accessed out of bounds, or an input written to
//   - shared memory read before anybody wrote it, or before the copy into it was waited for
//   - shared memory that two threads access, one of them writing, without a barrier between
//   - a block that ends with copies it never waited for, misaligned addresses, too large a block
// What it cannot show: the ordering of memory on a real GPU, time, registers, and whether we read NVIDIA's tables right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

namespace scaledot::sim {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxSharedBytes = 99 * 1024;  // what every GPU from sm_80 on gives a block

// ---------------------------------------------------------------------------------------------------- for tests
// Buffers that kernels may access. Others are out of bounds.
void register_buffer(const void* data, size_t bytes, bool writable);
void clear_buffers();

// What device the simulation is: ten times its compute capability, and whether the library has code for it.
struct Device {
  int capability;
  bool has_code;
};
constexpr Device kDevice = {90, true};
void set_device(Device device);

// Runs `kernel` once for every thread of every block.
void run_grid(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel);

// ---------------------------------------------------------------------------------------------------- for wrappers
int compute_capability();
bool has_code();

int thread_index();
int64_t block_index();
int64_t block_count();
void* shared_memory();

bool barrier_or(const char* call, bool predicate);
void warp_barrier(const char* call);
// All threads of the warp come here with the same `call`; the last to arrive runs combine over the operands of all lanes.
void warp_collective(const char* call, void* operands, void (*combine)(void* const* all));

void read_shared(const char* call, const void* from, size_t bytes, size_t alignment);
void write_shared(const char* call, const void* to, size_t bytes, size_t alignment);
void read_global(const char* call, const void* from, size_t bytes, size_t alignment);
void write_global(const char* call, const void* to, size_t bytes, size_t alignment);

void cp_async(const char* call, void* to, const void* from, int bytes);
void cp_async_wait_all();

void ldmatrix_x4(const char* call, uint32_t (&r)[4], const void* row, bool transposed);
void mma_m16n8k16(const char* call, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  float (*widen)(uint16_t bits));

}  // namespace scaledot::sim
