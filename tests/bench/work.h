// The tensors and the Problem of a case, and the check before it is timed.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "cases.h"
#include "core/dispatch.h"
#include "core/saved.h"
#include "reference.h"

namespace scaledot::bench {

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, FreeMemory>;

// Zeroed, so that the pages exist before anything is timed.
inline Memory allocate(int64_t bytes) {
  const size_t size = size_t(round_up(std::max<int64_t>(bytes, 1), kAlignment));
  Memory memory(std::aligned_alloc(size_t(kAlignment), size));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, size);
  return memory;
}

// The dimensions that a tensor has in memory. It is broadcast along the others.
struct Extent {
  bool batch = true, head = true, row = true;
};

class Work {
 public:
  explicit Work(const Case& c) : case_(c) {
    const Shape& s = c.shape;
    const bool backward = c.pass == Pass::backward;
    Problem& p = problem_;
    p.batch_dims = 1, p.batch_sizes[0] = p.batch = s.batch;
    p.heads = s.heads, p.kv_heads = s.kv_heads;
    p.query_length = s.query_length, p.key_length = s.key_length, p.head_dim = s.head_dim, p.value_dim = s.value_dim;
    p.dtype = c.dtype;
    p.scale = 1 / std::sqrt(double(s.head_dim));
    p.masked_score = -std::numeric_limits<double>::infinity();
    p.dropout_p = c.options.dropout_p;
    p.softcap = c.options.softcap;
    p.dropout_seed = kDropoutSeed;
    p.position.window_left = kUnbounded, p.position.window_right = c.options.causal ? 0 : kUnbounded;

    p.query = random(s.heads, s.query_length, s.head_dim);
    if (c.options.cache == DType::none) {
      p.key = random(s.kv_heads, s.key_length, s.head_dim);
      p.value = random(s.kv_heads, s.key_length, s.value_dim);
    } else {
      p.key = quantised(s.kv_heads, s.key_length, s.head_dim);
      p.value = quantised(s.kv_heads, s.key_length, s.value_dim);
      p.k_scale = p.v_scale = cache_scale();
    }
    add_mask();
    p.output = result("output", s.heads, s.query_length, s.value_dim);
    p.lse = result("lse", s.heads, s.query_length, 1, c.dtype == DType::float64 ? DType::float64 : DType::float32);
    if (c.options.weights) p.weights = result("weights", s.heads, s.query_length, s.key_length);
    if (c.options.keep) {
      p.saved_keys = s.key_length;
      p.saved_softmax = tensor(s.heads, s.query_length, saved_columns(s.key_length), p.lse.dtype, {}, false);
    }
    if (!backward) return;
    results_.clear();
    p.grad_output = random(s.heads, s.query_length, s.value_dim);
    if (c.options.weights) p.grad_weights = random(s.heads, s.query_length, s.key_length);
    p.grad_query = result("grad_query", s.heads, s.query_length, s.head_dim);
    p.grad_key = result("grad_key", s.kv_heads, s.key_length, s.head_dim);
    p.grad_value = result("grad_value", s.kv_heads, s.key_length, s.value_dim);
    if (c.options.mask == Mask::gradient)
      p.grad_mask = result("grad_mask", s.heads, s.query_length, s.key_length, c.dtype, {.batch = false});
  }

  struct Result {
    const char* name;
    const void* data;
    DType dtype;
    int64_t count;
  };

  const Problem& problem() const { return problem_; }
  // The results of the pass.
  const std::vector<Result>& results() const { return results_; }

 private:
  static constexpr int64_t kDropoutSeed[2] = {20170612, 0};

  TensorView tensor(int64_t heads, int64_t rows, int64_t cols, DType dtype, Extent extent, bool blhd) {
    TensorView v = {};
    const int64_t stored_heads = extent.head ? heads : 1, stored_rows = extent.row ? rows : 1;
    v.dtype = dtype;
    v.col_stride = cols > 1 ? 1 : 0;
    v.row_stride = !extent.row ? 0 : blhd ? stored_heads * cols : cols;
    v.head_stride = !extent.head ? 0 : blhd ? cols : stored_rows * cols;
    v.batch_stride[0] = extent.batch ? stored_heads * stored_rows * cols : 0;
    last_count_ = (extent.batch ? case_.shape.batch : 1) * stored_heads * stored_rows * cols;
    memory_.push_back(allocate(last_count_ * element_size(dtype)));
    v.data = memory_.back().get();
    return v;
  }

  TensorView result(const char* name, int64_t heads, int64_t rows, int64_t cols, DType dtype, Extent extent = {}) {
    const TensorView v = tensor(heads, rows, cols, dtype, extent, false);
    results_.push_back({name, v.data, dtype, last_count_});
    return v;
  }
  TensorView result(const char* name, int64_t heads, int64_t rows, int64_t cols) {
    return result(name, heads, rows, cols, case_.dtype);
  }

  // Uniform with unit variance: quick to draw, and scores are as large as with normal numbers.
  TensorView random(int64_t heads, int64_t rows, int64_t cols, Extent extent = {}) {
    const TensorView v = tensor(heads, rows, cols, case_.dtype, extent, case_.options.blhd);
    with_storage(v.dtype, [&](auto type) {
      auto* data = static_cast<typename decltype(type)::type*>(v.data);
      for (int64_t k = 0; k < last_count_; ++k) narrow((uniform() * 2 - 1) * std::sqrt(3.0), data[k]);
    });
    return v;
  }

  // Any bits that are finite in every dtype.
  TensorView quantised(int64_t heads, int64_t rows, int64_t cols) {
    const TensorView v = tensor(heads, rows, cols, case_.options.cache, {}, case_.options.blhd);
    auto* data = static_cast<uint8_t*>(v.data);
    for (int64_t k = 0; k < last_count_; ++k) data[k] = uint8_t(uniform() * 0x60) | (uniform() < 0.5 ? 0x80 : 0);
    return v;
  }

  // The reciprocal of the largest number, so that scores are as large as with normal numbers.
  TensorView cache_scale() {
    alignas(double) const uint8_t largest[sizeof(double)] = {0x5f};
    const TensorView v = tensor(1, 1, 1, DType::float32, {false, false, false}, false);
    *static_cast<float*>(v.data) = float(2 / load_stored_element<double>(largest, case_.options.cache, 0));
    return v;
  }

  void add_mask() {
    const Shape& s = case_.shape;
    switch (case_.options.mask) {
      case Mask::none: break;
      case Mask::boolean: {
        problem_.attn_mask = tensor(1, s.query_length, s.key_length, DType::boolean, {false, false, true}, false);
        bool* data = static_cast<bool*>(problem_.attn_mask.data);
        for (int64_t k = 0; k < last_count_; ++k) data[k] = uniform() < 0.7;
        break;
      }
      case Mask::padding: {
        problem_.attn_mask = tensor(1, 1, s.key_length, DType::boolean, {true, false, false}, false);
        bool* data = static_cast<bool*>(problem_.attn_mask.data);
        for (int64_t b = 0; b < s.batch; ++b) {
          const double share = s.batch > 1 ? 0.8 - 0.4 * double(b) / double(s.batch - 1) : 0.6;
          for (int64_t j = 0; j < s.key_length; ++j)
            data[b * s.key_length + j] = double(j) < share * double(s.key_length);
        }
        break;
      }
      case Mask::additive: problem_.attn_mask = random(1, s.query_length, s.key_length, {false, false, true}); break;
      case Mask::gradient: problem_.attn_mask = random(s.heads, s.query_length, s.key_length, {false, true, true});
    }
  }

  double uniform() {  // xorshift64
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return double(state_ >> 11) * 0x1p-53;
  }

  const Case case_;
  Problem problem_ = {};
  std::vector<Memory> memory_;
  std::vector<Result> results_;
  int64_t last_count_ = 0;  // elements of the last tensor
  uint64_t state_ = 0x9E3779B97F4A7C15u;
};

inline void run(const Kernel& kernel, const Problem& problem, Pass pass, const Executor& executor) {
  (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
}

inline void run_alone(const Kernel& kernel, const Problem& problem, Pass pass) {
  const auto in_turn = [](void*, int64_t tasks, void (*body)(void*, int64_t, int), void* state) {
    for (int64_t task = 0; task < tasks; ++task) body(state, task, 0);
  };
  const Memory workspace = allocate(kernel.workspace(problem, pass, 1));
  run(kernel, problem, pass, {1, workspace.get(), nullptr, in_turn});
}

// The same case at ragged lengths that the reference kernel computes quickly.
inline Case small(const Case& c, int64_t most_rows, int64_t most_keys) {
  Case result = c;
  Shape& s = result.shape;
  const int64_t group = s.heads / s.kv_heads;
  s.batch = std::min<int64_t>(s.batch, 2);
  s.kv_heads = std::min<int64_t>(s.kv_heads, 2), s.heads = s.kv_heads * group;
  s.query_length = std::min(s.query_length, most_rows), s.key_length = std::min(s.key_length, most_keys);
  return result;
}

// Throws if the kernel's results differ from the reference kernel's. The bound is loose: tests check exactness, this
// check only finds what is plainly wrong.
inline void check(const Kernel& kernel, const Case& c) {
  constexpr double kBound16Bit = 1e-2, kBound = 1e-4;
  constexpr int64_t kRows = 157, kKeys = 163, kDecodeKeys = 2300;
  // A kernel that does not take small problems is checked at the smallest size that it takes.
  Case reduced = c;
  for (int64_t factor = 1;; factor *= 2) {
    reduced = small(c, factor * kRows, factor * (c.shape.decode() ? kDecodeKeys : kKeys));
    if (c.options.causal) reduced.shape.key_length = reduced.shape.query_length;
    const bool whole =
        reduced.shape.query_length == c.shape.query_length && reduced.shape.key_length == c.shape.key_length;
    const char* reason = kernel.why_not(Work(reduced).problem(), c.pass);
    if (!reason) break;
    if (whole)
      throw std::runtime_error(std::string(kernel.name) + " does not take the case it is checked on: " + reason);
  }
  const Work found(reduced), expected(reduced);
  if (c.pass == Pass::backward) {
    run_alone(kReferenceKernel, found.problem(), Pass::forward);
    run_alone(kReferenceKernel, expected.problem(), Pass::forward);
  }
  run_alone(kernel, found.problem(), c.pass);
  run_alone(kReferenceKernel, expected.problem(), c.pass);
  for (size_t k = 0; k < found.results().size(); ++k) {
    const Work::Result &x = found.results()[k], &y = expected.results()[k];
    double error = 0, scale = 0;
    for (int64_t i = 0; i < x.count; ++i) {
      const double exact = load_element<double>(y.data, y.dtype, i);
      const double difference = std::abs(load_element<double>(x.data, x.dtype, i) - exact);
      error = std::max(error, std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
      scale = std::max(scale, std::abs(exact));
    }
    if (!(error <= (element_size(c.dtype) == 2 ? kBound16Bit : kBound) * scale))
      throw std::runtime_error(std::string(kernel.name) + ", " + name_of(c.pass) + " of " + text_of(reduced.shape) +
                               " " + name_of(c.dtype) + ": " + x.name + " is off by " + std::to_string(error) +
                               " where the largest element is " + std::to_string(scale));
  }
}

}  // namespace scaledot::bench
