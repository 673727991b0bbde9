// A simulated GPU for tests. It runs the kernels of csrc/cuda on the host, one block (or cluster of blocks) after the
// other; every thread of a block is a fiber. The wrappers of csrc/cuda/ptx call the functions below instead of emitting
// an instruction. An error throws Failure, with the name of the wrapper. Errors are:
//   - a deadlock: every thread waits for others
//   - threads of one warp at different collective calls, or at different places of one that is .aligned in PTX
//   - accesses to shared or global memory out of bounds, or writes to an input
//   - reads of shared memory that was not written, or whose copy was not waited for
//   - two threads that access the same shared memory, one of them writing, without a barrier between
//   - blocks that end without waiting for their copies, misaligned addresses
//   - what the driver refuses to launch; launch() returns it as an error, as it does on a GPU
//   - data written by threads and read by tensor cores or copy engines without fence_async between, or read by threads
//     and overwritten by copy engines
//   - sums or operands of a wgmma that are touched before wgmma_wait, and wgmma without wgmma_fence
//   - in a cluster: use of another block's shared memory before that block is ready, or when it may have ended
// It cannot show how a real GPU orders memory, nor time or register use, or whether we read NVIDIA's tables correctly.
// The last is what tests/external/cutlass.py checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

namespace scaledot::sim {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kMultiprocessors = 3;  // few, so that persistent blocks get several tiles
constexpr int kLanes = 32;
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / kLanes;
constexpr int64_t kMaxSharedBytes = 227 * 1024;      // what sm_90 gives a block
constexpr int64_t kMaxSharedBytesOfAll = 99 * 1024;  // what every GPU from sm_80 on gives

// ---------------------------------------------------------------------------------------------------- for tests
// Registers memory that kernels may access. All other memory is out of bounds.
void register_buffer(const void* data, size_t bytes, bool writable);
void clear_buffers();

// The simulated device: ten times its compute capability, and whether the library has code for it.
struct Device {
  int capability;
  bool has_code;
};
constexpr Device kDevice = {90, true};  // the newest generation with its own kernels
void set_device(Device device);
// Sets device memory to 0. Returns nullptr, or an error message.
const char* clear_bytes(void* data, int64_t bytes);

// Returns what the driver says to a launch that the current device cannot run; otherwise nullptr.
const char* why_no_launch(int64_t blocks, int cluster, int threads, int64_t shared_bytes);
// Runs `kernel` in every thread of every block. Throws what the driver refuses.
void run_grid(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel);
// Runs the kernel in clusters of `cluster` blocks.
void run_clusters(int64_t blocks, int cluster, int threads, int64_t shared_bytes, const std::function<void()>& kernel);
int64_t launches();  // so far, with clear_bytes

// ---------------------------------------------------------------------------------------------------- for wrappers
int compute_capability();
bool has_code();

// A line of a kernel: that of the call, as the default argument of a wrapper.
struct Place {
  const char* file;
  int line;
};
constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
// Each lane calls it at an instruction that is .aligned in PTX: all lanes of its warp must execute that same
// instruction. It does not wait for them. One line may be several instructions, if it is in a function that is called
// from several places; these are not told apart.
void come_together(const char* call, Place place);

int thread_index();
int64_t block_index();
int64_t block_count();
int cluster_rank();  // of the block in its cluster
void* shared_memory();

bool barrier_or(const char* call, bool predicate);
void warp_barrier(const char* call);
void cluster_barrier(const char* call);  // all threads of all blocks of the cluster
// All threads of the warp must arrive with the same `call`. The last one runs combine over the operands of all lanes.
void warp_collective(const char* call, void* operands, void (*combine)(void* const* all));

void read_shared(const char* call, const void* from, size_t bytes, size_t alignment);
void write_shared(const char* call, const void* to, size_t bytes, size_t alignment);
void read_global(const char* call, const void* from, size_t bytes, size_t alignment);
void write_global(const char* call, const void* to, size_t bytes, size_t alignment);

void cp_async(const char* call, void* to, const void* from, int bytes);
void cp_async_wait_all();
void cp_async_commit();
void cp_async_wait_older();  // for the copies of all groups but the last one

void ldmatrix_x4(const char* call, uint32_t (&r)[4], const void* row, bool transposed);
void mma_m16n8k16(const char* call, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  float (*widen)(uint16_t bits));

// ---------------------------------------------------------------------------------------------------- sm_90 wrappers
// The address of shared memory in the form that instructions use.
uint32_t shared_address(const void* address);

// The simulation's tensor maps (csrc/cuda/ptx/tensor_map.h): 16-bit elements, 4 dimensions, innermost first. Boxes with
// rows of 64 elements are swizzled by 128 bytes.
struct TensorMap {
  const void* data;
  int64_t size[4];
  int64_t stride[4];  // bytes; the first is 2
  int32_t box[4];
};
void tensor_load(const char* call, void* to, const TensorMap& map, uint64_t* mbarrier, const int32_t (&at)[4]);
// To the same place in several blocks of the cluster: bit k of `blocks` stands for the block of rank k.
void tensor_load_to_all(const char* call, void* to, const TensorMap& map, uint64_t* mbarrier, const int32_t (&at)[4],
                        unsigned blocks);
void tensor_store(const char* call, const TensorMap& map, const void* from, const int32_t (&at)[4]);
void bulk_load(const char* call, void* to, const void* from, int bytes, uint64_t* mbarrier);
void bulk_store(const char* call, float* to, const float* from, int bytes);
void bulk_reduce_add(const char* call, float* to, const float* from, int bytes);
void bulk_commit(const char* call);
void bulk_wait(const char* call, int pending);

void mbarrier_init(const char* call, uint64_t* mbarrier, int arrivals);
void mbarrier_arrive(const char* call, uint64_t* mbarrier, int bytes);
void mbarrier_arrive_at(const char* call, uint64_t* mbarrier, int rank);  // at the same mbarrier of a block
void mbarrier_wait(const char* call, uint64_t* mbarrier, int parity);

void fence_async();
void named_barrier(const char* call, int id, int threads, bool waits);
void set_max_registers(const char* call, int registers);
void stmatrix_x4(const char* call, void* row, const uint32_t (&r)[4], bool transposed);

// d: 64 x n sums. a: four registers, or nullptr if descriptor_a gives its place in shared memory.
struct Wgmma {
  float* d;
  int n;
  const uint32_t* a;
  uint64_t descriptor_a, descriptor_b;
  bool transposed_a, transposed_b;  // the matrix in shared memory is MN-major
  bool accumulate;
  float (*widen)(uint16_t bits);
};
void wgmma(const char* call, const Wgmma& operands);
void wgmma_fence(const char* call);
void wgmma_commit(const char* call);
void wgmma_wait(const char* call, int pending);

// Trivially atomic: blocks run one after the other.
int atomic_add(const char* call, int* to, int x);

}  // namespace scaledot::sim
