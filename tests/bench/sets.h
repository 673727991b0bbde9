// The named sets of cases. Together they are the cases that the kernels are optimised for.
#pragma once

#include "cases.h"

namespace scaledot::bench {

struct Item {
  std::string shape;
  Options options;
};

struct Set {
  const char* name;
  const char* about;
  std::vector<Item> items;
};

inline std::vector<Item> grid(const std::string& heads, const std::vector<int>& lengths, const std::vector<int>& dims,
                              Options options = {}) {
  std::vector<Item> items;
  for (int dim : dims)
    for (int length : lengths)
      items.push_back({heads + "x" + std::to_string(length) + "x" + std::to_string(dim), options});
  return items;
}

inline const std::vector<Set>& sets() {
  static const std::vector<Set> list = [] {
    const std::vector<int> lengths = {512, 1024, 2048, 4096}, shorter = {512, 1024, 2048}, dims = {64, 128};
    std::vector<Set> result = {
        {"plain", "512 to 4096 positions, D = 64 and 128, 8 heads", grid("1x8", lengths, dims)},
        {"causal", "the same, causal", grid("1x8", lengths, dims, {.causal = true})},
        {"dropout", "the same, dropout 0.1", grid("1x8", lengths, dims, {.dropout_p = 0.1})},
        {"mask", "the same, a boolean mask", grid("1x8", lengths, dims, {.mask = Mask::boolean})},
        {"mask_grad", "the same, a mask with gradient", grid("1x8", lengths, dims, {.mask = Mask::gradient})},
        {"padding", "a batch of 4, padded to the longest", grid("4x8", shorter, dims, {.mask = Mask::padding})},
        {"weights", "weights returned", grid("1x8", lengths, dims, {.weights = true})},
        {"widths", "head widths from 40 to 256, and d_v != d_k", grid("1x8", shorter, {40, 80, 96, 192, 256})},
        {"heads", "grouped heads, and (B, L, H, D) memory", grid("1x8:2", shorter, dims)},
        {"decode", "1 query, 4096 to 65536 keys", {}},
        {"cache", "the same over quantised keys and values, in every dtype", {}},
        {"tiny", "5 positions, and batches of 64 with up to 128", grid("64x8", {16, 32, 64, 128}, {64})},
    };
    const auto add = [&result](const std::string& set, const std::vector<Item>& items) {
      for (Set& s : result)
        if (set == s.name) s.items.insert(s.items.end(), items.begin(), items.end());
    };
    add("widths", {{"1x8x512x64:96", {}}, {"1x8x1024x64:96", {}}, {"1x8x1024x128:192", {}}});
    add("heads", grid("1x32:1", {1024}, dims));
    add("heads", grid("1x8", shorter, dims, {.blhd = true}));
    for (const char* heads : {"1x32x1:", "1x32:8x1:"})
      for (const char* keys : {"4096", "16384", "65536"}) add("decode", {{std::string(heads) + keys + "x128", {}}});
    for (const NamedDType& cache : kCaches)
      for (const char* shape : {"1x32x1:16384x128", "1x32:8x1:16384x128", "1x32:8x512:2048x128"})
        add("cache", {{shape, {.cache = cache.dtype}}});
    add("tiny", {{"1x1x5x64", {}}});
    Set bars = {"bars", "all of these but cache", {}};
    for (const Set& s : result)
      if (std::string(s.name) != "cache") bars.items.insert(bars.items.end(), s.items.begin(), s.items.end());
    result.push_back(bars);
    return result;
  }();
  return list;
}

}  // namespace scaledot::bench
