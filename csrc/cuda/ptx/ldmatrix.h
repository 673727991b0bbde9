// Loads four 8 x 8 matrices of 16-bit elements from shared memory to the registers of a warp (PTX ISA, "ldmatrix").
//
// Lane l passes the address of row l % 8 of matrix l / 8: eight neighbouring elements, at a multiple of 16 bytes.
// Lane l then holds two elements of each matrix: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1. Transposed: rows
// 2 (l % 4) and 2 (l % 4) + 1, column l / 4.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t from = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
SCALEDOT_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  const uint32_t from = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

#else

SCALEDOT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row, sim::Place place = sim::here()) {
  sim::come_together("ldmatrix_x4", place);
  sim::ldmatrix_x4("ldmatrix_x4", r, row, false);
}
SCALEDOT_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, sim::Place place = sim::here()) {
  sim::come_together("ldmatrix_x4_trans", place);
  sim::ldmatrix_x4("ldmatrix_x4_trans", r, row, true);
}

#endif

}  // namespace scaledot
