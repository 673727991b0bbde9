// The reference kernel: materialised, in float64, one plain loop per formula. It takes every problem. All kernels are
// tested against it. Its backward computes the weights again even where they were saved.
//
//   S = mask(scale * Q K^T)     P = softmax(S)     W = P * keep / (1 - dropout_p)     O = W V     (core/mask.h for S)
//   dW = dO V^T + dWeights      dP = dW * keep / (1 - dropout_p)
//   dS = P * (dP - rowsum(P * dP) + dlse)          dX = dS * (softcap's slope, 0 where the score was replaced)
//   dQ = scale * dX K           dK = scale * dX^T Q          dV = W^T dO           dMask = dS
//   of quantised keys and values K and V are the stored numbers times k_scale and v_scale
//   dBias[d] = sum of dS[i, j] over the i, j at distance d whose score was not replaced      (relative_bias)
#include "reference.h"

#include <cmath>
#include <limits>

#include "core/arena.h"
#include "core/mask.h"
#include "core/philox.h"
#include "core/saved.h"
#include "core/softmax.h"
#include "core/varlen.h"

namespace scaledot {
namespace {

// A sum whose error does not grow with the number of terms: A. Neumaier, "Rundungsfehleranalyse einiger Verfahren zur
// Summation endlicher Summen", 1974. Many equal terms would all be rounded in the same direction. What an addition
// loses is computed without asking which of the two numbers is larger, because CPUs guess the answer and are often
// wrong: D. E. Knuth, "The Art of Computer Programming", volume 2, section 4.2.2, theorem B.
class Sum {
 public:
  void add(double term) {
    const double sum = sum_ + term, added = sum - sum_;
    lost_ += (sum_ - (sum - added)) + (term - added);
    sum_ = sum;
  }
  double value() const { return std::isfinite(sum_) ? sum_ + lost_ : sum_; }

 private:
  double sum_ = 0, lost_ = 0;
};

// The matrices of one worker, (query_length, key_length) unless noted.
struct Matrices {
  double* probability;  // P
  double* weight;       // W
  double* slope;        // dX / dS
  double* mean;         // of W over the heads
  double* grad_weight;  // dW, then dS
  double* key;          // K (key_length, head_dim)
  double* value;        // V (key_length, value_dim)
  double* row;          // of Q or dO
  Sum* row_sums;        // a row of O or dQ
  double* lse;          // (query_length)
  uint8_t* state;       // core/mask.h: kMasked, kLive, kReplaced
  double* additive;     // (key_length)
  Sum* grad_key;        // (key_length, head_dim), over the heads that share the keys
  Sum* grad_value;      // (key_length, value_dim), the same
};

Matrices lay_out(const Problem& p, Pass pass, Arena& arena) {
  const int64_t scores = p.query_length * p.key_length;
  Matrices m = {};
  m.probability = take<double>(arena, scores);
  m.weight = take<double>(arena, scores);
  m.slope = take<double>(arena, scores);
  if (averages_weights(p)) m.mean = take<double>(arena, scores);
  m.key = take<double>(arena, p.key_length * p.head_dim);
  m.value = take<double>(arena, p.key_length * p.value_dim);
  m.row = take<double>(arena, max(p.head_dim, p.value_dim));
  m.row_sums = take<Sum>(arena, max(p.head_dim, p.value_dim));
  m.lse = take<double>(arena, p.query_length);
  m.state = take<uint8_t>(arena, scores);
  m.additive = take<double>(arena, p.key_length);
  if (pass == Pass::backward) {
    m.grad_weight = take<double>(arena, scores);
    m.grad_key = take<Sum>(arena, p.key_length * p.head_dim);
    m.grad_value = take<Sum>(arena, p.key_length * p.value_dim);
  }
  return m;
}

Matrices matrices_of(const Problem& p, Pass pass, const Executor& executor, int worker) {
  Arena size = {nullptr, 0};
  lay_out(p, pass, size);
  Arena arena = {static_cast<char*>(executor.workspace) + worker * size.used, 0};
  return lay_out(p, pass, arena);
}

// The sums of a gradient whose elements belong to several scores: as many as its tensor has elements in memory.
struct SharedSums {
  Sum* mask;
  Sum* relative;
};

// Elements from the first of grad_relative_bias to the last.
int64_t relative_extent(const Problem& p) {
  return offset(p, p.grad_relative_bias, p.batch - 1, p.heads - 1) + relative_entries(p);
}

SharedSums take_shared_sums(const Problem& p, Arena& arena) {
  SharedSums sums = {};
  if (p.grad_mask.data) sums.mask = take<Sum>(arena, grad_mask_extent(p));
  if (p.grad_relative_bias.data) sums.relative = take<Sum>(arena, relative_extent(p));
  return sums;
}

int64_t workspace(const Problem& p, Pass pass, int workers) {
  Arena arena = {nullptr, 0};
  lay_out(p, pass, arena);
  arena.used *= workers;
  if (pass == Pass::backward) take_shared_sums(p, arena);
  return arena.used;
}

// A (row, column) matrix of one batch and head, read and written as double. An absent one reads as 0.
struct Matrix {
  TensorView view;
  int64_t start;

  double operator()(int64_t row, int64_t col) const {
    const int64_t index = start + row * view.row_stride + col * view.col_stride;
    return view.data ? load_stored_element<double>(view.data, view.dtype, index) : 0.0;
  }
  void set(int64_t row, int64_t col, double x) const {
    store_element(view.data, view.dtype, start + row * view.row_stride + col * view.col_stride, x);
  }
};

Matrix matrix(const Problem& p, const TensorView& view, int64_t batch, int64_t head) {
  return {view, view.data ? offset(p, view, batch, head) : 0};
}

// The keys or values of one head, which may be in pages.
struct KeyMatrix {
  Matrix matrix;
  const Pages& pages;
  int64_t page_stride;
  double scale;  // k_scale or v_scale

  double operator()(int64_t row, int64_t col) const {
    if (pages.size == 0) return matrix(row, col) * scale;
    const TensorView& view = matrix.view;
    const int64_t at = paged_row(pages, page_stride, view.row_stride, row);
    return load_stored_element<double>(view.data, view.dtype, matrix.start + at + col * view.col_stride) * scale;
  }
};

KeyMatrix key_matrix(const Problem& p, int64_t batch, int64_t kv_head) {
  return {matrix(p, p.key, batch, kv_head), p.pages, p.pages.key_stride, cache_scale(p, p.k_scale, batch, kv_head)};
}
KeyMatrix value_matrix(const Problem& p, int64_t batch, int64_t kv_head) {
  return {matrix(p, p.value, batch, kv_head), p.pages, p.pages.value_stride, cache_scale(p, p.v_scale, batch, kv_head)};
}

// Reads rows of a matrix. Loops that read them many times then need not look up the dtype and the page each time.
template <class AnyMatrix>
void read_rows(const AnyMatrix& from, int64_t begin, int64_t end, int64_t cols, double* to) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t d = 0; d < cols; ++d) *to++ = from(i, d);
}

void clear(Sum* sums, int64_t size) {
  for (int64_t k = 0; k < size; ++k) sums[k] = {};
}

// P, W, the slope and lse of one batch and head. `lse`: of the rows over all keys, if the call has only a part of them.
void softmax_rows(const Problem& p, int64_t batch, int64_t head, const Matrices& m, const Matrix* lse = nullptr) {
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const Matrix query = matrix(p, p.query, batch, head);
  const bool has_additive = mask_use(p).additive;
  read_rows(key_matrix(p, batch, kv_head), 0, p.key_length, p.head_dim, m.key);
  for (int64_t i = 0; i < p.query_length; ++i) {
    read_rows(query, i, i + 1, p.head_dim, m.row);
    double* score = m.probability + i * p.key_length;
    double* weight = m.weight + i * p.key_length;
    double* slope = m.slope + i * p.key_length;
    uint8_t* state = m.state + i * p.key_length;
    row_terms<double>(p, batch, head, i, {0, p.key_length}, m.additive, state);
    RowState<double> row = empty_row<double>();
    for (int64_t j = 0; j < p.key_length; ++j) {
      Sum dot;
      for (int64_t d = 0; d < p.head_dim; ++d) dot.add(m.row[d] * m.key[j * p.head_dim + d]);
      const double x = dot.value() * p.scale;
      double s = p.softcap > 0 ? capped(x, p.softcap) : x;
      slope[j] = p.softcap > 0 ? capped_slope(s, p.softcap) : 1.0;
      if (has_additive) s += m.additive[j];
      if (state[j] == kReplaced) s = p.masked_score;
      if (state[j] == kMasked) s = -std::numeric_limits<double>::infinity();
      if (state[j] != kLive) slope[j] = 0;
      score[j] = s;
      if (s > row.maximum) row.maximum = s;  // a NaN is not the maximum, but reaches the sum
    }
    Sum exponentials;
    for (int64_t j = 0; j < p.key_length; ++j) {
      score[j] = state[j] == kMasked ? 0.0 : exp(score[j] - shift(row.maximum));
      exponentials.add(score[j]);
    }
    row.sum = exponentials.value();
    m.lse[i] = logsumexp(row);
    double inverse = normaliser(row);
    if (lse) {
      const double whole = (*lse)(i, 0);
      inverse = exp(shift(row.maximum) - shift(whole));
    }
    for (int64_t j = 0; j < p.key_length; ++j) {
      if (state[j] != kMasked) score[j] *= inverse;  // 0 * NaN is NaN
      weight[j] = score[j];
    }
    if (p.dropout_p > 0) {
      const DropoutRow stream = dropout_row(p, batch, head, i);
      for (int64_t j = 0; j < p.key_length; ++j)
        weight[j] *= dropout_keeps(stream, j) ? dropout_scale(p) : 0.0;  // NaN stays NaN
    }
  }
}

// The mean of W over the heads.
void average_weights(const Problem& p, const Executor& executor) {
  parallel(executor, p.batch, [&](int64_t batch, int worker) {
    const Matrices m = matrices_of(p, Pass::forward, executor, worker);
    const Matrix weights = matrix(p, p.weights, batch, 0);
    const int64_t scores = p.query_length * p.key_length;
    for (int64_t k = 0; k < scores; ++k) m.mean[k] = 0;
    for (int64_t head = 0; head < p.heads; ++head) {
      softmax_rows(p, batch, head, m);
      for (int64_t k = 0; k < scores; ++k) m.mean[k] += m.weight[k] / double(p.heads);
    }
    for (int64_t i = 0; i < p.query_length; ++i)
      for (int64_t j = 0; j < p.key_length; ++j) weights.set(i, j, m.mean[i * p.key_length + j]);
  });
}

void save_softmax(const Problem& p, const Matrix& kept, const Matrices& m) {
  for (int64_t i = 0; i < p.query_length; ++i)
    for (int64_t j = 0; j < saved_columns(p.saved_keys); ++j)
      kept.set(i, j, j < p.saved_keys ? m.probability[i * p.key_length + j] : 0.0);
}

// 0 if it is not finite.
double difference(double a, double b) { return std::isfinite(a - b) ? a - b : 0.0; }

void forward(const Problem& p, const Executor& executor) {
  parallel(executor, p.batch * p.heads, [&](int64_t task, int worker) {
    const int64_t batch = task / p.heads, head = task % p.heads;
    const Matrices m = matrices_of(p, Pass::forward, executor, worker);
    softmax_rows(p, batch, head, m);
    read_rows(value_matrix(p, batch, head / (p.heads / p.kv_heads)), 0, p.key_length, p.value_dim, m.value);
    const Matrix output = matrix(p, p.output, batch, head), lse = matrix(p, p.lse, batch, head);
    const Matrix weights = matrix(p, p.weights, batch, head), output_low = matrix(p, p.output_low, batch, head);
    if (saves_softmax(p)) save_softmax(p, matrix(p, p.saved_softmax, batch, head), m);
    for (int64_t i = 0; i < p.query_length; ++i) {
      const double* weight = m.weight + i * p.key_length;
      const uint8_t* state = m.state + i * p.key_length;
      clear(m.row_sums, p.value_dim);
      for (int64_t j = 0; j < p.key_length; ++j) {
        if (state[j] == kMasked) continue;
        for (int64_t d = 0; d < p.value_dim; ++d) m.row_sums[d].add(weight[j] * m.value[j * p.value_dim + d]);
      }
      for (int64_t d = 0; d < p.value_dim; ++d) {
        const double exact = m.row_sums[d].value();
        output.set(i, d, exact);
        if (output_low.view.data) output_low.set(i, d, difference(exact, output(i, d)));
      }
      if (lse.view.data) lse.set(i, 0, m.lse[i]);
      if (weights.view.data && !averages_weights(p))
        for (int64_t j = 0; j < p.key_length; ++j) weights.set(i, j, weight[j]);
    }
  });
  if (averages_weights(p)) average_weights(p, executor);
}

// dS into m.grad_weight.
void grad_scores(const Problem& p, int64_t batch, int64_t head, const Matrices& m) {
  read_rows(value_matrix(p, batch, head / (p.heads / p.kv_heads)), 0, p.key_length, p.value_dim, m.value);
  const Matrix grad_output = matrix(p, p.grad_output, batch, head), grad_lse = matrix(p, p.grad_lse, batch, head);
  const Matrix grad_weights = matrix(p, p.grad_weights, batch, head);
  const Matrix output = matrix(p, p.output, batch, head), output_low = matrix(p, p.output_low, batch, head);
  const Matrix weights = matrix(p, p.weights, batch, head);
  for (int64_t i = 0; i < p.query_length; ++i) {
    double* grad = m.grad_weight + i * p.key_length;
    const double* probability = m.probability + i * p.key_length;
    const uint8_t* state = m.state + i * p.key_length;
    read_rows(grad_output, i, i + 1, p.value_dim, m.row);
    Sum delta;
    for (int64_t j = 0; j < p.key_length; ++j) {
      grad[j] = 0;
      if (state[j] == kMasked) continue;
      Sum dot;
      for (int64_t d = 0; d < p.value_dim; ++d) dot.add(m.row[d] * m.value[j * p.value_dim + d]);
      dot.add(grad_weights(i, j));
      grad[j] = dot.value();
      if (p.dropout_p > 0)
        grad[j] = dropout_keeps(dropout_row(p, batch, head, i), j) ? grad[j] * dropout_scale(p) : 0.0;
      delta.add(probability[j] * grad[j]);
    }
    if (p.part.given) {
      // Over all keys: from the stored output and weights. dW only covers the keys of this part.
      delta = {};
      for (int64_t d = 0; d < p.value_dim; ++d) delta.add(m.row[d] * (output(i, d) + output_low(i, d)));
      for (int64_t j = 0; j < p.key_length; ++j)
        if (state[j] != kMasked) delta.add(grad_weights(i, j) * weights(i, j));
    }
    const double from_lse = grad_lse(i, 0);
    for (int64_t j = 0; j < p.key_length; ++j)
      grad[j] = state[j] == kMasked ? 0.0 : probability[j] * (grad[j] - delta.value() + from_lse);
  }
}

// Adds dS of a head to the gradients of attn_mask and relative_bias.
void add_shared_sums(const Problem& p, int64_t batch, int64_t head, const Matrices& m, const SharedSums& sums) {
  const int64_t mask = sums.mask ? offset(p, p.grad_mask, batch, head) : 0;
  const int64_t relative = sums.relative ? offset(p, p.grad_relative_bias, batch, head) : 0;
  const auto [low, high] = p.relative_range;
  for (int64_t i = 0; i < p.query_length; ++i)
    for (int64_t j = 0; j < p.key_length; ++j) {
      const double grad = m.grad_weight[i * p.key_length + j];
      const int64_t distance = j - (i + p.position.diagonal);
      if (sums.mask) sums.mask[mask + i * p.grad_mask.row_stride + j * p.grad_mask.col_stride].add(grad);
      const bool live = m.state[i * p.key_length + j] == kLive;  // a replaced score does not depend on the bias
      if (sums.relative && live) sums.relative[relative + min(max(distance, low), high) - low].add(grad);
    }
}

void backward_head(const Problem& p, int64_t batch, int64_t head, const Matrices& m, const SharedSums& sums) {
  const Matrix lse = matrix(p, p.lse, batch, head);
  softmax_rows(p, batch, head, m, p.part.given ? &lse : nullptr);
  grad_scores(p, batch, head, m);
  const Matrix query = matrix(p, p.query, batch, head);
  const Matrix grad_output = matrix(p, p.grad_output, batch, head), grad_query = matrix(p, p.grad_query, batch, head);
  add_shared_sums(p, batch, head, m, sums);
  for (int64_t i = 0; i < p.query_length; ++i) {
    const double* grad = m.grad_weight + i * p.key_length;
    const double* slope = m.slope + i * p.key_length;
    const double* weight = m.weight + i * p.key_length;
    const uint8_t* state = m.state + i * p.key_length;
    clear(m.row_sums, p.head_dim);
    read_rows(query, i, i + 1, p.head_dim, m.row);
    for (int64_t j = 0; j < p.key_length; ++j) {
      if (state[j] != kLive) continue;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        m.row_sums[d].add(grad[j] * slope[j] * m.key[j * p.head_dim + d]);
        m.grad_key[j * p.head_dim + d].add(grad[j] * slope[j] * p.scale * m.row[d]);
      }
    }
    for (int64_t d = 0; d < p.head_dim && grad_query.view.data; ++d)
      grad_query.set(i, d, m.row_sums[d].value() * p.scale);
    read_rows(grad_output, i, i + 1, p.value_dim, m.row);
    for (int64_t j = 0; j < p.key_length; ++j) {
      if (state[j] == kMasked) continue;
      for (int64_t d = 0; d < p.value_dim; ++d) m.grad_value[j * p.value_dim + d].add(weight[j] * m.row[d]);
    }
  }
}

// Writes the gradient of relative_bias. Several (batch, head) may share a row of it, and it may have gaps.
void store_relative(const Problem& p, const Sum* sums) {
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t head = 0; head < p.heads; ++head) {
      const int64_t start = offset(p, p.grad_relative_bias, batch, head);
      for (int64_t e = 0; e < relative_entries(p); ++e)
        store_element(p.grad_relative_bias.data, p.grad_relative_bias.dtype, start + e, sums[start + e].value());
    }
}

void store_rows(const Sum* from, const Matrix& to, int64_t rows, int64_t cols) {
  if (!to.view.data) return;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < cols; ++d) to.set(i, d, from[i * cols + d].value());
}

void backward(const Problem& p, const Executor& executor) {
  const int64_t kv_groups = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  Arena arena = {nullptr, 0};
  lay_out(p, Pass::backward, arena);
  arena = {static_cast<char*>(executor.workspace), arena.used * executor.workers};
  const SharedSums sums = take_shared_sums(p, arena);
  if (sums.mask) clear(sums.mask, grad_mask_extent(p));
  if (sums.relative) clear(sums.relative, relative_extent(p));
  // Any two KV groups may share an element of a gradient: then one task visits all KV groups, in order.
  const int64_t tasks = sums.mask || sums.relative ? 1 : kv_groups;
  parallel(executor, tasks, [&](int64_t task, int worker) {
    const Matrices m = matrices_of(p, Pass::backward, executor, worker);
    const int64_t keys = p.key_length * p.head_dim, values = p.key_length * p.value_dim;
    for (int64_t kv_group = task; kv_group < kv_groups; kv_group += tasks) {
      const int64_t batch = kv_group / p.kv_heads, kv_head = kv_group % p.kv_heads;
      clear(m.grad_key, keys), clear(m.grad_value, values);
      for (int64_t g = 0; g < group; ++g) backward_head(p, batch, kv_head * group + g, m, sums);
      store_rows(m.grad_key, matrix(p, p.grad_key, batch, kv_head), p.key_length, p.head_dim);
      store_rows(m.grad_value, matrix(p, p.grad_value, batch, kv_head), p.key_length, p.value_dim);
    }
  });
  for (int64_t k = 0; sums.mask && k < grad_mask_extent(p); ++k)
    store_element(p.grad_mask.data, p.grad_mask.dtype, k, sums.mask[k].value());
  if (sums.relative) store_relative(p, sums.relative);
}

const char* why_not(const Problem&, Pass) { return nullptr; }

}  // namespace

const Kernel kReferenceKernel = {"reference", why_not, workspace, forward, backward};

}  // namespace scaledot
