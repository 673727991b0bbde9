// The kernel "amx_bf16": bfloat16 products by tdpbf16ps, on tiles of 16 x 16 sums.
#include "cpu/simd/isa/amx_bf16.h"

#include "cpu/simd/attention/kernel.h"
#include "cpu/simd/tile_unit.h"

namespace scaledot {
namespace {

// With fewer rows that share a KV head, the decode kernel is faster, and in the backward avx512_bf16: a tile of the
// unit has 16 rows. (Time of the decode kernel / of this one at 4 rows: 0.57 to 0.92; at 5 rows: 1.06 to 1.43, 512 and
// 4,096 keys, head_dim 64 and 128. Intel Xeon with AMX.)
constexpr int64_t kLeastForwardRows = 5, kLeastBackwardRows = 8;

const char* why_not_tiles(const Problem& p, Pass pass) {
  if (const char* reason = why_not_bf16_pairs_at<Capability::amx_bf16>(p, pass)) return reason;
  static_assert(kLeastForwardRows == 5 && kLeastBackwardRows == 8);
  const int64_t rows = p.kv_heads > 0 ? p.heads / p.kv_heads * p.query_length : 0;
  if (pass == Pass::forward)
    return rows < kLeastForwardRows && !p.row_invariant ? "fewer than 5 query rows share a KV head" : nullptr;
  return rows < kLeastBackwardRows ? "fewer than 8 query rows share a KV head" : nullptr;
}

// The passes of tiled_kernel, with the tile unit configured for each task.
template <void (*kPass)(const Problem&, const Executor&)>
void with_tile_unit(const Problem& p, const Executor& executor) {
  const TileUnitExecutor with_unit(executor);
  kPass(p, with_unit.executor());
}

}  // namespace

extern const Kernel kAmxBf16Kernel = {"amx_bf16", why_not_tiles, tiled_workspace<Bf16PairOperands>,
                                      with_tile_unit<tiled_forward<Bf16PairOperands>>,
                                      with_tile_unit<tiled_backward<Bf16PairOperands>>};

}  // namespace scaledot
