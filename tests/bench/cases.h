// A case of the bench: a shape, a dtype, a pass and options; and the operations and bytes that it needs at least. The
// notation of shapes and the count of operations are those of `python -m scaledot compare` (python/scaledot/compare).
#pragma once

#include <algorithm>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/kernel.h"

namespace scaledot::bench {

constexpr int64_t kDecodeRows = 16, kTinyLength = 128;  // limits of compare's regimes "decode" and "tiny"

struct Shape {
  int64_t batch = 1, heads = 1, kv_heads = 1, query_length = 1, key_length = 1, head_dim = 1, value_dim = 1;

  // Reading the keys takes longer than the arithmetic.
  bool decode() const { return query_length <= kDecodeRows && key_length > kTinyLength; }
};

inline Shape parse_shape(const std::string& text) {
  static const std::regex form(R"((\d+)x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?)");
  std::smatch match;
  if (!std::regex_match(text, match, form))
    throw std::invalid_argument("'" + text + "' is no shape; write BxHxLxD, for example 1x8x1024x64 or " +
                                "1x32:8x1:4096x128 (query:KV heads and lengths; D may be query:value width)");
  const auto size = [&](size_t group, int64_t otherwise) {
    return match[group].matched ? int64_t(std::stoll(match[group])) : otherwise;
  };
  Shape s;
  s.batch = size(1, 0);
  s.heads = size(2, 0), s.kv_heads = size(3, s.heads);
  s.query_length = size(4, 0), s.key_length = size(5, s.query_length);
  s.head_dim = size(6, 0), s.value_dim = size(7, s.head_dim);
  if (s.batch * s.heads * s.kv_heads * s.query_length * s.key_length * s.head_dim * s.value_dim == 0)
    throw std::invalid_argument("shape '" + text + "' has a size of 0: there is nothing to time");
  if (s.heads % s.kv_heads)
    throw std::invalid_argument("shape '" + text + "': the query heads are not a multiple of the KV heads");
  return s;
}

inline std::string text_of(const Shape& s) {
  const auto pair = [](int64_t a, int64_t b) { return std::to_string(a) + (a == b ? "" : ":" + std::to_string(b)); };
  return std::to_string(s.batch) + "x" + pair(s.heads, s.kv_heads) + "x" + pair(s.query_length, s.key_length) + "x" +
         pair(s.head_dim, s.value_dim);
}

// boolean: (Lq, Lk), three of ten masked at random. padding: boolean (B, 1, 1, Lk), 40% to 80% of the keys remain.
// additive: (Lq, Lk). gradient: (1, H, Lq, Lk), added, and its gradient is computed in the backward.
enum class Mask { none, boolean, padding, additive, gradient };
constexpr const char* kMaskNames[] = {"none", "bool", "padding", "float", "grad"};

struct Options {
  bool causal = false;
  bool weights = false;
  bool keep = false;  // the forward keeps the weights for the backward
  bool blhd = false;  // (B, L, H, D) in memory, as projections produce it
  double dropout_p = 0;
  double softcap = 0;
  Mask mask = Mask::none;
  DType cache = DType::none;  // of quantised keys and values; none: the dtype of the case

  bool plain() const {
    return !causal && !weights && !keep && dropout_p == 0 && softcap == 0 && mask == Mask::none && cache == DType::none;
  }
};

struct NamedDType {
  const char* name;
  DType dtype;
};
constexpr NamedDType kDTypes[] = {{"float32", DType::float32},
                                  {"float64", DType::float64},
                                  {"bfloat16", DType::bfloat16},
                                  {"float16", DType::float16}};
constexpr NamedDType kCaches[] = {
    {"float8_e4m3fn", DType::float8_e4m3fn}, {"float8_e5m2", DType::float8_e5m2}, {"int8", DType::int8}};

inline const char* name_of(DType dtype) {
  for (const NamedDType& known : kDTypes)
    if (known.dtype == dtype) return known.name;
  for (const NamedDType& known : kCaches)
    if (known.dtype == dtype) return known.name;
  return "";
}

inline std::string text_of(const Options& o) {
  std::string text;
  if (o.causal) text += " causal";
  if (o.dropout_p > 0) text += " dropout";
  if (o.softcap > 0) text += " softcap";
  if (o.mask != Mask::none) text += std::string(" ") + kMaskNames[int(o.mask)] + "-mask";
  if (o.weights) text += " weights";
  if (o.keep) text += " keep";
  if (o.blhd) text += " blhd";
  if (o.cache != DType::none) text += std::string(" ") + name_of(o.cache);
  return text.empty() ? text : text.substr(1);
}

struct Case {
  Shape shape;
  DType dtype = DType::float32;
  Pass pass = Pass::forward;
  Options options;
};

constexpr const char* kPassNames[] = {"forward", "backward"};

inline const char* name_of(Pass pass) { return kPassNames[int(pass)]; }

// Scores that is_causal does not mask, of all heads. Other masks count as dense.
inline int64_t attended(const Case& c) {
  const Shape& s = c.shape;
  int64_t scores = s.query_length * s.key_length;
  if (c.options.causal) {
    scores = 0;
    for (int64_t i = 0; i < s.query_length; ++i) scores += std::min(i + 1, s.key_length);
  }
  return s.batch * s.heads * scores;
}

// Of the matrix products: two in the forward, and five in the backward, which recomputes the scores unless the forward
// has kept the weights.
inline double flops(const Case& c) {
  const int64_t d = c.shape.head_dim, dv = c.shape.value_dim;
  return 2.0 * double(attended(c)) * double(c.pass == Pass::forward ? d + dv : (c.options.keep ? 2 : 3) * d + 2 * dv);
}

// Bytes of all keys and values, each read once.
inline double key_value_bytes(const Case& c) {
  const Shape& s = c.shape;
  return double(s.batch * s.kv_heads * s.key_length * (s.head_dim + s.value_dim) *
                element_size(c.options.cache == DType::none ? c.dtype : c.options.cache));
}

}  // namespace scaledot::bench
