// Which problems the kernels for Hopper can run.
#include "cuda/generic/config.h"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/backward_tiles.h"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

// With fewer rows and at least this many keys, a tile is mostly padding, and splitting the keys among blocks pays more.
constexpr int64_t kFewRows = 64, kManyKeys = 1024;
constexpr int64_t kMaxLength = int64_t(1) << 30;  // of the backward, whose positions are 32-bit integers

// Tiles of `size` rows, of all batch entries. `total` and `longest`: rows of all packed sequences, and of the longest.
int64_t most_tiles(const Problem& p, int64_t total, int64_t longest, int size) {
  return is_packed(p) ? most_packed_tiles(p, total, longest, size) : p.batch * ceil_div(longest, size);
}

const char* why_not_packed(const Problem& p, Pass pass) {
  if (is_quantised(p) && pass == Pass::backward) return "quantised keys and values have no backward";
  if (is_quantised(p) && (p.head_dim % 2 != 0 || p.value_dim % 2 != 0)) return "head_dim or value_dim is odd";
  if (is_paged(p) && pass == Pass::backward) return "keys and values in pages have no backward";
  if (is_paged(p) && p.pages.size % kSwizzleRows != 0) return "the rows of a page are not a multiple of 8";
  if (pass == Pass::backward && needs_general_backward(p))
    return "the sequences are packed, with attn_mask, softcap, ALiBi or dropout";
  if (pass == Pass::forward && needs_general_forward(p))
    return "the sequences are packed, with attn_mask, softcap, ALiBi, dropout or a scale that is not positive";
  return nullptr;
}

const char* why_not_forward(const Problem& p) {
  if (p.query_length < kFewRows && p.key_length >= kManyKeys)
    return "few rows over many keys: the keys are to be split among blocks";
  if (p.batch * p.heads * ceil_div(p.query_length, 2 * kWgmmaRows) > kMaxTiles)
    return "it would take more than 2^30 tiles";
  const int64_t all_keys = is_paged(p) ? p.batch * p.key_length : p.packed.total_k;
  if (p.kv_heads * most_tiles(p, all_keys, p.key_length, kPanelCols) > kMaxBlocks)
    return "it would take more than 2^31 - 1 blocks";
  const Problem all = with_all_rows(p);
  return why_no_tensor_map(all, p.output, p.heads, all.query_length, p.value_dim);
}

const char* why_not_backward(const Problem& p) {
  if (!p.grad_output.data) return "grad_output is absent";
  if (p.grad_weights.data) return "the weights have a gradient";
  if (sums_mask(p) && !p.grad_query.data && !p.grad_key.data && !p.grad_value.data)
    return "only the gradient of a broadcast attn_mask is asked for";
  const Problem all = with_all_rows(p);
  if (all.batch * p.heads * all.query_length == 0) return "there are no queries";
  if (max(all.query_length, all.key_length) > kMaxLength) return "there are more than 2^30 queries or keys";
  const Sm90BackwardTileSizes sizes = backward_tile_sizes(p);
  const int64_t row_tiles = most_tiles(p, p.packed.total_q, p.query_length, sizes.rows);
  const int64_t key_tiles = most_tiles(p, p.packed.total_k, p.key_length, sizes.keys);
  if (p.kv_heads * key_tiles + p.heads * row_tiles > kMaxBlocks) return "it would take more than 2^31 - 1 blocks";
  return why_no_tensor_map(all, p.grad_output, p.heads, all.query_length, p.value_dim);
}

}  // namespace

const char* sm90_why_not(const Problem& p, Pass pass) {
  if (has_blocks(p)) return "block_mask is given";
  if (is_quantised(p) && !is_packed(p)) return "keys and values are quantised, and the sequences are not packed";
  if (max(p.head_dim, p.value_dim) > kSm90MaxDim) return "head_dim or value_dim is above 256";
  if (p.head_dim == 0 || p.value_dim == 0) return "head_dim or value_dim is 0";
  const char* reason = is_packed(p) ? why_not_packed(p, pass) : nullptr;
  if (reason) return reason;
  const Problem all = with_all_rows(p), keys = with_all_keys(p);
  if (keys.batch * keys.key_length == 0) return "there are no keys";
  reason = why_no_tensor_map(all, p.query, p.heads, all.query_length, p.head_dim);
  if (!reason) reason = why_no_tensor_map(keys, keys.key, p.kv_heads, keys.key_length, p.head_dim);
  if (!reason) reason = why_no_tensor_map(keys, keys.value, p.kv_heads, keys.key_length, p.value_dim);
  if (reason) return reason;
  return pass == Pass::forward ? why_not_forward(p) : why_not_backward(p);
}

}  // namespace scaledot
