// The kernels "amx_bf16", "amx_bf16_decode" and "amx_bf16_key_lists": bfloat16 products by tdpbf16ps, on tiles of 16 x
// 16 sums.
#include "cpu/simd/isa/amx_bf16.h"

#include "cpu/simd/attention/decode_tiles.h"
#include "cpu/simd/attention/kernel.h"
#include "cpu/simd/attention/key_list_tiles.h"
#include "cpu/simd/attention/key_lists.h"
#include "cpu/simd/tile_unit.h"

namespace scaledot {
namespace {

// With fewer rows that share a KV head, avx512_decode is faster than the tiled kernel, and in the backward avx512_bf16:
// a tile of the unit has 16 rows. (Time of avx512_decode / of the tiled kernel at 4 rows: 0.57 to 0.92; at 5 rows: 1.06
// to 1.43, 512 and 4,096 keys, head_dim 64 and 128. Intel Xeon with AMX.)
constexpr int64_t kLeastForwardRows = 5, kLeastBackwardRows = 8;

// With one row, or few keys for the rows, amx_bf16_decode does not pay. (Its time / that of the fastest other kernel: 1
// row 1.09 to 1.2. 2 to 32 rows, 4,096 keys, head_dim 64 to 256: 0.65 to 0.92. 16 rows: 1.25 at 64 keys, 0.93 at 200,
// 0.8 at 512; 32 rows, 512 keys: 0.97. Intel Xeon with AMX.)
constexpr int64_t kLeastDecodeRows = 2, kLeastDecodeKeys = 128, kLeastKeysPerRow = 16;

// Query heads that share a list and a KV head.
constexpr int64_t kLeastListHeads = kListHeadsAtOnce;

// The query rows that share a KV head.
int64_t shared_rows(const Problem& p) { return p.kv_heads > 0 ? p.heads / p.kv_heads * p.query_length : 0; }

const char* why_not_tiles(const Problem& p, Pass pass) {
  if (const char* reason = why_not_bf16_pairs_at<Capability::amx_bf16>(p, pass)) return reason;
  static_assert(kLeastForwardRows == 5 && kLeastBackwardRows == 8);
  const int64_t rows = shared_rows(p);
  if (pass == Pass::forward)
    return rows < kLeastForwardRows && !p.row_invariant ? "fewer than 5 query rows share a KV head" : nullptr;
  return rows < kLeastBackwardRows ? "fewer than 8 query rows share a KV head" : nullptr;
}

const char* why_not_decode_tiles(const Problem& p, Pass pass) {
  if (const char* reason = why_not_decode_at<Capability::amx_bf16>(p, pass)) return reason;
  if (pass == Pass::backward) return "it has no backward";
  if (p.dtype != DType::bfloat16) return "the dtype is not bfloat16";
  if (is_quantised(p)) return "keys and values are quantised";
  static_assert(kLeastDecodeRows == 2 && kLeastDecodeKeys == 128 && kLeastKeysPerRow == 16);
  const int64_t rows = shared_rows(p);
  if (rows < kLeastDecodeRows) return "one query row has a KV head of its own";
  if (p.key_length < max(kLeastDecodeKeys, kLeastKeysPerRow * rows))
    return "there are fewer than 128 keys, or than 16 for each query row that shares a KV head";
  return nullptr;
}

const char* why_not_list_tiles(const Problem& p, Pass pass) {
  if (const char* reason = why_not_key_lists_at<Capability::amx_bf16>(p, pass)) return reason;
  if (p.dtype != DType::bfloat16) return "the dtype is not bfloat16";
  static_assert(kLeastListHeads == 4);
  const int64_t heads = p.kv_heads > 0 ? min(p.heads_per_list, p.heads / p.kv_heads) : 0;
  return heads < kLeastListHeads ? "fewer than 4 query heads share a list and a KV head" : nullptr;
}

int64_t decode_tiles_workspace(const Problem& p, Pass, int workers) {
  Arena arena = {nullptr, 0};
  plan_decode<float>(p, workers, arena);
  return arena.used;
}

}  // namespace

extern const Kernel kAmxBf16Kernel = {"amx_bf16", why_not_tiles, tiled_workspace<Bf16PairOperands>,
                                      with_state<tiled_forward<Bf16PairOperands>, TileUnit>,
                                      with_state<tiled_backward<Bf16PairOperands>, TileUnit>};
extern const Kernel kAmxBf16DecodeKernel = {"amx_bf16_decode", why_not_decode_tiles, decode_tiles_workspace,
                                            with_state<decode_pass<DecodeTileProducts, float>>, nullptr};
extern const Kernel kAmxBf16KeyListsKernel = {"amx_bf16_key_lists", why_not_list_tiles,
                                              list_workspace<ListTileProducts, float>,
                                              with_state<list_forward<BFloat16, ListTileProducts>, TileUnit>,
                                              with_state<list_backward<BFloat16, ListTileProducts>, TileUnit>};

}  // namespace scaledot
