// The cases that every kernel of the table runs. Names are those of tests/library/case_list.py.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "problem_builder.h"

namespace scaledot::testing {

constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};

inline const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"none",    "float32",       "float64",     "bfloat16", "float16",
                                    "boolean", "float8_e4m3fn", "float8_e5m2", "int8"};
  return kNames[int(dtype)];
}

// Their backward is split along the rows, and the number of splits does not divide the number of tiles.
inline void many_heads(Case& c) {
  c.batch = {2}, c.heads = 11, c.kv_heads = 1, c.query_length = 60, c.key_length = 140, c.order = MemoryOrder::blhd;
}

constexpr DType kCaches[] = {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8};

struct Feature {
  const char* name;
  std::function<void(Case&)> set;
};

inline const std::vector<Feature>& features() {
  static const std::vector<Feature> list = {
      {"plain", [](Case&) {}},
      {"causal", [](Case& c) { c.causal = true; }},
      {"lower_right", [](Case& c) { c.causal = c.lower_right = true; }},
      {"window", [](Case& c) { c.window_left = 9, c.window_right = 4; }},
      {"window_left", [](Case& c) { c.window_left = 7, c.lower_right = true; }},
      {"window_right", [](Case& c) { c.window_right = 3; }},
      {"softcap", [](Case& c) { c.softcap = 1.5; }},
      {"alibi", [](Case& c) { c.alibi = AlibiKind::heads; }},
      {"alibi_batch", [](Case& c) { c.alibi = AlibiKind::batch_heads; }},
      {"relative", [](Case& c) { c.relative = RelativeKind::heads; }},
      {"relative_batch",
       [](Case& c) {
         c.relative = RelativeKind::batch_heads, c.relative_range = {-300, 300};
       }},
      {"relative_shared",
       [](Case& c) {
         c.relative = RelativeKind::shared, c.relative_range = {-4, 33}, c.relative_low = -kInfinity;
       }},
      {"bool_mask", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true; }},
      {"padding",
       [](Case& c) {
         c.mask = MaskKind::boolean, c.mask_broadcast = {false, true, true, false};
       }},
      {"masked_score", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -2.5; }},
      {"masked_fill", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -1e9; }},
      {"float_mask", [](Case& c) { c.mask = MaskKind::additive; }},
      {"inf_mask", [](Case& c) { c.mask = MaskKind::additive_with_inf, c.empty_rows = true; }},
      {"bias",
       [](Case& c) {
         c.mask = MaskKind::additive, c.mask_broadcast = {true, false, false, false};
       }},
      {"blocks", [](Case& c) { c.block_rows = 8, c.block_keys = 10; }},
      {"dropout", [](Case& c) { c.dropout_p = 0.3; }},
      {"gqa", [](Case& c) { c.heads = 4, c.kv_heads = 2; }},
      {"mqa", [](Case& c) { c.heads = 3, c.kv_heads = 1; }},
      {"weights", [](Case& c) { c.return_weights = true; }},
      {"value_dim", [](Case& c) { c.value_dim = 28; }},
      {"scale", [](Case& c) { c.scale = 0.7; }},
      {"large", [](Case& c) { c.spread = 6; }},
      {"nan_in_masked", [](Case& c) { c.nan_in_masked = true; }},
      {"blhd", [](Case& c) { c.order = MemoryOrder::blhd; }},
      {"inner2", [](Case& c) { c.order = MemoryOrder::inner2; }},
      {"transposed", [](Case& c) { c.order = MemoryOrder::transposed; }},
      {"expanded_batch", [](Case& c) { c.key_broadcast.batch = true; }},
      {"expanded_heads", [](Case& c) { c.key_broadcast.head = true; }},
  };
  return list;
}

inline void add_features(std::vector<Case>& cases) {
  for (const Feature& feature : features())
    for (DType dtype : kDTypes) {
      Case c;
      c.name = std::string(feature.name) + "_" + dtype_name(dtype);
      c.dtype = dtype;
      feature.set(c);
      cases.push_back(c);
    }
}

// Every two features together, each combination in the next dtype and at the next ragged size. If both set the same
// field, the later one wins.
inline void add_pairs(std::vector<Case>& cases) {
  constexpr int64_t kSizes[][2] = {{37, 53}, {66, 35}, {19, 130}, {5, 17}, {49, 49}};
  size_t next = 0;
  for (size_t a = 1; a < features().size(); ++a)
    for (size_t b = a + 1; b < features().size(); ++b, ++next) {
      Case c;
      c.dtype = kDTypes[next % 4];
      c.name = std::string(features()[a].name) + "_and_" + features()[b].name + "_" + dtype_name(c.dtype);
      c.query_length = kSizes[next % 5][0], c.key_length = kSizes[next % 5][1];
      c.seed = next + 2;
      features()[a].set(c);
      features()[b].set(c);
      cases.push_back(c);
    }
}

inline void add_sizes(std::vector<Case>& cases) {
  constexpr int64_t kLengths[] = {1, 2, 3, 7, 13, 14, 15, 16, 17, 31, 33, 55, 56, 57, 64, 113, 127, 128, 129, 257, 300};
  constexpr int64_t kOthers[] = {129, 1, 64, 7, 33, 200, 16};
  constexpr DType kCycle[] = {DType::float32, DType::bfloat16, DType::float32, DType::float16, DType::float64};
  size_t next = 0;
  for (int64_t length : kLengths)
    for (int which = 0; which < 3; ++which, ++next) {
      Case c;
      c.batch = {1};
      c.query_length = which == 2 ? kOthers[next % 7] : length;
      c.key_length = which == 1 ? kOthers[next % 7] : length;
      c.head_dim = which == 0 ? 64 : which == 1 ? 32 : 40;
      c.value_dim = c.head_dim;
      c.dtype = kCycle[next % 5];
      c.causal = next % 2 == 0;
      c.lower_right = c.key_length > c.query_length;
      c.name = "length_" + std::to_string(c.query_length) + "x" + std::to_string(c.key_length) +
               (c.causal ? "_causal_" : "_") + dtype_name(c.dtype) + "_" + std::to_string(next);
      cases.push_back(c);
    }
  constexpr int64_t kDims[] = {1, 2, 3, 8, 15, 16, 17, 20, 33, 40, 64, 80, 96, 128, 192, 256};
  for (int64_t dim : kDims)
    for (DType dtype : kDTypes) {
      Case c;
      c.name = "head_dim_" + std::to_string(dim) + "_" + dtype_name(dtype);
      c.batch = {1}, c.query_length = 18, c.key_length = 35, c.head_dim = c.value_dim = dim, c.dtype = dtype;
      cases.push_back(c);
    }
  for (DType dtype : kDTypes) {  // DeepSeek's, and smaller ones that have the same kernels
    for (const auto& [head_dim, value_dim] : {std::pair<int64_t, int64_t>{192, 128}, {160, 96}, {132, 5}}) {
      Case c;
      c.name = "unequal_" + std::to_string(head_dim) + "x" + std::to_string(value_dim) + "_" + dtype_name(dtype);
      c.batch = {1}, c.query_length = 70, c.key_length = 140, c.head_dim = head_dim, c.value_dim = value_dim;
      c.dtype = dtype, c.causal = c.lower_right = c.nan_in_masked = c.return_weights = true;
      cases.push_back(c);
    }
  }
  constexpr int64_t kDimPairs[][2] = {{192, 128}, {64, 1}, {1, 64}, {40, 256}, {128, 20}, {8, 65}, {256, 3}, {3, 256}};
  for (const auto& dims : kDimPairs) {
    Case c;
    c.dtype = kDTypes[next++ % 4];
    c.name = "head_dim_" + std::to_string(dims[0]) + "x" + std::to_string(dims[1]) + "_" + dtype_name(c.dtype);
    c.batch = {1}, c.query_length = 21, c.key_length = 70, c.head_dim = dims[0], c.value_dim = dims[1];
    c.return_weights = true;
    cases.push_back(c);
  }
}

// Every broadcast form of the mask, in every mask dtype.
inline void add_masks(std::vector<Case>& cases) {
  constexpr MaskKind kKinds[] = {MaskKind::boolean, MaskKind::additive, MaskKind::additive_with_inf};
  constexpr const char* kKindNames[] = {"bool", "float", "inf"};
  size_t next = 0;
  for (int form = 0; form < 16; ++form)
    for (int kind = 0; kind < 3; ++kind, ++next) {
      Case c;
      c.dtype = kDTypes[next % 4];
      c.mask = kKinds[kind];
      c.mask_dtype = kDTypes[next / 4 % 4];
      c.mask_broadcast = {(form & 8) == 0, (form & 4) == 0, (form & 2) == 0, (form & 1) == 0};
      c.query_length = 61, c.key_length = 133;  // two tiles in both directions
      c.name = std::string("mask_") + kKindNames[kind] + "_" + (form & 8 ? "B" : "1") + (form & 4 ? "H" : "1") +
               (form & 2 ? "Q" : "1") + (form & 1 ? "K" : "1") + "_" + dtype_name(c.dtype) +
               (kind ? std::string("_") + dtype_name(c.mask_dtype) : "");
      c.seed = next + 77;
      if (next % 5 == 1) c.causal = true;
      if (next % 7 == 2) c.heads = 4;
      cases.push_back(c);
    }
}

// Shapes: batches, decoding, groups of heads, and sizes of 0 and 1.
inline std::vector<Feature> shape_features() {
  return {
      {"no_batch", [](Case& c) { c.batch = {}; }},
      {"three_batch_dims",
       [](Case& c) {
         c.batch = {2, 1, 3}, c.query_length = 9, c.mask = MaskKind::additive;
       }},
      {"decode", [](Case& c) { c.batch = {1}, c.query_length = 1, c.key_length = 257, c.head_dim = c.value_dim = 64; }},
      {"decode_gqa",
       [](Case& c) {
         c.heads = 8, c.kv_heads = 2, c.query_length = 1, c.key_length = 300, c.head_dim = c.value_dim = 64;
       }},
      {"decode_chunks",
       [](Case& c) { c.batch = {1}, c.heads = 1, c.kv_heads = 1, c.query_length = 3, c.key_length = 2100; }},
      {"decode_chunks_window",
       [](Case& c) {
         c.batch = {1}, c.heads = 2, c.query_length = 2, c.key_length = 2100, c.window_left = 500, c.lower_right = true;
       }},
      {"decode_relative",
       [](Case& c) {
         c.heads = 4, c.query_length = 2, c.key_length = 1100, c.lower_right = true;
         c.relative = RelativeKind::heads, c.relative_range = {-700, 700};
       }},
      {"decode_relative_clamped",
       [](Case& c) {
         c.query_length = 1, c.key_length = 600, c.lower_right = true, c.relative = RelativeKind::batch_heads;
         c.relative_range = {-20, 20};
       }},
      {"relative_tiles",
       [](Case& c) {
         c.query_length = 200, c.key_length = 500, c.relative = RelativeKind::heads, c.relative_range = {-40, 40};
       }},
      {"relative_gqa_tiles",
       [](Case& c) {
         c.heads = 4, c.kv_heads = 2, c.query_length = 20, c.key_length = 400, c.relative = RelativeKind::batch_heads;
         c.relative_range = {-30, 200}, c.causal = c.lower_right = true;
       }},
      {"gqa_heads_relative",
       [](Case& c) { many_heads(c), c.relative = RelativeKind::heads, c.dropout_p = 0.2, c.softcap = 2; }},
      {"relative_padding",
       [](Case& c) {
         c.query_length = 130, c.key_length = 256, c.relative = RelativeKind::heads, c.relative_range = {-128, 128};
         c.mask = MaskKind::boolean, c.mask_broadcast = {false, true, true, false}, c.nan_in_masked = true;
       }},
      {"relative_beyond",
       [](Case& c) {
         c.query_length = 30, c.key_length = 20, c.relative = RelativeKind::heads, c.relative_range = {-200, -100};
       }},
      {"no_keys_relative", [](Case& c) { c.key_length = 0, c.relative = RelativeKind::heads; }},
      {"decode_mask",
       [](Case& c) { c.query_length = 1, c.key_length = 200, c.mask = MaskKind::boolean, c.nan_in_masked = true; }},
      {"decode_dropout_mask",
       [](Case& c) {
         c.query_length = 2, c.key_length = 200, c.mask = MaskKind::boolean, c.dropout_p = 0.5, c.nan_in_masked = true;
       }},
      {"many_queries",
       [](Case& c) { c.batch = {1}, c.heads = c.kv_heads = 1, c.query_length = 700, c.key_length = 5; }},
      {"many_keys",
       [](Case& c) {
         c.batch = {1}, c.heads = c.kv_heads = 1, c.query_length = 20, c.key_length = 1100, c.head_dim = 32;
       }},
      {"gqa_slabs",
       [](Case& c) { c.batch = {1}, c.heads = 6, c.kv_heads = 2, c.query_length = 20, c.key_length = 700; }},
      {"gqa_heads", [](Case& c) { many_heads(c), c.causal = true, c.dropout_p = 0.2; }},
      {"gqa_heads_one_tile", [](Case& c) { many_heads(c), c.key_length = 50, c.window_left = 30; }},
      {"gqa_heads_mask",
       [](Case& c) { many_heads(c), c.batch = {1}, c.mask = MaskKind::additive_with_inf, c.empty_rows = true; }},
      {"gqa_heads_bias", [](Case& c) { many_heads(c), c.mask = MaskKind::additive, c.mask_broadcast.head = true; }},
      {"gqa_heads_only_query", [](Case& c) { many_heads(c), c.wants_key = c.wants_value = false; }},
      {"gqa_heads_only_value", [](Case& c) { many_heads(c), c.wants_query = c.wants_key = false; }},
      {"gqa_heads_only_lse", [](Case& c) { many_heads(c), c.grad_output = c.grad_weights = false; }},
      {"weights_tiles",
       [](Case& c) {
         c.heads = 4, c.kv_heads = 2, c.query_length = 130, c.key_length = 300, c.causal = c.return_weights = true;
       }},
      {"weights_tiles_only_output_grad",
       [](Case& c) {
         c.query_length = 70, c.key_length = 270, c.mask = MaskKind::boolean, c.return_weights = true;
         c.grad_lse = c.grad_weights = false;
       }},
      {"weights_tiles_nan",
       [](Case& c) {
         c.query_length = 70, c.key_length = 270, c.causal = c.return_weights = c.nan_in_live_query = true;
       }},
      {"one_key", [](Case& c) { c.key_length = 1, c.return_weights = true; }},
      {"no_keys", [](Case& c) { c.key_length = 0; }},
      {"no_keys_mask", [](Case& c) { c.key_length = 0, c.mask = MaskKind::additive, c.mask_broadcast.col = true; }},
      {"no_queries", [](Case& c) { c.query_length = 0; }},
      {"no_batches", [](Case& c) { c.batch = {0}; }},
      {"no_head_dim", [](Case& c) { c.head_dim = 0; }},
      {"no_value_dim", [](Case& c) { c.value_dim = 0; }},
  };
}

// Masks, windows, masked scores and dropout at their extremes.
inline std::vector<Feature> mask_features() {
  return {
      {"large_mask",
       [](Case& c) {
         c.spread = 6, c.mask = MaskKind::additive_with_inf, c.empty_rows = true, c.return_weights = true;
       }},
      {"negative_mask", [](Case& c) { c.mask = MaskKind::additive, c.mask_offset = -150; }},
      // relative_bias masks keys too, beside a boolean mask.
      {"relative_bool_nan",
       [](Case& c) {
         c.mask = MaskKind::boolean, c.relative = RelativeKind::heads, c.relative_low = -kInfinity;
         c.nan_in_masked = c.return_weights = true;
       }},
      {"relative_masked_score",
       [](Case& c) {
         c.mask = MaskKind::boolean, c.relative = RelativeKind::shared, c.relative_low = -kInfinity;
         c.nan_in_masked = c.empty_rows = c.causal = true, c.masked_score = -2.5;  // NaN beside replaced scores
       }},
      // The score is nothing beside the sum of the two biases, which is rounded.
      {"relative_negative_mask",
       [](Case& c) {
         c.scale = 1e-39, c.mask = MaskKind::additive, c.mask_offset = -150, c.relative = RelativeKind::heads;
       }},
      {"empty_causal_rows", [](Case& c) { c.query_length = 70, c.key_length = 33, c.causal = c.lower_right = true; }},
      {"empty_causal_rows_mask",
       [](Case& c) {
         c.query_length = 70, c.key_length = 33, c.causal = c.lower_right = true, c.mask = MaskKind::additive;
       }},
      {"empty_window_rows",
       [](Case& c) {
         c.query_length = 90, c.key_length = 20, c.window_left = 2, c.window_right = 1, c.return_weights = true;
       }},
      {"window_diagonal", [](Case& c) { c.window_left = c.window_right = 0, c.return_weights = true; }},
      {"window_beyond", [](Case& c) { c.window_left = c.window_right = 1000000000000; }},
      {"window_wide",
       [](Case& c) {
         c.query_length = 130, c.key_length = 350, c.window_left = 33, c.window_right = 65, c.lower_right = true;
       }},
      {"score_zero", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = 0; }},
      {"score_high",
       [](Case& c) {
         c.mask = MaskKind::boolean, c.mask_broadcast = {false, true, true, false}, c.masked_score = 3, c.causal = true;
         c.return_weights = true;
       }},
      {"score_lowest",
       [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -3.4028234663852886e38; }},
      {"lowest_bias",
       [](Case& c) {
         c.mask = MaskKind::additive_with_inf, c.mask_dtype = DType::float32, c.mask_low = -3.4028234663852886e38;
         c.empty_rows = true;
       }},
      // All scores of a row are the mask's lowest number, or differ by their rounding errors.
      {"alibi_lowest_bias",
       [](Case& c) {
         c.alibi = AlibiKind::heads, c.mask = MaskKind::additive, c.mask_dtype = DType::float32;
         c.mask_offset = -3.4e38, c.return_weights = true;
       }},
      {"alibi_large_bias",
       [](Case& c) {
         c.alibi = AlibiKind::heads, c.mask = MaskKind::additive, c.mask_dtype = DType::float32, c.mask_offset = -1e5;
       }},
      // Forward only: in gradients, queries of this size are multiplied with weights that are too small to count.
      {"weights_extreme",
       [](Case& c) { c.spread = 1000, c.return_weights = true, c.wants_query = c.wants_key = c.wants_value = false; }},
      {"weights_extreme_softcap",
       [](Case& c) {
         c.spread = 1000, c.softcap = 50, c.alibi = AlibiKind::heads, c.key_length = 300;
         c.return_weights = true, c.wants_query = c.wants_key = c.wants_value = false;
       }},
      {"dropout_high",
       [](Case& c) { c.dropout_p = 0.9, c.return_weights = true, c.query_length = 70, c.key_length = 140; }},
      {"dropout_all",
       [](Case& c) { c.dropout_p = 1.0, c.return_weights = true, c.query_length = 70, c.key_length = 140; }},
      {"dropout_low",
       [](Case& c) { c.dropout_p = 0.01, c.return_weights = true, c.query_length = 70, c.key_length = 140; }},
  };
}

// Block masks: blocks smaller and larger than tiles, and with sizes that divide nothing.
inline std::vector<Feature> block_features() {
  const auto sized = [](int64_t rows, int64_t keys, int64_t query_length, int64_t key_length) {
    return [=](Case& c) {
      c.block_rows = rows, c.block_keys = keys, c.query_length = query_length, c.key_length = key_length;
    };
  };
  return {
      {"blocks_128", sized(128, 128, 300, 270)},
      {"blocks_64x32", sized(64, 32, 150, 300)},
      // The only tile of the last block has more rows than the others.
      {"blocks_last_in_one_tile",
       [=](Case& c) { sized(64, 32, 172, 300)(c), c.heads = 2, c.kv_heads = 1, c.return_weights = true; }},
      {"blocks_one", sized(1, 1, 9, 140)},
      {"blocks_odd", sized(61, 71, 130, 300)},
      {"blocks_wide", sized(16, 1000, 120, 260)},
      {"blocks_whole", sized(4096, 4096, 120, 260)},
      {"blocks_few_rows", sized(2, 64, 3, 1100)},
      {"blocks_heads",
       [](Case& c) { many_heads(c), c.block_rows = 13, c.block_keys = 40, c.causal = true, c.nan_in_masked = true; }},
      {"blocks_broadcast_heads",
       [](Case& c) {
         many_heads(c), c.block_rows = 16, c.block_keys = 64, c.block_broadcast = {false, true, false, false};
       }},
      {"blocks_broadcast",
       [](Case& c) {
         c.batch = {2, 3}, c.block_rows = 16, c.block_keys = 16, c.block_broadcast = {true, true, false, false};
         c.nan_in_masked = c.return_weights = true;
       }},
      {"blocks_weights",
       [](Case& c) {
         c.query_length = 120, c.key_length = 300, c.block_rows = 32, c.block_keys = 128, c.return_weights = true;
         c.mask = MaskKind::boolean, c.dropout_p = 0.2, c.nan_in_masked = true;
       }},
      {"blocks_everything",
       [](Case& c) {
         c.heads = 4, c.kv_heads = 2, c.query_length = 66, c.key_length = 331, c.head_dim = 40, c.value_dim = 24;
         c.mask = MaskKind::additive_with_inf, c.mask_broadcast.batch = true, c.causal = c.lower_right = true;
         c.window_left = 90, c.softcap = 3, c.alibi = AlibiKind::batch_heads, c.dropout_p = 0.2, c.scale = 0.3;
         c.return_weights = true, c.order = MemoryOrder::blhd, c.nan_in_masked = true;
         c.block_rows = 24, c.block_keys = 50;
       }},
  };
}

// Parts of a larger attention, selections of gradients, and numbers that are not finite.
inline std::vector<Feature> gradient_features() {
  return {
      {"part", [](Case& c) { c.part = {true, 5, 0, 1, 2, 7}, c.query_length = 70, c.key_length = 140; }},
      {"part_dropout",
       [](Case& c) {
         c.part = {true, 5, 37, 1, 2, 7}, c.dropout_p = 0.3, c.return_weights = true, c.causal = true;
         c.query_length = 70, c.key_length = 140;
       }},
      {"part_dropout_few_rows",
       [](Case& c) {
         c.part = {true, 5, 37, 1, 2, 7}, c.dropout_p = 0.5, c.return_weights = true, c.query_length = 2;
         c.key_length = 200;
       }},
      {"dropout_seeds",
       [](Case& c) {
         c.batch = {2, 2}, c.dropout_seeds = 2, c.dropout_p = 0.4, c.return_weights = true;
       }},
      {"padding_dropout_nan",
       [](Case& c) {
         c.dropout_p = 0.5, c.mask = MaskKind::boolean, c.mask_broadcast = {false, true, true, false};
         c.nan_in_masked = c.return_weights = true;
       }},
      {"softcap_small", [](Case& c) { c.softcap = 0.1, c.spread = 6; }},
      {"scale_negative", [](Case& c) { c.scale = -0.4; }},
      {"scale_underflow", [](Case& c) { c.scale = 1e-46, c.causal = true, c.return_weights = true; }},
      {"scale_subnormal", [](Case& c) { c.scale = 1e-39, c.mask = MaskKind::boolean, c.query_length = 2; }},
      {"only_lse_grad", [](Case& c) { c.grad_output = c.grad_weights = false; }},
      {"only_weights_grad",
       [](Case& c) { c.grad_output = c.grad_lse = false, c.return_weights = true, c.dropout_p = 0.2; }},
      {"only_output_grad",
       [](Case& c) { c.grad_lse = c.grad_weights = false, c.return_weights = true, c.mask = MaskKind::additive; }},
      {"only_query", [](Case& c) { c.wants_key = c.wants_value = false; }},
      {"only_key", [](Case& c) { c.wants_query = c.wants_value = false, c.key_length = 300; }},
      {"only_value", [](Case& c) { c.wants_key = c.wants_query = false; }},
      {"only_mask", [](Case& c) { c.wants_key = c.wants_query = c.wants_value = false, c.mask = MaskKind::additive; }},
      {"only_mask_row",
       [](Case& c) {
         c.wants_key = c.wants_query = c.wants_value = false, c.mask = MaskKind::additive, c.mask_broadcast.row = true;
       }},
      {"nan_in_live_key", [](Case& c) { c.nan_in_live_key = true, c.causal = true; }},
      {"nan_in_live_value", [](Case& c) { c.nan_in_live_value = true, c.causal = true; }},
      {"nan_in_live_query", [](Case& c) { c.nan_in_live_query = true, c.causal = true; }},
      {"inf_in_live_key", [](Case& c) { c.inf_in_live_key = c.return_weights = true; }},
      {"nan_in_live_query_dropout",
       [](Case& c) { c.nan_in_live_query = c.causal = true, c.dropout_p = 0.5, c.key_length = 200; }},
      {"nan_in_live_key_weights",
       [](Case& c) { c.nan_in_live_key = true, c.return_weights = true, c.dropout_p = 0.3; }},
      {"causal_nan_in_masked",
       [](Case& c) { c.causal = true, c.query_length = 40, c.key_length = 150, c.nan_in_masked = true; }},
      {"empty_rows_nan",
       [](Case& c) { c.query_length = 70, c.key_length = 33, c.causal = c.lower_right = c.nan_in_masked = true; }},
      {"everything",
       [](Case& c) {
         c.heads = 4, c.kv_heads = 2, c.query_length = 66, c.key_length = 131, c.head_dim = 40, c.value_dim = 24;
         c.mask = MaskKind::additive_with_inf, c.mask_broadcast.batch = true, c.causal = c.lower_right = true;
         c.window_left = 90, c.softcap = 3, c.alibi = AlibiKind::batch_heads, c.dropout_p = 0.2, c.scale = 0.3;
         c.return_weights = true, c.order = MemoryOrder::blhd, c.nan_in_masked = true;
       }},
  };
}

inline void add_others(std::vector<Case>& cases) {
  for (const std::vector<Feature>& features :
       {shape_features(), mask_features(), block_features(), gradient_features()})
    for (const Feature& other : features)
      for (DType dtype : kDTypes) {
        Case c;
        c.name = std::string(other.name) + "_" + dtype_name(dtype);
        c.dtype = dtype;
        other.set(c);
        cases.push_back(c);
      }
}

// Quantised keys and values, which only packed sequences have on a GPU (packed_case.h).
inline std::vector<Feature> quantised_features() {
  return {
      {"plain", [](Case&) {}},
      {"causal", [](Case& c) { c.causal = true, c.query_length = 70, c.key_length = 140; }},
      {"softcap", [](Case& c) { c.softcap = 1.5; }},
      {"alibi", [](Case& c) { c.alibi = AlibiKind::batch_heads; }},
      {"relative", [](Case& c) { c.relative = RelativeKind::heads; }},
      {"masked_score", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -2.5; }},
      {"dropout_weights", [](Case& c) { c.dropout_p = 0.3, c.return_weights = true; }},
      {"transposed", [](Case& c) { c.order = MemoryOrder::transposed; }},
      {"wide", [](Case& c) { c.heads = 6, c.head_dim = 129, c.value_dim = 65, c.key_length = 300; }},
      {"nan_in_masked", [](Case& c) { c.causal = c.lower_right = c.nan_in_masked = true, c.query_length = 70; }},
      {"nan_in_live_key", [](Case& c) { c.nan_in_live_key = c.causal = true; }},
      {"inf_in_live_key", [](Case& c) { c.inf_in_live_key = true; }},
      {"nan_in_live_value", [](Case& c) { c.nan_in_live_value = c.causal = true; }},
      {"scale_zero", [](Case& c) { c.scales = {0}, c.nan_in_live_value = true; }},
      {"scale_nan",
       [](Case& c) {
         c.scales = {kNaN, 0.1}, c.causal = c.lower_right = true, c.query_length = 70;
       }},
      {"scale_large",
       [](Case& c) {
         c.scales = {100, -100}, c.scale = 1e-2;
       }},
      {"decode", [](Case& c) { c.query_length = 1, c.key_length = 1100, c.head_dim = c.value_dim = 64; }},
      {"decode_gqa", [](Case& c) { c.heads = 8, c.query_length = 1, c.key_length = 700, c.head_dim = 128; }},
      {"decode_rows", [](Case& c) { c.heads = 2, c.query_length = 3, c.key_length = 601, c.head_dim = 20; }},
      {"decode_nan", [](Case& c) { c.query_length = 2, c.key_length = 300, c.causal = true, c.nan_in_masked = true; }},
      {"decode_scale_nan",
       [](Case& c) {
         c.query_length = 4, c.key_length = 2, c.causal = c.lower_right = true, c.scales = {kNaN, 0.1};
       }},
  };
}

inline std::vector<Case> quantised_cases() {
  std::vector<Case> result;
  for (const Feature& feature : quantised_features())
    for (DType cache : kCaches)
      for (DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
        Case c;
        c.name = std::string("quantised_") + feature.name + "_" + dtype_name(cache) + "_" + dtype_name(dtype);
        c.dtype = dtype, c.cache = cache;
        feature.set(c);
        result.push_back(c);
      }
  return result;
}

// K and V of a head exceed kSharedCache, and there are enough query tiles: the keys are processed in chunks. Forward
// only, because the reference takes seconds. (tests/python/threads/test_sdpa_threads.py has other dtypes.)
inline void add_long(std::vector<Case>& cases) {
  Case c;
  c.name = "long_float32";
  c.batch = {1}, c.heads = c.kv_heads = 1, c.query_length = 230, c.key_length = 1100, c.head_dim = c.value_dim = 256;
  c.mask = MaskKind::boolean, c.empty_rows = c.nan_in_masked = true;
  c.causal = c.lower_right = true, c.dropout_p = 0.2;
  c.grad_output = c.grad_lse = c.wants_query = c.wants_key = c.wants_value = false;
  cases.push_back(c);
}

// Everything at once, drawn from a fixed seed.
inline void add_random(std::vector<Case>& cases, int count, uint64_t seed) {
  Random random(seed);
  const auto below = [&](int64_t n) { return int64_t(random.bits() % uint64_t(n)); };
  const auto chance = [&](double p) { return random.uniform() < p; };
  constexpr int64_t kMost[] = {4, 20, 70, 150, 280};
  for (int k = 0; k < count; ++k) {
    Case c;
    c.name = "random_" + std::to_string(k);
    c.seed = random.bits();
    c.dtype = kDTypes[below(4)];
    c.batch.clear();
    for (int64_t d = below(3); d > 0; --d) c.batch.push_back(1 + below(2));
    c.kv_heads = 1 + below(3), c.heads = c.kv_heads * (1 + below(4));
    c.query_length = 1 + below(kMost[below(5)]), c.key_length = 1 + below(kMost[below(5)]);
    c.head_dim = 1 + below(kMost[below(3)]), c.value_dim = chance(0.5) ? c.head_dim : 1 + below(kMost[below(3)]);
    c.lower_right = chance(0.5), c.causal = chance(0.4);
    if (chance(0.3)) c.window_left = below(40);
    if (chance(0.3)) c.window_right = below(40);
    if (chance(0.2)) below(2), below(50);  // unused draws: the cases stay those that were tested before
    if (chance(0.3)) c.softcap = 0.5 + 4 * random.uniform();
    if (chance(0.3)) c.dropout_p = 0.9 * random.uniform();
    if (chance(0.3)) c.alibi = chance(0.5) ? AlibiKind::heads : AlibiKind::batch_heads;
    c.mask = chance(0.3) ? MaskKind::none : MaskKind(1 + below(3));
    c.mask_dtype = kDTypes[below(4)];
    c.mask_broadcast = {chance(0.5), chance(0.5), chance(0.3), chance(0.2)};
    c.empty_rows = chance(0.3);
    if (chance(0.3)) c.masked_score = -3 * random.uniform();
    c.return_weights = chance(0.4);
    c.grad_output = chance(0.9), c.grad_lse = chance(0.5), c.grad_weights = chance(0.8);
    c.wants_query = chance(0.9), c.wants_key = chance(0.9), c.wants_value = chance(0.9);
    c.order = MemoryOrder(below(5));
    c.key_broadcast = {chance(0.1), chance(0.1), false, false};
    c.nan_in_masked = chance(0.5);
    if (chance(0.3)) {
      c.relative = RelativeKind(1 + below(3));
      c.relative_range.low = below(60) - 50, c.relative_range.high = c.relative_range.low + below(90);
    }
    if (chance(0.3)) c.block_rows = 1 + below(90), c.block_keys = 1 + below(200);
    c.block_broadcast = {chance(0.5), chance(0.5), false, false};
    cases.push_back(c);
  }
}

// Mean weights over the heads. Forward only.
inline std::vector<Case> average_cases() {
  const std::vector<Feature> list = {
      {"average", [](Case&) {}},
      {"average_gqa_dropout", [](Case& c) { c.heads = 6, c.dropout_p = 0.3, c.causal = true, c.key_length = 300; }},
      {"average_blocks",  // the only tile of the last block has more rows than the others
       [](Case& c) { c.block_rows = 64, c.block_keys = 32, c.query_length = 172, c.key_length = 300; }},
      {"average_bool_mask", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.query_length = 130; }},
  };
  std::vector<Case> result;
  for (const Feature& feature : list)
    for (DType dtype : kDTypes) {
      Case c;
      c.name = std::string(feature.name) + "_" + dtype_name(dtype);
      c.dtype = dtype, c.return_weights = c.average_weights = true;
      feature.set(c);
      result.push_back(c);
    }
  return result;
}

inline const std::vector<Case>& cases() {
  static const std::vector<Case> list = [] {
    std::vector<Case> result;
    add_features(result);
    add_pairs(result);
    add_sizes(result);
    add_masks(result);
    add_others(result);
    add_long(result);
    add_random(result, 200, 1);
    return result;
  }();
  return list;
}

}  // namespace scaledot::testing
