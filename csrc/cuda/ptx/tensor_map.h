// Tensor maps, which describe tensors to the copy engine, made on the host (CUDA driver API, "Tensor Map Object
// Management").
#pragma once

#include "core/number.h"
#include "cuda/ptx/launch.h"
#include "cuda/ptx/tma.h"

#if defined(__CUDACC__)
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>
#endif

namespace scaledot {

// A tensor of 16-bit elements, dimensions innermost first. Strides are in bytes. The first is one element; the others
// and the address are multiples of 16.
struct TensorShape {
  const void* data;
  DType dtype;
  int64_t size[4];
  int64_t stride[4];
  int32_t box[4];
};

constexpr int64_t kMaxTensorSize = int64_t(1) << 31;    // coordinates are signed 32-bit integers
constexpr int64_t kMaxTensorStride = int64_t(1) << 40;  // bytes

#if defined(__CUDACC__)

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Looks the driver's function up, once: so nothing links libcuda. Returns nullptr, or an error message.
static inline const char* find_encode_tensor_map(EncodeTensorMap& encode) {
  static std::atomic<void*> known = nullptr;
  void* entry = known.load(std::memory_order_relaxed);
  if (!entry) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (const char* error = message_of(status)) return error;
    if (found != cudaDriverEntryPointSuccess || !entry) return "the driver has no cuTensorMapEncodeTiled";
    known.store(entry, std::memory_order_relaxed);
  }
  encode = reinterpret_cast<EncodeTensorMap>(entry);
  return nullptr;
}

// Returns nullptr, or an error message.
static inline const char* encode_tensor_map(TensorMap& map, const TensorShape& t) {
  EncodeTensorMap encode;
  if (const char* error = find_encode_tensor_map(encode)) return error;
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4], step[4];
  for (int d = 0; d < 4; ++d) {
    size[d] = cuuint64_t(t.size[d]);
    box[d] = cuuint32_t(t.box[d]);
    step[d] = 1;
    if (d > 0) stride[d - 1] = cuuint64_t(t.stride[d]);
  }
  CUtensorMap made;
  const CUresult result =
      encode(&made, t.dtype == DType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(t.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             t.box[0] == kSwizzleCols ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return "cuTensorMapEncodeTiled refused a tensor";
  static_assert(sizeof(made) == sizeof(map));
  memcpy(&map, &made, sizeof(map));
  return nullptr;
}

#else

static inline const char* encode_tensor_map(TensorMap& map, const TensorShape& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return "encode_tensor_map: misaligned tensor";
  map.data = t.data;
  for (int d = 0; d < 4; ++d) {
    if (t.size[d] < 1 || t.size[d] > kMaxTensorSize) return "encode_tensor_map: not a size";
    if (t.box[d] < 1 || t.box[d] > 256) return "encode_tensor_map: not a box";
    if (d > 0 && (t.stride[d] % 16 != 0 || t.stride[d] < 0 || t.stride[d] >= kMaxTensorStride))
      return "encode_tensor_map: not a stride";
    map.size[d] = t.size[d], map.stride[d] = t.stride[d], map.box[d] = t.box[d];
  }
  return t.box[0] > kSwizzleCols || t.box[0] % 8 != 0 ? "encode_tensor_map: not a box" : nullptr;
}

#endif

}  // namespace scaledot
