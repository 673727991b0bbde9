// The tile sizes of all CUDA kernels, with the reason for each number.
//
// A tile is a number of query rows by a number of keys. The configurations (generic/config.h, sm90/forward_config.h,
// sm90/backward_config.h) take every size from here and derive the rest.
#pragma once

#include <cstdint>

namespace scaledot {

// ---------------------------------------------------------------------------------------------------- generic
// Query, key, value and grad_output are held in shared memory in panels of 64 or 128 columns (the template arguments in
// generic/{bf16,fp16,fp32,fp64}.cu: the first panel that holds head_dim and value_dim, or the last).
//
//   bytes an element   panel   tile      reason
//   2                  64      64 x 64
//   2                  128     64 x 64   256 bytes a panel row: the backward's four panels and its scores take 77 KiB
//   4                  64      64 x 64   the same bytes a panel row
//   4                  128     32 x 32   64 rows of 512 bytes, four times, would exceed the 99 KiB that every GPU from
//   8                  64      32 x 32   sm_80 on gives a block
constexpr int generic_tile_side(int element_bytes, int panel_columns) {
  return element_bytes * panel_columns <= 256 ? 64 : 32;
}

// The panel of the kernels that only compute scores, whatever head_dim is: the widest that does not make their tiles
// smaller. They have two panels in shared memory, not four.
constexpr int generic_scores_panel(int element_bytes) { return element_bytes == 2 ? 128 : 64; }

constexpr int kMmaRows = 16;  // m of mma.m16n8k16: the rows of a tile that one warp computes

// Decode in 16 bits: the forward of few rows. It has to keep about 40 KiB in flight on each multiprocessor of an
// H200. A block is one warp, which waits for no other. Tiles of 16 keys would repeat a tile's fixed work more often; 64
// keys would take too many registers and leave fewer warps.
//
//   stored bytes   panel   shared memory   blocks that share a multiprocessor's 227 KiB and its registers
//   2              64      13 KiB          12, with 168 registers a thread: 16 blocks would leave 128
//   2              128     24 KiB          8
//   1              64      10 KiB          12
//   1              128     17 KiB          12
// A KV group has at most two tiles of rows, whose blocks read the same keys side by side.
constexpr int kMaxDecodeRows = 2 * kMmaRows;
constexpr int kDecodeKeys = 32;
constexpr int decode_blocks(int stored_bytes, int panel_columns) {
  return stored_bytes * panel_columns >= 256 ? 8 : 12;
}
constexpr int64_t kDecodeBlocks = 2048;  // fewer do not fill a GPU: then the keys are split

// Warps that share a row of a tile. The forward has one, so that a row's maximum never leaves its warp. The backward
// needs no maximum; two warps halve the accumulators that each thread holds.
constexpr int kForwardColumnWarps = 1, kBackwardColumnWarps = 2;

constexpr int64_t kTargetBlocks = 256;  // fewer blocks do not fill a GPU: then a long row of keys is split
constexpr int64_t kMinSplitTiles = 8;   // key tiles of a split, at least: each split costs a partial result
constexpr int64_t kMergeBlocks = 2048;  // that merge them: as many as there is room for on 132 multiprocessors

// ---------------------------------------------------------------------------------------------------- sm_90
// A block is one producer warpgroup and two or three consumer warpgroups. All 384 threads start with 168 registers
// (65536 / 384, rounded down to a multiple of 8); setmaxnreg then moves them from the producer to the consumers, and
// the sum over the three warpgroups must not exceed 3 x 168 = 504. With three consumers it is 4 x 128 = 512.
constexpr int kSm90MaxDim = 256;  // n of the widest wgmma: O of one warpgroup is one accumulator
constexpr int kWgmmaRows = 64;    // m of wgmma: the rows that one warpgroup computes
constexpr int kPanelCols = 64;    // of a panel in shared memory: 128 bytes, the span of the widest swizzle

struct Sm90ForwardTileSizes {
  int consumers;  // warpgroups with 64 rows each
  int keys;
  int query_stages;                            // of Q; two: the output leaves through them, too
  int stages;                                  // of K, and of V
  bool ping_pong;                              // one consumer computes its softmax while the other has the tensor cores
  int stored_stages;                           // of quantised keys and values as they are stored
  int producer_registers, consumer_registers;  // of a thread
};

// Registers of a consumer thread for S, P and O (keys / 2 + keys / 4 + value_dim / 2), and shared memory for the stages
// of Q and two stages of K and V. `general`: scores with masks, ALiBi, softcap or dropout (Sm90ForwardConfig).
// `packed`: packed sequences, which take 5 KiB more for their problems. `quantised`: packed sequences with quantised
// keys and values, of which a tile or two are also in shared memory as they are stored. Where the table has no row they
// are as the others.
//
//   head_dim   value_dim   general   rows x keys   registers  Q  shared memory
//   64         64          no        192 x 128     128        2   112 KiB    the softmax takes longer: a third consumer
//   64         64          packed    192 x  80      92        2    93 KiB    finding the sequence takes registers
//   64         64          yes       128 x 128     128        2    96 KiB    a mask's terms: 160 registers are too few
//   128        128         no        128 x 128     160        2   192 KiB
//   128        128         quantised 128 x 128     160        1   197 KiB    two stages of Q do not fit
//   128        128         yes       128 x  64     112        2   128 KiB    a mask's terms, and S, P and O
//   192        128         no        128 x 128     160        1   208 KiB    as for 128: only Q K^T is longer
//   192        128         quantised 128 x  80     124        1   183 KiB    128 keys do not fit
//   192        128         yes       128 x  64     112        2   176 KiB    as for 128
//   256        256         no        128 x  80     188        1   224 KiB    as many keys as fit into 227 KiB
//   256        256         packed    128 x  64     176        1   197 KiB    80 keys do not fit
//   256        256         quantised 128 x  64     176        1   213 KiB    one stored tile: two do not fit
//   256        256         yes       128 x  64     176        1   192 KiB    as for 128
constexpr Sm90ForwardTileSizes sm90_forward_tile_sizes(int head_dim, int value_dim, bool general, bool packed,
                                                       bool quantised) {
  const bool narrow = head_dim <= 64 && !general;
  return {
      .consumers = narrow ? 3 : 2,
      .keys = (general && head_dim > 64) || (packed && value_dim > 128)                ? 64
              : value_dim > 128 || (packed && narrow) || (quantised && head_dim > 128) ? 80
                                                                                       : 128,
      .query_stages = quantised ? (head_dim <= 64 ? 2 : 1) : (head_dim <= (general ? 192 : 128) ? 2 : 1),
      .stages = 2,
      .ping_pong = value_dim <= 128,  // with 256 columns the accumulators leave no room for that
      .stored_stages = value_dim > 128 ? 1 : 2,
      // 32 + 3 x 160 = 512, 56 + 3 x 152 = 512, 40 + 2 x 232 = 504, 56 + 2 x 224 = 504
      .producer_registers = quantised || (packed && narrow) ? 56
                            : narrow                        ? 32
                                                            : 40,
      .consumer_registers = !narrow  ? (quantised ? 224 : 232)
                            : packed ? 152
                                     : 160,
  };
}

struct Sm90BackwardTileSizes {
  int consumers;  // warpgroups
  int rows, keys;
  bool wide;  // both consumers share the keys of a tile; otherwise each has 64 of them
  int query_stages, grad_output_stages;
  int grad_query_parts;  // dQ leaves through shared memory in this many parts, one after the other
  int producer_registers, consumer_registers;  // of a thread
};

// Registers of a consumer thread for dK and dV, and shared memory for K, V, the stages of Q and dO, P and dS, and dQ.
//
//   head_dim   rows x keys   dK and dV                       registers   shared memory
//   64        128 x 128      64 keys, all columns             64         192 KiB
//   128        64 x 128      64 keys, all columns            128         192 KiB
//   256        64 x  64      64 keys, half of the columns    128         216 KiB
//   192 (128)  64 x  64      as for 256                       96         216 KiB    (values); dQ leaves at once
constexpr Sm90BackwardTileSizes sm90_backward_tile_sizes(int head_dim, int value_dim) {
  const bool wide = head_dim > 128;  // 64 keys x 256 columns of dK and dV would take 256 registers, all there are
  return {
      .consumers = 2,
      // 64: m of the wgmma of dQ = dS K. Up to 64 columns each warpgroup has 64 rows of dQ; half of the columns would
      // be half of a swizzled row.
      .rows = head_dim <= 64 ? 128 : 64,
      .keys = wide ? 64 : 128,
      .wide = wide,
      .query_stages = 2,
      // Wide: a second stage of dO would exceed the 227 KiB of a block. dO is the tensor that a step is done with first
      // and that the next step needs last.
      .grad_output_stages = wide ? 1 : 2,
      .grad_query_parts = value_dim > 128 ? 2 : 1,  // all of dQ at once takes 64 KiB beyond 128 columns
      .producer_registers = 24,                     // 24 + 2 x 240 = 504
      .consumer_registers = 240,
  };
}

}  // namespace scaledot
