// scaledot::nn::MultiHeadAttention: its parameters, its masks against a plain formula, and what it refuses.
#include "nn/multi_head_attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <sstream>

namespace scaledot::nn {
namespace {

using torch::Tensor;
using Options = MultiHeadAttentionOptions;

Tensor heads_of(const Tensor& projected, int64_t heads) { return projected.unflatten(-1, {heads, -1}).transpose(1, 2); }

// The layer's output with torch's own attention and one mask that says everything.
Tensor plain(MultiHeadAttention& layer, const Tensor& query, const Tensor& key, const Tensor& value,
             const std::optional<Tensor>& mask) {
  const int64_t heads = layer->options.num_heads(), kv_heads = layer->options.num_kv_heads().value_or(heads);
  const auto repeated = [&](const Tensor& x) { return heads_of(x, kv_heads).repeat_interleave(heads / kv_heads, 1); };
  const Tensor output = at::scaled_dot_product_attention(heads_of(layer->q_proj->forward(query), heads),
                                                         repeated(layer->k_proj->forward(key)),
                                                         repeated(layer->v_proj->forward(value)), mask);
  return layer->out_proj->forward(output.transpose(1, 2).flatten(2));
}

void expect_close(const Tensor& found, const Tensor& expected) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_LT((found - expected).abs().max().item<double>(), 1e-12);
}

TEST(MultiHeadAttentionModule, ParametersHavePythonsNamesAndShapes) {
  MultiHeadAttention layer(Options(24, 4).kdim(10).vdim(12).out_dim(7).qk_dim(32).v_dim(20).num_kv_heads(2));
  const std::vector<std::pair<std::string, std::vector<int64_t>>> expected = {
      {"q_proj.weight", {32, 24}}, {"q_proj.bias", {32}}, {"k_proj.weight", {16, 10}},  {"k_proj.bias", {16}},
      {"v_proj.weight", {10, 12}}, {"v_proj.bias", {10}}, {"out_proj.weight", {7, 20}}, {"out_proj.bias", {7}},
  };
  const auto parameters = layer->named_parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (const auto& [name, shape] : expected) {
    ASSERT_TRUE(parameters.contains(name)) << name;
    EXPECT_EQ(parameters[name].sizes(), torch::IntArrayRef(shape)) << name;
  }
  EXPECT_EQ(layer->q_proj->bias.abs().max().item<float>(), 0.0f);
  EXPECT_EQ(MultiHeadAttention(Options(8, 2).bias(false).out_proj(false))->named_parameters().size(), size_t(3));
}

TEST(MultiHeadAttentionModule, ABlockMaskIsTheMaskThatItStandsFor) {
  torch::manual_seed(3);
  MultiHeadAttention layer(Options(16, 4));
  layer->to(torch::kDouble);
  const Tensor x = torch::randn({2, 40, 16}, torch::dtype(torch::kDouble));
  for (const int64_t block : {1, 16, 70, 128}) {
    Tensor mask = torch::rand({2, 1, 40, 40}) < 0.5;
    mask.slice(-1, 16, 32).fill_(false);
    mask.slice(-2, 0, 16).fill_(true);
    const BlockMask blocks = BlockMask::from_dense(mask, block, 16);
    EXPECT_TRUE(blocks.to_dense().equal(mask)) << block;
    const auto found = layer->forward(x, {}, {}, {}, {}, /*is_causal=*/true, {}, /*need_weights=*/true, {}, blocks);
    const auto expected = layer->forward(x, {}, {}, mask, {}, /*is_causal=*/true, {}, /*need_weights=*/true);
    expect_close(std::get<0>(found), std::get<0>(expected));
    expect_close(std::get<1>(found), std::get<1>(expected));
  }
  const BlockMask other = BlockMask::from_dense(torch::ones({40, 39}, torch::kBool));
  EXPECT_THROW(layer->forward(x, {}, {}, {}, {}, false, {}, false, {}, other), c10::ValueError);
  EXPECT_THROW(BlockMask::from_dense(torch::ones({40, 40})), c10::TypeError);
  EXPECT_THROW(BlockMask::from_dense(torch::ones({40, 40}, torch::kBool), 0), c10::ValueError);
}

TEST(MultiHeadAttentionModule, MasksComposeAsThePlainFormula) {
  torch::manual_seed(2);
  MultiHeadAttention layer(Options(16, 4).num_kv_heads(2).kdim(6).vdim(5));
  layer->to(torch::kDouble);
  const auto options = torch::TensorOptions().dtype(torch::kDouble);
  const Tensor query = torch::randn({2, 7, 16}, options), key = torch::randn({2, 9, 6}, options);
  const Tensor value = torch::randn({2, 9, 5}, options), bias = torch::randn({4, 7, 9}, options);
  const Tensor key_mask = torch::tensor({8, 4}).unsqueeze(1) > torch::arange(9);
  const Tensor causal = torch::ones({7, 9}, torch::kBool).tril(), window = causal & torch::ones_like(causal).triu(-3);
  const Tensor allowed = torch::rand({2, 1, 7, 9}) < 0.8;
  const Tensor none, padding = key_mask.unsqueeze(1).unsqueeze(1);
  const auto output = [&](const Tensor& mask, const Tensor& keys, bool is_causal, const Window& limits) {
    return std::get<0>(layer->forward(query, key, value, mask, keys, is_causal, limits));
  };
  const auto additive = [](const Tensor& attends) {
    return torch::zeros_like(attends, torch::kDouble).masked_fill(~attends, -std::numeric_limits<double>::infinity());
  };
  expect_close(output(none, none, false, {}), plain(layer, query, key, value, std::nullopt));
  expect_close(output(none, none, true, {}), plain(layer, query, key, value, causal));
  expect_close(output(none, key_mask, true, {}), plain(layer, query, key, value, causal & padding));
  expect_close(output(none, key_mask[1], false, {}), plain(layer, query, key, value, key_mask[1].expand({7, 9})));
  expect_close(output(bias, none, true, {}), plain(layer, query, key, value, bias + additive(causal)));
  const Tensor seen = window & padding;
  const Tensor seen_by = seen.any(-1).all(1).unsqueeze(-1);  // torch's formula has NaN in the rows that see nothing
  expect_close(output(bias, key_mask, true, Window{3, std::nullopt}).masked_fill(~seen_by, 0.0),
               plain(layer, query, key, value, bias + additive(seen)).masked_fill(~seen_by, 0.0));
  const Tensor both = allowed & padding & causal;
  const Tensor both_by = both.any(-1).all(1).unsqueeze(-1);
  expect_close(output(allowed, key_mask, true, {}).masked_fill(~both_by, 0.0),
               plain(layer, query, key, value, both).masked_fill(~both_by, 0.0));
}

TEST(MultiHeadAttentionModule, GradientsAreThePlainFormulas) {
  torch::manual_seed(4);
  MultiHeadAttention layer(Options(12, 3).vdim(5).v_dim(6).out_dim(4));
  layer->to(torch::kDouble);
  const Tensor query = torch::randn({2, 6, 12}, torch::kDouble), value = torch::randn({2, 6, 5}, torch::kDouble);
  const auto gradients = [&](const Tensor& output) {
    return torch::autograd::grad({output.square().sum()}, layer->parameters());
  };
  const auto found = gradients(std::get<0>(layer->forward(query, {}, value)));
  const auto expected = gradients(plain(layer, query, query, value, std::nullopt));
  ASSERT_EQ(found.size(), size_t(8));
  for (size_t k = 0; k < found.size(); ++k) expect_close(found[k], expected[k]);
}

TEST(MultiHeadAttentionModule, RelativeBiasIsAMaskOfDistances) {
  torch::manual_seed(6);
  MultiHeadAttention layer(Options(12, 3));
  layer->to(torch::kDouble);
  const Tensor x = torch::randn({2, 7, 12}, torch::kDouble);
  const Tensor bias = torch::randn({3, 5}, torch::kDouble).requires_grad_();
  const Tensor distance = torch::arange(7) - torch::arange(7).unsqueeze(1);
  const Tensor mask = bias.index_select(1, (distance.clamp(-2, 2) + 2).flatten()).view({3, 7, 7});
  const Tensor output = std::get<0>(layer->forward(x, {}, {}, {}, {}, false, {}, false, bias));
  const Tensor expected = plain(layer, x, x, x, mask);
  expect_close(output, expected);
  expect_close(torch::autograd::grad({output.square().sum()}, {bias})[0],
               torch::autograd::grad({expected.square().sum()}, {bias})[0]);
}

TEST(MultiHeadAttentionModule, UnbatchedAndDefaultInputsAreTheBatchedOnes) {
  torch::manual_seed(5);
  MultiHeadAttention layer(Options(12, 3));
  layer->to(torch::kDouble);
  const Tensor query = torch::randn({7, 12}, torch::kDouble), key = torch::randn({9, 12}, torch::kDouble);
  const Tensor key_mask = torch::arange(9) < 6;
  const auto all = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
    return layer->forward(q, k, v, {}, mask, false, {}, /*need_weights=*/true);
  };
  const auto [output, weights] = all(query, key, {}, key_mask);
  const auto [batched_output, batched_weights] =
      all(query.unsqueeze(0), key.unsqueeze(0), key.unsqueeze(0), key_mask.unsqueeze(0));
  expect_close(output, batched_output[0]);
  expect_close(weights, batched_weights[0]);
  expect_close(weights.sum(-1), torch::ones({3, 7}, torch::kDouble));
  EXPECT_EQ(weights.slice(2, 6, 9).abs().max().item<double>(), 0.0);
  expect_close(std::get<0>(all(query, {}, {}, {})), std::get<0>(all(query, query, query, {})));
}

TEST(MultiHeadAttentionModule, DropsOutInTrainingOnly) {
  torch::manual_seed(3);
  MultiHeadAttention layer(Options(16, 2).dropout(0.5));
  const Tensor x = torch::randn({1, 30, 16});
  const auto weights = [&] { return std::get<1>(layer->forward(x, {}, {}, {}, {}, false, {}, /*need_weights=*/true)); };
  layer->eval();
  EXPECT_EQ((weights() == 0).sum().item<int64_t>(), 0);
  layer->train();
  const double dropped = (weights() == 0).to(torch::kDouble).mean().item<double>();
  EXPECT_NEAR(dropped, 0.5, 0.06);  // 1800 weights: five standard deviations
}

TEST(MultiHeadAttentionModule, PrintsItsOptions) {
  std::ostringstream text;
  text << MultiHeadAttention(Options(16, 4).num_kv_heads(2).bias(false).dropout(0.25));
  const std::string options =
      "scaledot::nn::MultiHeadAttention(embed_dim=16, num_heads=4, num_kv_heads=2, bias=false, "
      "dropout=0.25)";
  EXPECT_EQ(text.str().rfind(options, 0), size_t(0)) << text.str();
}

// The message that `body` throws, or nothing.
template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(MultiHeadAttentionModule, RefusesWrongOptionsByName) {
  const std::vector<std::pair<std::string, Options>> cases = {
      {"embed_dim", Options(0, 1)},
      {"num_heads", Options(8, 0)},
      {"qk_dim", Options(10, 3)},
      {"qk_dim", Options(12, 3).qk_dim(10)},
      {"v_dim", Options(12, 3).v_dim(10)},
      {"num_kv_heads", Options(12, 4).num_kv_heads(3)},
      {"num_kv_heads", Options(12, 4).num_kv_heads(0)},
      {"kdim", Options(12, 3).kdim(-1)},
      {"vdim", Options(12, 3).vdim(0)},
      {"out_dim", Options(12, 3).out_dim(0)},
      {"out_dim", Options(12, 3).out_dim(6).out_proj(false)},
      {"dropout", Options(12, 3).dropout(1.5)},
      {"dropout", Options(12, 3).dropout(std::nan(""))},
  };
  for (const auto& [name, options] : cases) {
    const std::string message = message_of([options = options] { MultiHeadAttention layer(options); });
    EXPECT_EQ(message.rfind(name + ": got ", 0), size_t(0)) << name << ": '" << message << "'";
  }
}

TEST(MultiHeadAttentionModule, RefusesWrongTensorsByName) {
  MultiHeadAttention layer(Options(8, 2).kdim(6));
  const Tensor query = torch::randn({2, 5, 8}), key = torch::randn({2, 7, 6}), value = torch::randn({2, 7, 8}), none;
  const Tensor mask = torch::ones({2, 7}, torch::kBool);
  const auto message = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& m, const Tensor& km) {
    return message_of([&] { layer->forward(q, k, v, m, km); });
  };
  const auto starts = [](const std::string& text, const std::string& name) {
    EXPECT_EQ(text.rfind(name + ": got ", 0), size_t(0)) << name << ": '" << text << "'";
  };
  EXPECT_EQ(message(query, key, value, none, mask), "");
  starts(message(none, key, value, none, none), "query");
  starts(message(torch::randn({8}), key, value, none, none), "query");
  starts(message(torch::randn({2, 5, 9}), key, value, none, none), "query");
  starts(message(query, none, value, none, none), "key");  // query stands for it, which is 8 wide
  starts(message(query, key[0], value, none, none), "key");
  starts(message(query, key, none, none, none), "value");
  starts(message(query, key, value, torch::zeros({5, 4}), mask), "attn_mask");
  starts(message(query, key, value, torch::zeros({3, 1, 5, 7}), mask), "attn_mask");
  starts(message(query, key, value, torch::zeros({5, 7}, torch::kInt), mask), "attn_mask");
}

TEST(MultiHeadAttentionModule, SaysWhatAKeyMaskNeeds) {
  MultiHeadAttention layer(Options(8, 2));
  const Tensor query = torch::randn({2, 5, 8}), key = torch::randn({2, 7, 8}), none;
  const Tensor mask = torch::ones({2, 7}, torch::kBool);
  const auto message = [&](const Tensor& q, const Tensor& k, const Tensor& key_mask) {
    return message_of([&] { layer->forward(q, k, k, none, key_mask); });
  };
  EXPECT_EQ(message(query, key, mask), "");
  EXPECT_EQ(message(query, key, mask.to(torch::kInt)),
            "key_mask: got dtype torch.int32; needs torch.bool, true = may attend");
  EXPECT_EQ(message(query, key, torch::zeros({2, 7})),
            "key_mask: got dtype torch.float32; needs torch.bool, true = may attend");
  EXPECT_EQ(message(query, key, mask.slice(1, 0, 6)),
            "key_mask: got shape [2, 6]; needs [2, 7] or [7], from the shape of key");
  EXPECT_EQ(message(query, key, mask[0].slice(0, 0, 6)),
            "key_mask: got shape [6]; needs [2, 7] or [7], from the shape of key");
  EXPECT_EQ(message(query[0], key[0], mask), "key_mask: got shape [2, 7]; needs [7], from the shape of key");
}

}  // namespace
}  // namespace scaledot::nn
