// Products on the tensor cores by a warpgroup (PTX ISA, "wgmma.mma_async"): d += a b, with a 64 x 16 and b 16 x kN of
// 16-bit elements and d of float32. They run asynchronously: between wgmma_fence and the wait for their group, no code
// may touch d, or a in registers.
//
//   wgmma_fence();
//   wgmma<kN, ...>(d, a, b, ...);    // any number of times
//   wgmma_commit();
//   ...
//   wgmma_wait<pending groups>();
//   fence_operand(d);
//
// With w = warp % 4, g = lane / 4 and t = lane % 4 a thread holds
//   d[4n], d[4n + 1] = D[16w + g, 8n + 2t], D[.., 8n + 2t + 1]        d[4n + 2], d[4n + 3]: the same of row 16w + g + 8
//   a[0], a[1], a[2], a[3] = A[16w + g, 2t..], A[16w + g + 8, 2t..], A[16w + g, 2t + 8..], A[16w + g + 8, 2t + 8..]
// so that 16 columns of an accumulator, narrowed in pairs, are the operand a of a further product.
//
// Operands in shared memory are panels as tensor_load writes them: swizzled rows of 64 elements. Wider matrices take
// several panels. The descriptors:
//   K-major    rows of a panel are rows of a (columns of b); a step of 16 along k is 16 columns of a panel
//   MN-major   rows of a panel are k; its columns are columns of b (rows of a); panels are `panel_bytes` apart
#pragma once

#include "core/dispatch.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#if defined(__CUDACC__)
#include "cuda/ptx/wgmma_text.h"
#endif

namespace scaledot {

enum class Major : int { k = 0, mn = 1 };

// The widths (columns of d) that wgmma_text.h has the instruction for.
constexpr bool is_wgmma_width(int n) { return n == 32 || n == 64 || n == 80 || n == 128 || n == 256; }

// PTX ISA, "Matrix Descriptor Format": start address, leading and stride byte offsets in units of 16 bytes, 128-byte
// swizzle.
SCALEDOT_DEVICE uint64_t wgmma_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  // wgmma takes a descriptor from uniform registers. If the compiler knows that all threads have the same address, it
  // computes the descriptors of all k steps there. The shuffle says so. It also hides the address until here: else the
  // compiler would keep those descriptors in registers through the loop.
  const uint32_t address = uint32_t(warp_uniform(int(shared_address(start))));
  return uint64_t(address >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4 & 0x3fff) << 16 |
         uint64_t(stride_bytes >> 4 & 0x3fff) << 32 | kSwizzle128;
}

// The pattern of the swizzle repeats every eight rows.
constexpr uint32_t kSwizzleAtomBytes = 1024;

// A K-major operand: the rows from `panel` on (a multiple of 8 rows into a panel).
SCALEDOT_DEVICE uint64_t k_major_descriptor(const void* panel) {
  return wgmma_descriptor(panel, 16, kSwizzleAtomBytes);
}
// An MN-major operand: k from the row that `panel` points to (a multiple of 8 rows into a panel).
SCALEDOT_DEVICE uint64_t mn_major_descriptor(const void* panel, int panel_bytes) {
  return wgmma_descriptor(panel, uint32_t(panel_bytes), kSwizzleAtomBytes);
}
// Descriptor of the same operand, `bytes` further in shared memory. Only the lower half changes, so the upper one stays
// a constant.
SCALEDOT_DEVICE uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  return (descriptor >> 32 << 32) | uint64_t(uint32_t(descriptor) + uint32_t(bytes >> 4));
}

#if defined(__CUDACC__)

SCALEDOT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
SCALEDOT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
SCALEDOT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to these registers across this point. Used before wgmma_fence and after a
// wait.
template <int kCount>
SCALEDOT_DEVICE void fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) asm volatile("" : "+f"(d[k])::"memory");
}
template <int kCount>
SCALEDOT_DEVICE void fence_operand(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(a[k][e])::"memory");
}

// d = a b, or d += a b if `accumulate`.
template <int kN, Major kA, Major kB>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate, Type<BFloat16>) {
  static_assert(is_wgmma_width(kN));
  SCALEDOT_WGMMA_SS_OF_WIDTH("bf16")
}
template <int kN, Major kA, Major kB>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate, Type<Float16>) {
  static_assert(is_wgmma_width(kN));
  SCALEDOT_WGMMA_SS_OF_WIDTH("f16")
}
// Multiplies with a in registers.
template <int kN, Major kB>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, Type<BFloat16>) {
  static_assert(is_wgmma_width(kN));
  SCALEDOT_WGMMA_RS_OF_WIDTH("bf16")
}
template <int kN, Major kB>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, Type<Float16>) {
  static_assert(is_wgmma_width(kN));
  SCALEDOT_WGMMA_RS_OF_WIDTH("f16")
}

#else

SCALEDOT_DEVICE void wgmma_fence(sim::Place place = sim::here()) {
  sim::come_together("wgmma_fence", place);
  sim::wgmma_fence("wgmma_fence");
}
SCALEDOT_DEVICE void wgmma_commit(sim::Place place = sim::here()) {
  sim::come_together("wgmma_commit", place);
  sim::wgmma_commit("wgmma_commit");
}
template <int kPending>
SCALEDOT_DEVICE void wgmma_wait(sim::Place place = sim::here()) {
  sim::come_together("wgmma_wait", place);
  sim::wgmma_wait("wgmma_wait", kPending);
}
template <int kCount>
SCALEDOT_DEVICE void fence_operand(float (&)[kCount]) {}
template <int kCount>
SCALEDOT_DEVICE void fence_operand(uint32_t (&)[kCount][4]) {}

template <int kN, Major kA, Major kB, class Number>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate, Type<Number>,
                           sim::Place place = sim::here()) {
  static_assert(is_wgmma_width(kN));
  sim::come_together("wgmma", place);
  const auto widen_bits = [](uint16_t bits) { return widen(Number{bits}); };
  sim::wgmma("wgmma", {d, kN, nullptr, a, b, kA == Major::mn, kB == Major::mn, accumulate, widen_bits});
}
template <int kN, Major kB, class Number>
SCALEDOT_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, Type<Number>,
                           sim::Place place = sim::here()) {
  static_assert(is_wgmma_width(kN));
  sim::come_together("wgmma", place);
  const auto widen_bits = [](uint16_t bits) { return widen(Number{bits}); };
  sim::wgmma("wgmma", {d, kN, a, 0, b, false, kB == Major::mn, accumulate, widen_bits});
}

#endif

}  // namespace scaledot
