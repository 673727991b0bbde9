// Stores four 8 x 8 matrices of 16-bit elements from the registers of a warp to shared memory: the inverse of ldmatrix
// (PTX ISA, "stmatrix").
//
// Lane l passes the address of row l % 8 of matrix l / 8, at a multiple of 16 bytes. Register m of lane l holds two
// elements of matrix m: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1. Transposed: rows 2 (l % 4) and 2 (l % 4) + 1,
// column l / 4.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   uint32_t(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
SCALEDOT_DEVICE void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                   uint32_t(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

#else

SCALEDOT_DEVICE void stmatrix_x4(void* row, const uint32_t (&r)[4], sim::Place place = sim::here()) {
  sim::come_together("stmatrix_x4", place);
  sim::stmatrix_x4("stmatrix_x4", row, r, false);
}
SCALEDOT_DEVICE void stmatrix_x4_trans(void* row, const uint32_t (&r)[4], sim::Place place = sim::here()) {
  sim::come_together("stmatrix_x4_trans", place);
  sim::stmatrix_x4("stmatrix_x4_trans", row, r, true);
}

#endif

}  // namespace scaledot
