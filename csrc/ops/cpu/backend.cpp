// The ops on the CPU.
#include <ATen/EmptyTensor.h>

#include "core/saved.h"
#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/cpu/explain.h"
#include "ops/cpu/large_pages.h"
#include "ops/cpu/masks.h"
#include "ops/cpu/run.h"
#include "ops/registration/register_backend.h"

namespace scaledot {
namespace {

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device) {
  Tensor result(at::detail::empty_strided_cpu(sizes, strides, type));
  prefer_large_pages(result.mutable_data_ptr(), int64_t(result.nbytes()));
  return result;
}

OptionalTensor contiguous_seed(const OptionalTensor& seed, c10::Device) {
  const Tensor* given = present(seed);
  return given ? OptionalTensor(given->contiguous()) : std::nullopt;
}

}  // namespace

extern const Backend kCpuBackend = {
    .device = "cpu",
    .capability = &cpu_capability,
    .empty = &empty,
    .saves_softmax = true,
    .sums_packed_mask = true,
    .keys_without_output_low = kSavedTile,
    .seed = &contiguous_seed,
    .run = [](const Problem& p, Pass pass, c10::Device) { run_cpu(p, pass); },
    .explain = [](std::ostringstream& json, const Problem& p, Pass pass, c10::Device) { explain_cpu(json, p, pass); },
    .explain_packed = [](std::ostringstream& json, const Problem& p, Pass pass,
                         c10::Device) { explain_packed_cpu(json, p, pass); },
    .write_attends = [](const Problem& p, bool* attends, c10::Device) { write_attends_cpu(p, attends); },
    .write_bias = [](const Problem& p, void* bias, DType dtype, c10::Device) { write_bias_cpu(p, bias, dtype); },
    .write_dropout_mask = [](const Problem& p, bool* keep, c10::Device) { write_dropout_mask_cpu(p, keep); },
};

SCALEDOT_LIBRARY_IMPL(CPU, m) { register_backend<kCpuBackend>(m); }
// Meta tensors stand for tensors that do not fit in memory: explain() answers for the CPU.
SCALEDOT_LIBRARY_IMPL(Meta, m) { register_explanations<kCpuBackend>(m); }

}  // namespace scaledot
