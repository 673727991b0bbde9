// The copy engine (TMA) between global and shared memory (PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor"). Each
// function is called by one thread.
//
// Tensor copies move a box of a tensor of four dimensions, innermost first, that a TensorMap describes (tensor_map.h).
// Elements outside the tensor are 0 when loaded, and skipped when stored. A box with rows of 64 elements (128 bytes) is
// swizzled in shared memory: swizzled_byte() gives the place of an element. Such a box begins at a multiple of 1024
// bytes, others at a multiple of 128.
#pragma once

#include "cuda/ptx/mbarrier.h"

namespace scaledot {

constexpr int kSwizzleCols = 64;  // elements in a row of a swizzled box
constexpr int kSwizzleRows = 8;   // after which the pattern repeats: of 1024 bytes, where a box may begin

// The place of byte `byte` of row `row` of a swizzled box: the index of its 16-byte chunk is xor-ed with row % 8.
SCALEDOT_FN int swizzled_byte(int row, int byte) { return row * 128 + (byte ^ (row % 8 * 16)); }

#if defined(__CUDACC__)

struct alignas(64) TensorMap {
  uint64_t opaque[16];  // CUtensorMap
};

// Makes this thread's writes to shared memory visible to tensor cores and the copy engine. A barrier must follow.
SCALEDOT_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Reports the bytes of the whole box, zeros included, to the mbarrier.
SCALEDOT_DEVICE void tensor_load(void* to_shared, const TensorMap& map, uint64_t* mbarrier, int c0, int c1, int c2,
                                 int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(shared_address(to_shared)),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
SCALEDOT_DEVICE void tensor_store(const TensorMap& map, const void* from_shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
               "r"(shared_address(from_shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// Copies of contiguous bytes. Addresses and `bytes` are multiples of 16.
SCALEDOT_DEVICE void bulk_load(void* to_shared, const void* from_global, int bytes, uint64_t* mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(to_shared)),
               "l"(from_global), "r"(bytes), "r"(shared_address(mbarrier))
               : "memory");
}
SCALEDOT_DEVICE void bulk_store(float* to_global, const float* from_shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to_global),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}
// to[k] += from[k], each addition atomic.
SCALEDOT_DEVICE void bulk_reduce_add(float* to_global, const float* from_shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to_global),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}
// The copies out of shared memory (tensor_store, bulk_store, bulk_reduce_add) since the last commit form a group.
SCALEDOT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until at most kPending groups of this thread still have to read shared memory.
template <int kPending>
SCALEDOT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// Waits until at most kPending groups of this thread are incomplete. The writes of the others are visible to this
// thread.
template <int kPending>
SCALEDOT_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

#else

using TensorMap = sim::TensorMap;

SCALEDOT_DEVICE void fence_async() { sim::fence_async(); }
SCALEDOT_DEVICE void tensor_load(void* to_shared, const TensorMap& map, uint64_t* mbarrier, int c0, int c1, int c2,
                                 int c3) {
  sim::tensor_load("tensor_load", to_shared, map, mbarrier, {c0, c1, c2, c3});
}
SCALEDOT_DEVICE void tensor_store(const TensorMap& map, const void* from_shared, int c0, int c1, int c2, int c3) {
  sim::tensor_store("tensor_store", map, from_shared, {c0, c1, c2, c3});
}
SCALEDOT_DEVICE void bulk_load(void* to_shared, const void* from_global, int bytes, uint64_t* mbarrier) {
  sim::bulk_load("bulk_load", to_shared, from_global, bytes, mbarrier);
}
SCALEDOT_DEVICE void bulk_store(float* to_global, const float* from_shared, int bytes) {
  sim::bulk_store("bulk_store", to_global, from_shared, bytes);
}
SCALEDOT_DEVICE void bulk_reduce_add(float* to_global, const float* from_shared, int bytes) {
  sim::bulk_reduce_add("bulk_reduce_add", to_global, from_shared, bytes);
}
SCALEDOT_DEVICE void bulk_commit() { sim::bulk_commit("bulk_commit"); }
template <int kPending>
SCALEDOT_DEVICE void bulk_wait_read() {
  sim::bulk_wait("bulk_wait_read", kPending);
}
template <int kPending>
SCALEDOT_DEVICE void bulk_wait() {
  sim::bulk_wait("bulk_wait", kPending);
}

#endif

}  // namespace scaledot
