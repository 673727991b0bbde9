// Prefetches for the decode kernel. The CPU alone fetches too little ahead of rows that are short or not neighbours.
#pragma once

#include "cpu/simd/attention/decode_plan.h"

namespace scaledot {
namespace {

// Prefetches the keys or the values of a span. Without turns these are rows of one head. With turns, while all heads
// read a piece, the next piece is fetched in the order of memory, some cache lines in each step.
template <class Storage>
class DecodeFetch {
  static constexpr int64_t kSize = sizeof(Storage), kPerLine = kCacheLine / kSize;
  using Sum = typename Compute<Storage>::type;
  using Streams = DecodeStreams<Sum>;

 public:
  using Rows = KeyRowPointers<Storage, kDecodeSplit>;

  // `rows`: `keys` of them, of the first head. `turns`: heads that take turns.
  DecodeFetch(const Problem& p, const TensorView& view, int64_t cols, const Rows& rows, int64_t keys, int64_t turns)
      : rows_(rows),
        keys_(keys),
        cols_(cols),
        own_(turns == 1 && (kHasTileUnit || fetches_own_rows(p, view, cols))),
        steps_(Streams(keys).steps),
        ahead_(kHasTileUnit ? Streams::kAtOnce : kDecodeAhead / max(cols * kSize, kCacheLine)),
        row_lines_(ceil_div((turns - 1) * view.head_stride + cols, kPerLine)),
        piece_(turns > 1 ? round_up(max(kPieceBytes / (kDecodeStreams * row_lines_ * kCacheLine), int64_t(1)),
                                    Streams::kAtOnce)
                         : steps_),
        each_step_(turns > 1 ? ceil_div(kDecodeStreams * row_lines_, turns) : 0) {
    if (turns > 1) {
      begin({0, min(piece_, steps_)});
      fetch_lines(kDecodeStreams * piece_ * row_lines_);  // all of the first piece
    }
  }

  // The steps in which the heads take one turn each, from `step` on. The next piece will be fetched.
  Range piece_from(int64_t step) {
    const int64_t end = min(step + piece_, steps_);
    begin({end, min(end + piece_, steps_)});
    return {step, end};
  }

  // Call it before each step of each head.
  SCALEDOT_INLINE void before(int64_t step) {
    if (each_step_ > 0) {
      fetch_lines(each_step_);
    } else if constexpr (kSize == 1) {
      fetch_own_rows(step);
    } else if constexpr (kSize <= kPrefetchedBytes) {
      if (own_) fetch_own_rows_outlined(step);
    }
  }

 private:
  static bool fetches_own_rows(const Problem& p, const TensorView& view, int64_t cols) {
    return kSize == 1 || (view.row_stride > cols && p.key_length * view.row_stride * kSize >= kPrefetchFrom);
  }

  SCALEDOT_INLINE void fetch_own_rows(int64_t step) const {
    const Streams streams(keys_);
    const int64_t later = step + ahead_;
    if (later >= steps_) return;
    for (int i = 0; i < kDecodeStreams; ++i) {
      const Storage* row = rows_.row(min(streams.key(later, i), keys_ - 1));
      for (int64_t d = 0; d < cols_; d += kPerLine) __builtin_prefetch(row + d);
    }
  }

  // Inlined, these would take registers of the loops around them, also where they are not called. Without the assembly
  // the compiler sees no effect, and leaves the call out.
  SCALEDOT_NOINLINE void fetch_own_rows_outlined(int64_t step) const {
    __asm__ volatile("");
    fetch_own_rows(step);
  }

  SCALEDOT_NOINLINE void fetch_lines(int64_t lines) {
    __asm__ volatile("");
    while (lines > 0 && stream_ < kDecodeStreams) {
      const Storage* row = rows_.row(min(Streams(keys_).key(step_, stream_), keys_ - 1));
      const int64_t end = min(line_ + lines, row_lines_);
      lines -= end - line_;
      for (; line_ < end; ++line_) __builtin_prefetch(row + line_ * kPerLine, 0, kSecondLevel);
      if (line_ < row_lines_) return;
      line_ = 0;
      if (++step_ < next_.end) continue;
      step_ = next_.begin;
      ++stream_;
    }
  }

  // Lines of these steps are fetched from now on.
  void begin(Range steps) {
    next_ = steps;
    step_ = steps.begin;
    line_ = 0;
    stream_ = count(steps) > 0 ? 0 : kDecodeStreams;
  }

  static constexpr int kSecondLevel = 2;  // of the caches: a piece is too large for the first

  const Rows& rows_;
  const int64_t keys_, cols_;
  const bool own_;
  const int64_t steps_;
  const int64_t ahead_;      // steps that rows of one head are fetched ahead
  const int64_t row_lines_;  // cache lines of a key, of all heads
  const int64_t piece_;      // steps
  const int64_t each_step_;  // lines to fetch before a step
  // The line that is fetched next, and the steps that it belongs to.
  Range next_ = {0, 0};
  int64_t step_ = 0, line_ = 0;
  int stream_ = kDecodeStreams;
};

}  // namespace
}  // namespace scaledot
