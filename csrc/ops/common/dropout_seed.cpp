#include "ops/common/dropout_seed.h"

#include <ATen/ops/randint.h>

#include <limits>

namespace scaledot {

OptionalTensor dropout_seed(const OptionalTensor& given, double dropout_p,
                            const std::optional<at::Generator>& generator, const Tensor& query) {
  if (given || dropout_p <= 0) return given;
  const c10::Device device = generator ? generator->device() : query.is_cuda() ? query.device() : c10::Device(at::kCPU);
  // draw_seed in python/scaledot/_seed.py has the same range.
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min(), kEnd = std::numeric_limits<int64_t>::max();
  return at::randint(kLowest, kEnd, {2}, generator, at::TensorOptions(at::kLong).device(device));
}

}  // namespace scaledot
