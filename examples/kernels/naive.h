// The first rung: the formula as three loops. It keeps the whole row of scores, and reads all keys and values for each
// query. With T = double it is also the result that the programs are compared with.
//
//   S_j = q_i . k_j / sqrt(D)    m = max_j S_j    P_j = exp(S_j - m)    l = sum_j P_j    o_i = sum_j P_j v_j / l
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

constexpr int kRows = 768, kKeys = 768, kDim = 64;  // queries, keys, D; one head

template <class T>
void naive(const T* query, const T* key, const T* value, T* output) {
  std::vector<T> score(kKeys);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKeys; ++j) {
      T dot = 0;
      for (int d = 0; d < kDim; ++d) dot += query[i * kDim + d] * key[j * kDim + d];
      score[j] = dot / std::sqrt(T(kDim));
    }
    const T highest = *std::max_element(score.begin(), score.end());
    T sum = 0;
    for (T& s : score) sum += s = std::exp(s - highest);
    T* const out = output + i * kDim;
    std::fill(out, out + kDim, T(0));
    for (int j = 0; j < kKeys; ++j)
      for (int d = 0; d < kDim; ++d) out[d] += score[j] / sum * value[j * kDim + d];
  }
}
