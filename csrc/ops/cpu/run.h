// How a CPU kernel is run: which one, with how many threads, and in which workspace.
#pragma once

#include <vector>

#include "core/kernel.h"

namespace scaledot {

// The number of threads a kernel may use for this problem, here and now.
int cpu_workers(const Problem& problem);

// How the sequences of a packed problem run: the first of `order` one after the other, each with all threads; then the
// others, each on one thread.
struct SequencePlan {
  std::vector<int64_t> order;  // all sequences, the longest first
  size_t with_all_threads;     // how many of the first
  int threads;                 // for the others
};
SequencePlan plan_sequences(const Problem& packed);

// Selects a kernel and runs it on torch's threads. Not for a problem without rows or keys.
void run_cpu(const Problem& problem, Pass pass);

}  // namespace scaledot
