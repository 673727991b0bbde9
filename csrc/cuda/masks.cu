#include "cuda/masks.h"

#include "core/mask.h"
#include "core/philox.h"
#include "cuda/ptx/launch.h"
#include "cuda/ptx/memory.h"

namespace scaledot {
namespace {

constexpr int kMaskThreads = 256;
constexpr int64_t kMaskBlocks = 65536;

// A grid-stride loop: the threads of the grid together call body(index) for every index below `count`.
template <class Body>
SCALEDOT_DEVICE void for_each_index(int64_t count, const Body& body) {
  for (int64_t k = block_index() * kMaskThreads + thread_index(); k < count; k += block_count() * kMaskThreads) body(k);
}

SCALEDOT_KERNEL(kMaskThreads) attends_kernel(SCALEDOT_PARAM Problem p, bool* out) {
  for_each_index(p.query_length * p.key_length,
                 [&](int64_t k) { global_store(out + k, attends(p, k / p.key_length, k % p.key_length)); });
}

template <class T>
SCALEDOT_KERNEL(kMaskThreads)
bias_kernel(SCALEDOT_PARAM Problem p, T* out) {
  for_each_index(p.heads * p.query_length * p.key_length, [&](int64_t k) {
    const int64_t row = k / p.key_length;
    T additive;
    key_terms(p, row_mask<T>(p, 0, row / p.query_length, row % p.query_length), k % p.key_length, T(0), additive);
    global_store(out + k, additive);
  });
}

SCALEDOT_KERNEL(kMaskThreads) dropout_kernel(SCALEDOT_PARAM Problem p, bool* out) {
  for_each_index(p.batch * p.heads * p.query_length * p.key_length, [&](int64_t k) {
    const int64_t row = k / p.key_length, batch_head = row / p.query_length;
    const DropoutRow stream = dropout_row(p, batch_head / p.heads, batch_head % p.heads, row % p.query_length);
    global_store(out + k, dropout_keeps(stream, k % p.key_length));
  });
}

int64_t blocks_for(int64_t count) { return min(ceil_div(count, kMaskThreads), kMaskBlocks); }

}  // namespace

const char* write_attends(const Problem& p, bool* attends, DeviceStream stream) {
  return launch(attends_kernel, blocks_for(p.query_length * p.key_length), kMaskThreads, 0, stream, p, attends);
}

const char* write_bias(const Problem& p, void* bias, DType dtype, DeviceStream stream) {
  const int64_t blocks = blocks_for(p.heads * p.query_length * p.key_length);
  if (dtype == DType::float64)
    return launch(bias_kernel<double>, blocks, kMaskThreads, 0, stream, p, static_cast<double*>(bias));
  return launch(bias_kernel<float>, blocks, kMaskThreads, 0, stream, p, static_cast<float*>(bias));
}

const char* write_dropout_mask(const Problem& p, bool* keep_mask, DeviceStream stream) {
  return launch(dropout_kernel, blocks_for(p.batch * p.heads * p.query_length * p.key_length), kMaskThreads, 0, stream,
                p, keep_mask);
}

}  // namespace scaledot
