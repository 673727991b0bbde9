// How a CPU kernel is run: which one, with how many threads, and in which workspace.
#pragma once

#include "core/kernel.h"

namespace scaledot {

// The number of threads a kernel may use for this problem, here and now.
int cpu_workers(const Problem& problem);

// Selects a kernel and runs it on torch's threads. Not for a problem without rows or keys.
void run_cpu(const Problem& problem, Pass pass);

}  // namespace scaledot
