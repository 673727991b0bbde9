// The configuration and shared memory of the forward for sm_90. A block is one producer warpgroup, which starts copies,
// and two consumer warpgroups, which compute 64 rows of a tile each.
#pragma once

#include "core/softmax.h"
#include "cuda/sm90/config.h"
#include "cuda/sm90/forward_tiles.h"

namespace scaledot {

// Whether scores need more than the product and a range of keys.
inline bool needs_general_forward(const Problem& p) {
  return p.attn_mask.data || p.alibi_slopes.data || p.softcap > 0 || p.dropout_p > 0 ||
         !scale_folds_into_exp<float>(p.scale);
}

// kGeneral: scores need more than the product and a range of keys: a mask, ALiBi, softcap, dropout, or a scale that is
// not positive. Otherwise only positions mask them, and a score costs one multiply-add and one exp2.
// kPacked: packed sequences. kQuantised: with quantised keys and values. kCluster: how many blocks share their keys and
// values (1 or 2). These have neighbouring query tiles, and nothing may be masked by position.
template <class Storage_, int kDim_, int kValueDim_, bool kGeneral_, bool kPacked_ = false, bool kQuantised_ = false,
          int kCluster_ = 1>
struct Sm90ForwardConfig {
  using Storage = Storage_;
  static constexpr int kDim = kDim_;            // of queries and keys, padded
  static constexpr int kValueDim = kValueDim_;  // of values and the output, padded
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kPacked = kPacked_;
  static constexpr bool kQuantised = kQuantised_;
  static constexpr int kCluster = kCluster_;
  static constexpr Sm90ForwardTileSizes kSizes =
      sm90_forward_tile_sizes(kDim, kValueDim, kGeneral, kPacked, kQuantised);
  static constexpr int kConsumers = kSizes.consumers;
  static constexpr int kRows = kConsumers * kWgmmaRows;
  static constexpr int kKeys = kSizes.keys;
  static constexpr int kQueryStages = kSizes.query_stages;
  static constexpr int kStages = kSizes.stages;  // of K, and of V
  static constexpr int kStoredStages = kSizes.stored_stages;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr bool kPingPong = kSizes.ping_pong;
  static constexpr int kProducerRegisters = kSizes.producer_registers;
  static constexpr int kConsumerRegisters = kSizes.consumer_registers;
  static_assert(kValueDim <= kDim);  // the output takes the place of the queries or keys, and stored V that of stored K
  static_assert(kQueryStages > 1 || (kConsumers == 2 && kKeys >= kWgmmaRows && kStages == 2));
  static_assert(kPacked || !kQuantised);
  static_assert(kCluster == 1 || (!kGeneral && !kPacked));
  static_assert(fits_registers(kThreads, kConsumers, kProducerRegisters, kConsumerRegisters));
};

// Query tiles that the producer has drawn and the consumers have not finished.
constexpr int kTileSlots = 2;

// A query tile that was drawn, of packed sequences.
struct Sm90PackedSlot {
  Problem problem;  // of its sequence
  Sm90TileIndex tile;
  Sm90FirstRows first;
  float key_scale, value_scale;  // of quantised keys and values
};
template <bool kPacked>
struct Sm90PackedSlots {};
template <>
struct Sm90PackedSlots<true> {
  Sm90PackedSlot slots[kTileSlots];
};

// A tile of K or V as copies leave it, which has kCols columns: panels of 64 columns, of the tile itself or, if K and V
// are quantised, of bytes that are still to be widened.
template <class C, int kCols>
struct Sm90CopiedTile {
  static constexpr int kRowBytes = (C::kQuantised ? 1 : 2) * kPanelCols;  // of a panel
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kPanelBytes = C::kKeys * kRowBytes, kBytes = kPanels * kPanelBytes;
};

// Stages of quantised keys and values as they are stored, in the order in which they are used. All warps of the
// producer's warpgroup but the first one, which copies, widen them.
constexpr int kFirstWidenWarp = 1, kWidenWarps = 3;
template <class C, bool kQuantised>
struct Sm90StoredStages {};
template <class C>
struct Sm90StoredStages<C, true> {
  alignas(128) char data[C::kStoredStages][Sm90CopiedTile<C, C::kDim>::kBytes];
  uint64_t full[C::kStoredStages], empty[C::kStoredStages];
};

// 64 rows of the output.
template <class C>
using Sm90OutputTile = SwizzledTile<kWgmmaRows, C::kValueDim>;

template <class C>
struct Sm90ForwardShared {
  SwizzledTile<kWgmmaRows, C::kDim> query[C::kQueryStages][C::kConsumers];
  SwizzledTile<C::kKeys, C::kDim> key[C::kStages];
  SwizzledTile<C::kKeys, C::kValueDim> value[C::kStages];
  uint64_t query_full[C::kQueryStages];
  uint64_t query_empty;   // if there is one stage: a phase for each query tile, after its last scores
  uint64_t output_empty;  // a phase for each query tile, when the output of the one before has left
  uint64_t key_full[C::kStages], key_empty[C::kStages];
  uint64_t value_full[C::kStages], value_empty[C::kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  int32_t tile[kTileSlots];  // -1: no more
  Sm90PackedSlots<C::kPacked> packed;
  Sm90StoredStages<C, C::kQuantised> stored;
};

}  // namespace scaledot
