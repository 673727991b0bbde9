// The third rung: tiles of queries meet tiles of keys, so both products are matrix products on data in the cache.
//
//   for each tile of queries, for each tile of keys:
//     S = Q K^T / sqrt(D)      m' = max(m, rowmax S)      P = exp(S - m')      l = l exp(m - m') + rowsum P
//     O = O exp(m - m') + P V
//   output = O / l
// K^T and V are packed into panels of kPanel columns, which multiply() reads from front to back.
// Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021; Dao et al., "FlashAttention", 2022.
//   g++ -O3 -march=native -std=c++20 tiled.cpp && ./a.out
#include "check.h"
#include "vec.h"

constexpr int kTileRows = 48, kTileKeys = 128, kMicroRows = 6, kPanel = 2 * kLanes;
float* panel_of(float* panels, int depth, int column) { return panels + column / kPanel * depth * kPanel; }

// C (+)= factor A B, with the sums of kMicroRows rows and one panel in registers.
void multiply(int depth, int cols, const float* a, int a_row, float* b, float* c, int c_row, float factor, bool add) {
  for (int j = 0; j < cols; j += kPanel)
    for (int i = 0; i < kTileRows; i += kMicroRows) {
      Vector left[kMicroRows] = {}, right[kMicroRows] = {};
      for (int k = 0; k < depth; ++k) {
        float* const line = panel_of(b, depth, j) + k * kPanel;
        for (int r = 0; r < kMicroRows; ++r) {
          left[r] += a[(i + r) * a_row + k] * load(line);
          right[r] += a[(i + r) * a_row + k] * load(line + kLanes);
        }
      }
      for (int r = 0; r < kMicroRows; ++r) {
        float* const to = c + (i + r) * c_row + j;
        store(to, (add ? load(to) : Vector{}) + factor * left[r]);
        store(to + kLanes, (add ? load(to + kLanes) : Vector{}) + factor * right[r]);
      }
    }
}

void tiled(const float* query, const float* key, const float* value, float* output) {
  std::vector<float> keys(kKeys * kDim), values(kKeys * kDim), scores(kTileRows * kTileKeys);
  for (int j = 0; j < kKeys; ++j)  // pack: of each key tile, K^T in panels of keys, and V in panels of columns
    for (int d = 0, t = j / kTileKeys * kTileKeys, in_tile = j - t; d < kDim; ++d) {
      panel_of(&keys[t * kDim], kDim, in_tile)[d * kPanel + in_tile % kPanel] = key[j * kDim + d];
      panel_of(&values[t * kDim], kTileKeys, d)[in_tile * kPanel + d % kPanel] = value[j * kDim + d];
    }
  for (int i = 0; i < kRows; i += kTileRows) {
    float* const out = output + i * kDim;
    std::vector<float> highest(kTileRows, -INFINITY), sum(kTileRows);
    for (int t = 0; t < kKeys; t += kTileKeys) {
      multiply(kDim, kTileKeys, query + i * kDim, kDim, &keys[t * kDim], scores.data(), kTileKeys,
               1 / std::sqrt(float(kDim)), false);
      for (int r = 0; r < kTileRows; ++r) {
        float* const row = &scores[r * kTileKeys];
        const float now = std::max(highest[r], *std::max_element(row, row + kTileKeys));
        const float rescale = std::exp(highest[r] - now);
        Vector sums = {};
        for (int j = 0; j < kTileKeys; j += kLanes) {
          const Vector weights = exp_of(load(row + j) - now);
          store(row + j, weights);
          sums += weights;
        }
        sum[r] *= rescale, highest[r] = now;
        for (int lane = 0; lane < kLanes; ++lane) sum[r] += sums[lane];
        for (int d = 0; t > 0 && d < kDim; ++d) out[r * kDim + d] *= rescale;
      }
      multiply(kTileKeys, kDim, scores.data(), kTileKeys, &values[t * kDim], out, kDim, 1, t > 0);
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int d = 0; d < kDim; ++d) out[r * kDim + d] /= sum[r];
  }
}

int main() { return check("tiled", tiled); }
