// The gradient of relative_bias over packed sequences. Each sequence writes its own, in memory for the distances that
// it has. They are added up in order, so that the sum does not depend on threads.
#pragma once

#include <c10/core/Allocator.h>

#include <vector>

#include "core/problem.h"

namespace scaledot {

class SequenceGradients {
 public:
  // `packed`: a problem of packed sequences, with or without grad_relative_bias.
  explicit SequenceGradients(const Problem& packed);

  int64_t bytes() const { return first_.back() * element_size(packed_.grad_relative_bias.dtype); }
  // Allocates the memory. Before place().
  void allocate();
  // Gives the problem of sequence b its own gradient to write.
  void place(int64_t b, Problem& p) const;
  // Adds up those of all sequences.
  void sum() const;

 private:
  template <class T>
  void sum_as() const;
  char* own(int64_t b) const;

  const Problem& packed_;
  const bool wanted_;
  std::vector<int64_t> first_;  // of each sequence, the number of its first element; then of all elements
  at::DataPtr memory_;
};

}  // namespace scaledot
