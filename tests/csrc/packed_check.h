// Runs CPU kernels on packed sequences: each sequence is a separate problem.
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
      if (b.output_low.tensor.present()) fill(b.output_low, s, one.output_low, 0);
    }
  }
}

// One pass, into results full of NaN.
inline void run(const Kernel& kernel, PackedBuilt& b, Pass pass, int workers, uint64_t shuffle) {
  const bool backward = pass == Pass::backward;
  for (PackedTensor* t : backward ? std::vector{&b.grad_query, &b.grad_key, &b.grad_value}
                                  : std::vector{&b.output, &b.lse, &b.output_low})
    t->tensor.fill_with_poison();
  if (backward) clear_mask_gradient(b);
  {
    RedZones zones;
    for_each_tensor(b, backward, [&](const TestTensor& t, bool) { zones.add(t); });
    for_each_sequence(b.problem, [&](const Problem& p) { run_shuffled(kernel, p, pass, workers, shuffle); });
  }
  fill_empty(b, backward);
}

// Whether the kernel takes all sequences.
inline bool takes(const Kernel& kernel, const PackedBuilt& b, Pass pass) {
  bool all = true;
  for_each_sequence(b.problem, [&](const Problem& p) { all = all && !kernel.why_not(p, pass); });
  return all;
}

// `b` has its oracles, and is prepared for the pass.
inline void check_packed(PackedBuilt& b, const Kernel& kernel, Pass pass, int workers, uint64_t shuffle) {
  SCOPED_TRACE(kernel.name);
  run(kernel, b, pass, workers, shuffle);
  pass == Pass::backward ? expect_backward(b) : expect_forward(b);
}

// Every CPU kernel that takes all sequences.
inline void check_packed(PackedBuilt& b, Pass pass, int workers, uint64_t shuffle) {
  for (int k = 0; k < cpu_kernels().count; ++k)
    if (takes(cpu_kernels().kernels[k], b, pass)) check_packed(b, cpu_kernels().kernels[k], pass, workers, shuffle);
}

}  // namespace scaledot::testing
