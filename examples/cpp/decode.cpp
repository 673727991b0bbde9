// Inference in C++: a layer decodes one token at a time with a key-value cache, without gradients.
// CMakeLists.txt says how to build it. The results are compared with those of one causal pass over all tokens.
#include <c10/core/InferenceMode.h>
#include <scaledot/scaledot.h>
#include <torch/utils.h>

#include <algorithm>
#include <iostream>

using torch::Tensor;

constexpr int64_t kWidth = 64, kHeads = 8, kKvHeads = 2, kTokens = 24;

// (1, tokens, heads * head_dim) -> (1, heads, tokens, head_dim)
Tensor split_heads(const Tensor& projected, int64_t heads) {
  return projected.unflatten(-1, {heads, -1}).transpose(1, 2);
}

int main() {
  const c10::InferenceMode no_gradients;  // no graph is recorded, and nothing is saved for a backward
  torch::manual_seed(0);
  scaledot::nn::MultiHeadAttention layer(
      scaledot::nn::MultiHeadAttentionOptions(kWidth, kHeads).num_kv_heads(kKvHeads).dropout(0.1));
  layer->eval();  // without dropout
  const Tensor tokens = torch::randn({1, kTokens, kWidth});

  // All tokens at once: token i attends to tokens 0 to i.
  const Tensor expected = std::get<0>(layer->forward(tokens, {}, {}, {}, {}, /*is_causal=*/true));

  // One token at a time: its key and value are added to the cache, and its query attends to all of the cache.
  const Tensor keys = torch::empty({1, kKvHeads, kTokens, kWidth / kHeads}), values = torch::empty_like(keys);
  scaledot::SdpaOptions options;
  options.enable_gqa = true;
  double difference = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const Tensor token = tokens.narrow(1, t, 1);
    keys.narrow(2, t, 1).copy_(split_heads(layer->k_proj(token), kKvHeads));
    values.narrow(2, t, 1).copy_(split_heads(layer->v_proj(token), kKvHeads));
    const scaledot::SdpaResult attended = scaledot::scaled_dot_product_attention(
        split_heads(layer->q_proj(token), kHeads), keys.narrow(2, 0, t + 1), values.narrow(2, 0, t + 1), options);
    const Tensor output = layer->out_proj(attended.output.transpose(1, 2).flatten(2));
    difference = std::max(difference, (output - expected.narrow(1, t, 1)).abs().max().item<double>());
  }

  const bool close = difference < 1e-5;
  std::cout << kTokens << " tokens decoded, requires_grad: " << std::boolalpha << expected.requires_grad()
            << "\nlargest difference from one causal pass: " << difference << (close ? "" : ", which is too much")
            << '\n';
  return close ? 0 : 1;
}
