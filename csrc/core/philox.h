// Counter-based dropout. An element (batch, head, row, column) of the keep mask depends only on the seed and these four
// numbers, so every device, tile size and thread count draws the same mask.
//
// Generator: Philox4x32-7, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Seven rounds are the
// fewest that pass all of BigCrush; the authors' default of ten costs a third more.
//   key     = seed (64 bits)
//   counter = {column block, row, batch * heads + head, offset}
// If a call is part of a larger attention (Problem::part), all four are numbers of the larger one. A call may have
// several seeds, one for each `dropout_batch` consecutive batches. `batch` then counts within these, so that each group
// draws the same mask as a separate call. One counter yields four 32-bit words. Columns form groups of 64: word w of
// counter 16 * (column / 64) + lane belongs to column 64 * (column / 64) + 16 * w + lane. 16 neighbouring columns so
// come from 16 neighbouring counters, and a vector unit needs no shuffle.
#pragma once

#include "core/problem.h"

namespace scaledot {

constexpr int kDropoutGroup = 64;  // columns that one set of 16 counters covers
constexpr int kDropoutLanes = 16;

struct PhiloxWords {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;

// One round: two 32 x 32 -> 64 bit products, whose high halves are mixed with the other two words and the key.
SCALEDOT_FN void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t key0, uint32_t key1) {
  const uint64_t product0 = uint64_t(kPhiloxMultiplier0) * c0, product1 = uint64_t(kPhiloxMultiplier1) * c2;
  c0 = uint32_t(product1 >> 32) ^ c1 ^ key0;
  c1 = uint32_t(product1);
  c2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
  c3 = uint32_t(product0);
}
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;  // added to the key in each round

SCALEDOT_FN PhiloxWords philox(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
#ifdef __CUDACC__
#pragma unroll 1  // nvcc would unroll seven rounds, into more registers than the backward has left
#endif
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kWeyl0, key1 += kWeyl1)
    philox_round(c0, c1, c2, c3, key0, key1);
  return {{c0, c1, c2, c3}};
}

// A dropout stream: one row of weights of one batch and head.
struct DropoutRow {
  uint32_t key0, key1, row, head, offset;  // head: batch * heads + head
  uint32_t threshold;                      // a weight is kept if its word is at least this
  int64_t first_column;                    // the number of the call's column 0; not always a multiple of kDropoutGroup
};

// The probability as a 32-bit threshold: P(word < threshold) = dropout_p, to 2^-32. With a probability of 1 the largest
// word would be kept; dropout_scale() is then 0.
SCALEDOT_FN uint32_t dropout_threshold(double dropout_p) {
  return dropout_p < 1.0 ? uint32_t(dropout_p * 4294967296.0) : 0xFFFFFFFFu;
}

SCALEDOT_FN DropoutRow dropout_row(const Problem& p, int64_t batch, int64_t head, int64_t row) {
  const int64_t group = p.dropout_batch > 0 ? batch / p.dropout_batch : 0;
  const uint64_t seed = uint64_t(p.dropout_seed[2 * group]);
  const int64_t heads = p.part.given ? p.part.heads : p.heads, first = group * p.dropout_batch;
  return {uint32_t(seed),
          uint32_t(seed >> 32),
          uint32_t(p.part.row + row),
          uint32_t((p.part.batch + batch - first) * heads + p.part.head + head),
          uint32_t(uint64_t(p.dropout_seed[2 * group + 1]) + uint64_t(p.dropout_offset)),
          dropout_threshold(p.dropout_p),
          p.part.key};
}

// The words of columns 64 * group + lane + {0, 16, 32, 48}, in the numbering of the larger attention if the call is
// part of one. A weight is kept if its word is at least r.threshold.
SCALEDOT_FN PhiloxWords dropout_words(const DropoutRow& r, int64_t group, int lane) {
  return philox(r.key0, r.key1, uint32_t(group * kDropoutLanes + lane), r.row, r.head, r.offset);
}

SCALEDOT_FN bool dropout_keeps(const DropoutRow& r, int64_t column) {
  column += r.first_column;
  const int64_t group = column / kDropoutGroup;
  const int within = int(column % kDropoutGroup);
  const PhiloxWords words = dropout_words(r, group, within % kDropoutLanes);
  return words.word[within / kDropoutLanes] >= r.threshold;
}

// keep[k] = 1 if column 64 * group + k is kept; first_column must be 0. Lanes are the inner loop, so that compilers
// vectorise each round.
SCALEDOT_FN void dropout_keep_group(const DropoutRow& r, int64_t group, uint8_t* keep) {
  uint32_t c[4][kDropoutLanes];
  for (int lane = 0; lane < kDropoutLanes; ++lane) {
    c[0][lane] = uint32_t(group * kDropoutLanes + lane);
    c[1][lane] = r.row;
    c[2][lane] = r.head;
    c[3][lane] = r.offset;
  }
  for (uint32_t round = 0; round < kPhiloxRounds; ++round)
    for (int lane = 0; lane < kDropoutLanes; ++lane)
      philox_round(c[0][lane], c[1][lane], c[2][lane], c[3][lane], r.key0 + round * kWeyl0, r.key1 + round * kWeyl1);
  for (int k = 0; k < 4; ++k)
    for (int lane = 0; lane < kDropoutLanes; ++lane) keep[k * kDropoutLanes + lane] = c[k][lane] >= r.threshold;
}

}  // namespace scaledot
