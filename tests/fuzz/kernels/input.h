// From the bytes of a fuzzer to a problem. A field has a fixed place among the bytes, so that changing one byte changes
// one field. Bytes that are missing are 0.
#pragma once

#include <optional>
#include <string>

#include "packed_case.h"

namespace scaledot::testing {

// How the elements of a tensor lie in memory.
struct Layout {
  int order = 0;         // a permutation of (batch, head, row, col), from the innermost
  int64_t step = 1;      // between neighbours of the innermost dimension
  int64_t gaps[4] = {};  // after the elements of each dimension
  int shared = -1;       // this dimension has stride `shared_stride`, so that elements overlap; -1: none
  int64_t shared_stride = 0;
  int64_t guard = 64;  // elements before the first one: its alignment

  TestTensor applied_to(const TestTensor& tensor) const;
};

// Bytes beyond these mean nothing. The byte `kEffortByte` says how large the problem may be.
constexpr size_t kMostBytes = 77, kEffortByte = 3;

enum class Form { dense, packed, paged, hostile };  // hostile: the numbers of packed sequences mean nothing

constexpr int kAllKernels = -1;

struct Input {
  Form form = Form::dense;
  PackedCase packed;  // a dense problem uses only `common`
  // Of query, key, value, attn_mask, grad_output, grad_lse, grad_weights; only of a dense problem.
  std::optional<Layout> layouts[7];
  int workers = 1;
  uint64_t shuffle = 0;      // seeds the order of tasks, and hostile numbers
  int kernel = kAllKernels;  // which of those that take the problem, counted around
  bool forward = true, backward = true;
  int64_t saved_keys = 0;  // whose weights the forward of a dense problem keeps for the backward
  bool again = true;       // run a dense problem twice: with its tasks in order, and shuffled

  const Case& common() const { return packed.common; }
};

Input parse(const uint8_t* data, size_t size);
std::string describe(const Input& input);
Built build(const Input& input);  // a dense problem, with gradients

}  // namespace scaledot::testing
