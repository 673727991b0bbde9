// Runs CPU kernels on packed sequences: each sequence is a problem of its own.
#pragma once

#include "packed_case.h"

namespace scaledot::testing {

// Calls body(problem) for every sequence that has scores. The ops fill in the results of the others.
template <class Body>
void for_each_sequence(const Problem& packed, const Body& body) {
  for (int64_t b = 0; b < packed.batch; ++b) {
    const Problem p = sequence(packed, b);
    if (has_scores(p)) body(p);
  }
}

// Results of sequences without scores.
inline void fill_empty(PackedBuilt& b, bool backward) {
  const auto fill = [](PackedTensor& t, size_t s, const TestTensor& like, double value) {
    TestTensor filled = like;
    filled.set(std::vector<double>(size_t(filled.count()), value));
    t.gather(s, filled);
  };
  for (size_t s = 0; s < b.sequences.size(); ++s) {
    const Built& one = b.sequences[s];
    if (has_scores(one.problem())) continue;
    if (backward) {
      fill(b.grad_query, s, one.grad_query, 0), fill(b.grad_key, s, one.grad_key, 0);
      fill(b.grad_value, s, one.grad_value, 0);
    } else {
      fill(b.output, s, one.output, 0), fill(b.lse, s, one.lse, -kInfinity);
    }
  }
}

// One pass, into results full of NaN.
inline void run(const Kernel& kernel, PackedBuilt& b, Pass pass, int workers, uint64_t shuffle) {
  const bool backward = pass == Pass::backward;
  for (PackedTensor* t :
       backward ? std::vector{&b.grad_query, &b.grad_key, &b.grad_value} : std::vector{&b.output, &b.lse})
    t->tensor.fill_with_poison();
  {
    RedZones zones;
    for_each_tensor(b, backward, [&](const TestTensor& t, bool) { zones.add(t); });
    for_each_sequence(b.problem, [&](const Problem& p) { run_shuffled(kernel, p, pass, workers, shuffle); });
  }
  fill_empty(b, backward);
}

// Calls body(kernel) with every CPU kernel that takes all sequences.
template <class Body>
void for_each_kernel_of(const PackedBuilt& b, Pass pass, const Body& body) {
  for (int k = 0; k < cpu_kernels().count; ++k) {
    const Kernel& kernel = cpu_kernels().kernels[k];
    bool takes = true;
    for_each_sequence(b.problem, [&](const Problem& p) { takes = takes && !kernel.why_not(p, pass); });
    if (takes) body(kernel);
  }
}

// `b` has its oracles.
inline void check_packed(PackedBuilt& b, bool forward_only, int workers, uint64_t shuffle) {
  for_each_kernel_of(b, Pass::forward, [&](const Kernel& kernel) {
    SCOPED_TRACE(kernel.name);
    run(kernel, b, Pass::forward, workers, shuffle);
    expect_forward(b);
  });
  if (forward_only) return;
  prepare_backward(b);
  for_each_kernel_of(b, Pass::backward, [&](const Kernel& kernel) {
    SCOPED_TRACE(kernel.name);
    run(kernel, b, Pass::backward, workers, shuffle);
    expect_backward(b);
  });
}

}  // namespace scaledot::testing
