// The masks written out, on the CPU; see Backend in ops/sdpa_dense.h.
#pragma once

#include "core/problem.h"

namespace scaledot {

void write_attends_cpu(const Problem& p, bool* attends);
void write_bias_cpu(const Problem& p, void* bias, DType dtype);
void write_dropout_mask_cpu(const Problem& p, bool* kept);

}  // namespace scaledot
