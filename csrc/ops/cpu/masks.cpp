#include "ops/cpu/masks.h"

#include <ATen/Parallel.h>

#include <vector>

#include "core/mask.h"
#include "core/philox.h"

namespace scaledot {
namespace {

// -slope * |distance| for every slope, row and key, in memory order.
template <class T>
void write_bias(const Problem& p, T* bias) {
  std::vector<uint8_t> states(size_t(p.key_length));
  for (int64_t head = 0; head < p.heads; ++head) {
    for (int64_t i = 0; i < p.query_length; ++i, bias += p.key_length) {
      row_terms<T>(p, 0, head, i, {0, p.key_length}, bias, states.data());
    }
  }
}

}  // namespace

void write_attends_cpu(const Problem& p, bool* row) {
  for (int64_t i = 0; i < p.query_length; ++i, row += p.key_length) {
    for (int64_t j = 0; j < p.key_length; ++j) row[j] = attends(p, i, j);
  }
}

void write_bias_cpu(const Problem& p, void* bias, DType dtype) {
  if (dtype == DType::float64) {
    write_bias(p, static_cast<double*>(bias));
  } else {
    write_bias(p, static_cast<float*>(bias));
  }
}

void write_dropout_mask_cpu(const Problem& p, bool* keep) {
  const int64_t grain = 1 + 32768 / max<int64_t>(p.key_length, 1);  // rows; as torch's own grain, in elements
  at::parallel_for(0, p.batch * p.heads * p.query_length, grain, [&](int64_t begin, int64_t end) {
    uint8_t group[kDropoutGroup];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t plane = r / p.query_length;
      const DropoutRow row = dropout_row(p, plane / p.heads, plane % p.heads, r % p.query_length);
      for (int64_t column = 0; column < p.key_length; column += kDropoutGroup) {
        dropout_keep_group(row, column / kDropoutGroup, group);
        const int64_t count = min<int64_t>(kDropoutGroup, p.key_length - column);
        for (int64_t k = 0; k < count; ++k) keep[r * p.key_length + column + k] = group[k] != 0;
      }
    }
  });
}

}  // namespace scaledot
