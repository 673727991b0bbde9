// The configuration and shared memory of the backward for sm_90.
//
// A block computes grad_key and grad_value of kKeys keys. Two consumer warpgroups visit the tiles of kRows rows that
// may attend to any of the keys. Each computes the scores of 64 of the keys, kScoreRows of the rows at a time. In a
// third warpgroup, one warp loads tiles, and another adds to grad_query in global memory.
#pragma once

#include "cuda/sm90/config.h"

namespace scaledot {

// The numbers of a row that the backward reads with its query, for general scores: P = exp(score - offset - log_sum),
// as in SplitLse, for scores that may be large. dS = P (dP - delta).
struct alignas(16) Sm90RowStatistics {
  float delta, offset, log_sum;
};

// The numbers of a tile of rows. Arrays of rows are padded to whole tiles.
template <bool kGeneral, int kRows>
struct alignas(16) Sm90TileStatistics {
  Sm90RowStatistics row[kRows];
};
// Plain scores: P = 2^(score / log 2 - lse2) with lse2 = lse / log 2. A row's numbers are at statistics_place(row).
template <int kRows>
struct alignas(16) Sm90TileStatistics<false, kRows> {
  float lse2[kRows], delta[kRows];
};

// kGeneral: scores need more than the product and a range of keys, or there is dropout.
// kPacked: packed sequences.
template <class Storage_, int kDim_, int kValueDim_, bool kGeneral_, bool kPacked_ = false>
struct Sm90BackwardConfig {
  using Storage = Storage_;
  static constexpr int kDim = kDim_;            // of queries and keys
  static constexpr int kValueDim = kValueDim_;  // of values and grad_output
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kPacked = kPacked_;
  static constexpr Sm90BackwardTileSizes kSizes = sm90_backward_tile_sizes(kDim, kValueDim);
  static constexpr bool kWide = kSizes.wide;
  static constexpr int kConsumers = kSizes.consumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRows = kSizes.rows, kKeys = kSizes.keys;
  using Statistics = Sm90TileStatistics<kGeneral, kRows>;
  static constexpr int kScoreRows = kWide ? kRows / kConsumers : 64;
  static constexpr int kRowParts = kWide ? 1 : kRows / kScoreRows;  // one after the other
  static constexpr int kScores = kScoreRows / 2;                    // scores of a thread
  static constexpr int kQueryStages = kSizes.query_stages, kGradStages = kSizes.grad_output_stages;
  // As many columns of queries and keys as two warpgroups have whole panels of.
  static constexpr int kPaddedDim = kWide ? kSm90MaxDim : kDim;
  // A warpgroup computes 64 rows of grad_query, or half of the columns. The columns that it computes, and those of each
  // of the parts in which they leave:
  static constexpr bool kSplitsRows = kRows > kWgmmaRows;
  static_assert(kRows == (kSplitsRows ? kConsumers : 1) * kWgmmaRows);
  static constexpr int kGradQueryCols = kSplitsRows ? kDim : kPaddedDim / kConsumers;
  static constexpr int kGradQueryParts = kSizes.grad_query_parts;
  static constexpr int kGradQueryPartCols = kGradQueryCols / kGradQueryParts;
  // The columns of the last warpgroup's last part that are not padding.
  static constexpr int kLastPartCols = kGradQueryPartCols - (kPaddedDim - kDim);
  static_assert(kLastPartCols > 0);
  static constexpr int kProducerRegisters = kSizes.producer_registers;
  static constexpr int kConsumerRegisters = kSizes.consumer_registers;
  static_assert(fits_registers(kThreads, kConsumers, kProducerRegisters, kConsumerRegisters));
};

struct alignas(16) Sm90RowPosition {
  int32_t live_begin, live_end;  // the keys that the row may attend to by position
  int32_t aligned;
  float slope;
  int64_t mask_start, grad_mask_start;  // of the row in attn_mask and in grad_mask, in elements
};

// Which scores of a tile are not masked by position: element (row, key) is live if low <= key - row <= high, row < rows
// and key < keys.
struct LiveBand {
  int low, high, rows, keys;
};

// The work of one block: a tile of keys, for all tiles of rows of all query heads that share them. Nothing if `tile`
// is -1.
struct Sm90BackwardTask {
  int batch, kv_head, tile;
  int first_row_tile, end_row_tile;
  int first_head, end_head;
  LiveBand band;             // of row tile 0
  int row_tiles, key_tiles;  // of the head
  int64_t first_number;      // of the batch entry's first row tile, among those of all (batch, head) pairs
  Sm90FirstRows first;
};

// The problem of a block's packed sequence.
template <bool kPacked>
struct Sm90SequenceProblem {};
template <>
struct Sm90SequenceProblem<true> {
  Problem problem;
};

template <class C>
struct alignas(1024) Sm90BackwardShared {
  typename C::Storage key[C::kKeys * C::kPaddedDim];
  typename C::Storage value[C::kKeys * C::kValueDim];
  typename C::Storage query[C::kQueryStages][C::kRows * C::kPaddedDim];
  typename C::Storage grad_output[C::kGradStages][C::kRows * C::kValueDim];
  // Panels of 64 rows: 128 bytes for every key, swizzled. Narrow: dX^T of this row tile and of the last one. Wide: Pd^T
  // of both, and dX^T.
  typename C::Storage scores[C::kWide ? 3 : 2][C::kKeys * C::kRows];
  float grad_query[C::kConsumers][kWgmmaRows * C::kGradQueryPartCols];
  typename C::Statistics statistics[C::kQueryStages];
  Sm90RowPosition positions[C::kGeneral ? C::kQueryStages : 1][C::kGeneral ? C::kRows : 1];
  uint8_t keep_mask[C::kGeneral ? C::kConsumers : 1][C::kGeneral ? C::kRows * 16 : 16];
  uint64_t query_full[C::kQueryStages], query_empty[C::kQueryStages];  // and of statistics and positions
  uint64_t grad_full[C::kGradStages], grad_empty[C::kGradStages], loaded;
  Sm90BackwardTask task;
  Sm90SequenceProblem<C::kPacked> packed;
};

}  // namespace scaledot
