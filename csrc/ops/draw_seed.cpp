#include "ops/draw_seed.h"

#include <ATen/ops/randint.h>

#include <limits>

namespace scaledot {

OptionalTensor draw_seed(const OptionalTensor& given, double dropout_p, const std::optional<at::Generator>& generator,
                         const Tensor& query) {
  if (given || dropout_p <= 0) return given;
  const c10::Device device = generator ? generator->device() : query.is_cuda() ? query.device() : c10::Device(at::kCPU);
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, generator, at::TensorOptions(at::kLong).device(device));
}

}  // namespace scaledot
