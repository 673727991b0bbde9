// c += a b on the tensor cores, with a 16 x 16 and b 16 x 8 of 16-bit elements, c of float32 (PTX ISA, "mma.m16n8k16").
//
// With g = lane / 4 and t = lane % 4, a lane holds these elements of a and b, two to a register, and of c:
//   a  (g, 2t..)  (g + 8, 2t..)  (g, 2t + 8..)  (g + 8, 2t + 8..)      b  (2t.., g)  (2t + 8.., g)
//   c  (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)       (mma_row, mma_column)
#pragma once

#include "core/dispatch.h"
#include "cuda/ptx/device.h"

namespace scaledot {

SCALEDOT_FN int mma_row(int lane, int e) { return lane / 4 + e / 2 * 8; }
SCALEDOT_FN int mma_column(int lane, int e) { return lane % 4 * 2 + e % 2; }

#if defined(__CUDACC__)

SCALEDOT_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Type<BFloat16>) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
SCALEDOT_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Type<Float16>) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else

template <class Number>
SCALEDOT_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Type<Number>,
                                  sim::Place place = sim::here()) {
  sim::come_together("mma_m16n8k16", place);
  const auto widen_bits = [](uint16_t bits) { return widen(Number{bits}); };
  sim::mma_m16n8k16("mma_m16n8k16", c, a, b0, b1, widen_bits);
}

#endif

}  // namespace scaledot
