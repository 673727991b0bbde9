// Ranges of rows and keys, and what masks make of a tile of scores.
#pragma once

#include "core/problem.h"

namespace scaledot {

struct Range {
  int64_t begin, end;  // empty if end <= begin
};

SCALEDOT_FN Range intersect(Range a, Range b) { return {max(a.begin, b.begin), min(a.end, b.end)}; }

// full: every row attends to every key; skip: no row attends to any.
enum class TileKind : uint8_t { skip, partial, full };

}  // namespace scaledot
