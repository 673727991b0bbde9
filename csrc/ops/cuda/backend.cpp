// The ops on CUDA, in every build: the GPU kernels are looked up when they are called. Nothing here includes a header
// of CUDA or of torch's CUDA side, so the library loads under CPU and CUDA torch alike. Nothing waits for the device:
// the numbers in cu_seq_q, cu_seq_k, seqused_k and block_table are not read here.
#include <ATen/ops/empty_strided.h>

#include "ops/common/checks.h"
#include "ops/common/explain_json.h"
#include "ops/common/op_namespace.h"
#include "ops/cuda/run.h"
#include "ops/registration/register_backend.h"
#include "ops/registration/unsupported.h"

namespace scaledot {
namespace {

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  return at::empty_strided(sizes, strides, at::TensorOptions(type).device(device));
}

void require_cuda(const Tensor& tensor, const char* name) {
  if (tensor.is_cuda() && !cuda_library())
    refuse_device(tensor, name, "cpu",
                  "move it with " + std::string(name) +
                      ".cpu(), or build scaledot from source where nvcc is found: `SCALEDOT_CUDA=1 pip install .`");
}

// Kernels read the seed on the device. A seed on the CPU is copied there, without waiting for the device.
OptionalTensor seed_on_device(const OptionalTensor& seed, c10::Device device) {
  const Tensor* given = present(seed);
  return given ? OptionalTensor(given->to(device, at::kLong, /*non_blocking=*/true).contiguous()) : std::nullopt;
}

void explain_cuda(std::ostringstream& json, const Problem& problem, Pass pass, c10::Device device) {
  const CudaLibrary& library = cuda_library_for(device);
  const CurrentDevice current(library, device);
  const DeviceKernel& chosen = choose_cuda(library, problem, pass);
  explain_pass(json, library.kernels(), chosen, chosen.workspace(problem, pass), problem, pass);
}

// One kernel takes all sequences, whatever their lengths.
void explain_packed_cuda(std::ostringstream& json, const Problem& packed, Pass pass, c10::Device device) {
  const CudaLibrary& library = cuda_library_for(device);
  const CurrentDevice current(library, device);
  SequenceChoices choices;
  int64_t workspace_bytes = 0;
  if (has_scores(packed)) {
    const DeviceKernel& chosen = choose_cuda(library, packed, pass);
    choices.add(library.kernels(), chosen, packed, pass, packed.batch);
    workspace_bytes = chosen.workspace(packed, pass);
  }
  choices.write(json, workspace_bytes, pass);
}

// Queues a function of CudaLibrary that writes a tensor, on torch's current stream.
template <auto write, class... Arguments>
void write_cuda(const Problem& p, Arguments... arguments, c10::Device device) {
  const CudaLibrary& library = cuda_library_for(device);
  check_launch((library.*write)(p, arguments..., CurrentDevice(library, device).stream()));
}

}  // namespace

extern const Backend kCudaBackend = {
    .device = "cuda",
    .capability = [] { return kCudaStatus; },
    .require_kernels = &require_cuda,
    .empty = &empty,
    .seed = &seed_on_device,
    .run = &run_cuda,
    .explain = &explain_cuda,
    .explain_packed = &explain_packed_cuda,
    .write_attends = &write_cuda<&CudaLibrary::write_attends, bool*>,
    .write_bias = &write_cuda<&CudaLibrary::write_bias, void*, DType>,
    .write_dropout_mask = &write_cuda<&CudaLibrary::write_dropout_mask, bool*>,
};

SCALEDOT_LIBRARY_IMPL(CUDA, m) { register_backend<kCudaBackend>(m); }

}  // namespace scaledot
