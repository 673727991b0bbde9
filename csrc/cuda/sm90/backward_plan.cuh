// Code that the kernels of the backward for sm_90 share.
#pragma once

#include "cuda/generic/backward_plan.cuh"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/backward_tiles.h"

namespace scaledot {
namespace {

struct Sm90BackwardPlan {
  PreparedRows<float> rows;
  int* imprecise;                // (block of the first kernel): whether an lse needs two numbers
  int64_t imprecise_blocks;      // that kernel's
  int64_t row_tiles, key_tiles;  // of a (batch, head) pair; of a head and all packed sequences: at most
  int row_tile_rows;             // C::kRows; these are for kernels that any configuration has
  int grad_query_cols, grad_query_parts;
  void* statistics;              // (batch, head, row tile): C::Statistics
  Sm90RowPosition* positions;    // (batch, head, padded row), for the general kernel
  float* grad_query;             // (batch, head, row tile, warpgroup, part): sums, placed as grad_query_position says
  int* semaphores;               // (batch, head, row tile, part): the turn of the key tile that adds next
  int* row_ranges;               // (key tile): first and end of the row tiles that may attend to it
  int *row_starts, *key_starts;  // of packed sequences: by sequence, how many tiles there are before it; then all
  int* ticket;                   // the number of blocks that have started
  int* has_nan;                  // whether grad_key or grad_value has NaN; nullptr: no score is masked
};

}  // namespace
}  // namespace scaledot
