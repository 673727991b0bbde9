// What the kernels for Hopper take.
#include "cuda/generic/generic.h"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/config.h"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

constexpr bool kCompiled =
#if defined(SCALEDOT_SM90A)
    true;
#else
    false;
#endif

// So few rows that a tile is mostly padding, and so many keys that splitting them among blocks is worth more.
constexpr int64_t kFewRows = 64, kManyKeys = 1024;

const char* why_not_shape(const Problem& p) {
  if (p.dtype != DType::bfloat16 && p.dtype != DType::float16) return "query is neither bfloat16 nor float16";
  if (larger(p.head_dim, p.value_dim) > kSm90MaxDim) return "head_dim or value_dim is above 256";
  if (p.head_dim == 0 || p.value_dim == 0) return "head_dim or value_dim is 0";
  if (p.key_length == 0) return "there are no keys";
  if (p.query_length < kFewRows && p.key_length >= kManyKeys)
    return "few rows over many keys: the keys are to be split among blocks";
  if (p.batch * p.heads * ceil_div(p.query_length, 2 * kConsumerRows) > kMaxTiles)
    return "it would take more than 2^30 tiles";
  if (p.batch * p.kv_heads * ceil_div(p.key_length, kPanelCols) > kMaxBlocks)
    return "it would take more than 2^31 - 1 blocks";
  return nullptr;
}

}  // namespace

const char* sm90_why_not(const Problem& p, Pass pass) {
  if (!kCompiled) return "the library was built without sm_90a";
  if (pass == Pass::backward) return "it has no backward of its own";
  if (const char* reason = why_not_shape(p)) return reason;
  const char* reason = why_no_tensor_map(p, p.query, p.heads, p.query_length, p.head_dim);
  if (!reason) reason = why_no_tensor_map(p, p.key, p.kv_heads, p.key_length, p.head_dim);
  if (!reason) reason = why_no_tensor_map(p, p.value, p.kv_heads, p.key_length, p.value_dim);
  if (!reason) reason = why_no_tensor_map(p, p.output, p.heads, p.query_length, p.value_dim);
  if (reason) return reason;
  if (device_traits().capability != 90) return "the GPU's compute capability is not 9.0";
  return nullptr;
}

}  // namespace scaledot
