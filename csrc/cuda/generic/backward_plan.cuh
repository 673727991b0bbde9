// Code that the kernels of the backward share.
#pragma once

#include "core/softmax.h"
#include "cuda/generic/config.h"
#include "cuda/generic/generic.h"
#include "cuda/ptx/memory.h"

namespace scaledot {
namespace {

template <class T>
struct GenericBackwardPlan {
  StackedTiling tiling;
  int64_t panels;
  PreparedRows<T> rows;
  bool writes_mask;  // grad_query_kernel writes grad_mask, every element of which belongs to one score
  // Only if grad_mask is broadcast (mask_gradient.cuh): the tiles of its elements, and the slices that their sums are
  // divided into.
  int64_t mask_batches, mask_heads, mask_row_tiles, mask_key_tiles, mask_slices;
  StackedTiling mask_tiling;
  int64_t mask_extent;  // elements of grad_mask
  T* mask_partials;     // (slice, element); nullptr if there is one slice
  // Only if relative_bias has a gradient (relative_gradient.cuh).
  StackedTiling relative_tiling;
  int64_t relative_batches, relative_slices, relative_entries;
  T* relative_partials;  // (batch entry of the gradient, query head, slice, entry)
};

}  // namespace
}  // namespace scaledot
