// The second rung: one pass over the keys. No row of scores is kept: the maximum and the sum are those of the keys so
// far, and what was summed is rescaled when the maximum rises.
//
//   for each key j:  s = q_i . k_j / sqrt(D)      m' = max(m, s)      p = exp(s - m')      c = exp(m - m')
//                    l = l c + p                  o = o c + p v_j     m = m'
//   o_i = o / l
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
//   g++ -O3 -march=native -std=c++20 online_softmax.cpp && ./a.out
#include "check.h"

void online_softmax(const float* query, const float* key, const float* value, float* output) {
  for (int i = 0; i < kRows; ++i) {
    const float* const q = query + i * kDim;
    float out[kDim] = {}, highest = -INFINITY, sum = 0;
    for (int j = 0; j < kKeys; ++j) {
      const float *const k = key + j * kDim, *const v = value + j * kDim;
      float dot = 0;
      for (int d = 0; d < kDim; ++d) dot += q[d] * k[d];
      const float score = dot / std::sqrt(float(kDim));
      if (score > highest) {  // seldom: about log(kKeys) times a row
        const float rescale = std::exp(highest - score);
        sum *= rescale;
        for (float& x : out) x *= rescale;
        highest = score;
      }
      const float weight = std::exp(score - highest);
      sum += weight;
      for (int d = 0; d < kDim; ++d) out[d] += weight * v[d];
    }
    for (int d = 0; d < kDim; ++d) output[i * kDim + d] = out[d] / sum;
  }
}

int main() { return check("online_softmax", online_softmax); }
