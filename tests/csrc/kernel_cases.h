// The cases that every kernel of the table runs: those of tests/data/cases.txt, and lists of sizes and masks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "case_file.h"

namespace scaledot::testing {

constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};

inline const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"none",    "float32",       "float64",     "bfloat16", "float16",
                                    "boolean", "float8_e4m3fn", "float8_e5m2", "int8"};
  return kNames[int(dtype)];
}

constexpr DType kCaches[] = {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8};

struct Feature {
  const char* name;
  std::function<void(Case&)> set;
};

// The lines of a section, with every one of `dtypes`; `set` comes first.
template <class Set>
std::vector<Case> cases_of(const char* section, const std::vector<DType>& dtypes, const Set& set) {
  std::vector<Case> result;
  for (const CaseLine& line : case_lines(section))
    for (DType dtype : dtypes) {
      Case c;
      c.name = line.name + "_" + dtype_name(dtype), c.dtype = dtype;
      set(c);
      line.apply(c);
      if (c.dtype == dtype) result.push_back(c);
    }
  return result;
}

inline void add_section(std::vector<Case>& cases, const char* section) {
  for (const Case& c : cases_of(section, {std::begin(kDTypes), std::end(kDTypes)}, [](Case&) {})) cases.push_back(c);
}

// Every two features together, each combination in the next dtype and at the next ragged size. If both set the same
// field, the later one wins.
inline void add_pairs(std::vector<Case>& cases) {
  constexpr int64_t kSizes[][2] = {{37, 53}, {66, 35}, {19, 130}, {5, 17}, {49, 49}};
  const std::vector<CaseLine>& features = case_lines("features");
  size_t next = 0;
  for (size_t a = 1; a < features.size(); ++a)  // the first is plain
    for (size_t b = a + 1; b < features.size(); ++b, ++next) {
      Case c;
      c.dtype = kDTypes[next % 4];
      c.name = features[a].name + "_and_" + features[b].name + "_" + dtype_name(c.dtype);
      c.query_length = kSizes[next % 5][0], c.key_length = kSizes[next % 5][1];
      c.seed = next + 2;
      features[a].apply(c);
      features[b].apply(c);
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

inline std::vector<Case> quantised_cases() {
  std::vector<Case> result;
  for (DType cache : kCaches)
    for (Case& c :
         cases_of("quantised", {DType::float32, DType::bfloat16, DType::float16}, [=](Case& c) { c.cache = cache; })) {
      c.name = "quantised_" + c.name.insert(c.name.rfind('_') + 1, dtype_name(cache) + std::string("_"));
      result.push_back(c);
    }
  return result;
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

inline std::vector<Case> average_cases() {
  return cases_of("average", {std::begin(kDTypes), std::end(kDTypes)},
                  [](Case& c) { c.return_weights = c.average_weights = true; });
}

inline const std::vector<Case>& cases() {
  static const std::vector<Case> list = [] {
    std::vector<Case> result;
    add_section(result, "features");
    add_pairs(result);
    add_sizes(result);
    add_masks(result);
    add_section(result, "cases");
    add_random(result, 200, 1);
    return result;
  }();
  return list;
}

}  // namespace scaledot::testing
