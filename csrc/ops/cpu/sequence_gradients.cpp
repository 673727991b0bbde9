#include "ops/cpu/sequence_gradients.h"

#include <c10/core/CPUAllocator.h>

#include "core/varlen.h"

namespace scaledot {
namespace {

// Heads with their own gradient.
int64_t stored_heads(const Problem& p) { return p.grad_relative_bias.head_stride ? p.heads : 1; }

}  // namespace

SequenceGradients::SequenceGradients(const Problem& packed)
    : packed_(packed), wanted_(packed.grad_relative_bias.data), first_{0} {
  for (int64_t b = 0; wanted_ && b < packed.batch; ++b) {
    const Problem p = sequence(packed, b);
    first_.push_back(first_.back() + (has_scores(p) ? stored_heads(p) * relative_entries(p) : 0));
  }
}

void SequenceGradients::allocate() {
  if (wanted_) memory_ = c10::GetCPUAllocator()->allocate(size_t(bytes()));
}

char* SequenceGradients::own(int64_t b) const {
  return static_cast<char*>(memory_.get()) + first_[size_t(b)] * element_size(packed_.grad_relative_bias.dtype);
}

void SequenceGradients::place(int64_t b, Problem& p) const {
  if (!wanted_) return;
  p.grad_relative_bias.data = own(b);
  if (p.grad_relative_bias.head_stride) p.grad_relative_bias.head_stride = relative_entries(p);
}

template <class T>
void SequenceGradients::sum_as() const {
  for (int64_t b = 0; b < packed_.batch; ++b) {
    const Problem p = sequence(packed_, b);
    if (!has_scores(p)) continue;
    const T* from = reinterpret_cast<const T*>(own(b));
    for (int64_t head = 0; head < stored_heads(p); ++head, from += relative_entries(p)) {
      T* to = element_ptr<T>(p, p.grad_relative_bias, 0, head);
      for (int64_t e = 0; e < relative_entries(p); ++e) to[e] += from[e];
    }
  }
}

void SequenceGradients::sum() const {
  if (!wanted_) return;
  packed_.grad_relative_bias.dtype == DType::float64 ? sum_as<double>() : sum_as<float>();
}

}  // namespace scaledot
