// The masks written out, on the CPU; see Backend in ops/common/backend.h.
#pragma once

#include "core/problem.h"

namespace scaledot {

void write_attends_cpu(const Problem& p, bool* attends);
void write_bias_cpu(const Problem& p, void* bias, DType dtype);
void write_dropout_mask_cpu(const Problem& p, bool* keep);

}  // namespace scaledot
