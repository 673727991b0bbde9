// Checks of the C++ API: the function and its gradients, packed sequences, errors, and the layer.
//   attention               all checks but one
//   attention LAYER.pt      all checks: the last compares the layer with Python's. test_cpp_package.py writes LAYER.pt.
// The exit code is 0 if all checks pass. Otherwise the program prints the first check that fails.
#include <ATen/CPUGeneratorImpl.h>
#include <scaledot/scaledot.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

namespace {

using torch::Tensor;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << "FAILED: " << what << '\n';
  std::exit(1);
}

void expect_close(const Tensor& found, const Tensor& expected, const std::string& what, double tolerance = 1e-10) {
  expect(found.sizes() == expected.sizes(), what + ": shape");
  const double error = (found - expected).abs().max().item<double>();
  expect(error <= tolerance, what + ": off by " + std::to_string(error));
}

// softmax(query key^T / sqrt(head_dim) + mask, causal) value, in torch's operators.
Tensor plain_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask) {
  const Tensor scores = query.matmul(key.transpose(-2, -1)) / std::sqrt(double(query.size(-1)));
  const Tensor causal = torch::ones({query.size(-2), key.size(-2)}, torch::kBool).tril();
  return (scores + mask).masked_fill(~causal, -INFINITY).softmax(-1).matmul(value);
}

void function_and_gradients() {
  const auto options = torch::TensorOptions().dtype(torch::kDouble).requires_grad(true);
  const Tensor query = torch::randn({2, 3, 17, 8}, options), key = torch::randn({2, 3, 23, 8}, options);
  const Tensor value = torch::randn({2, 3, 23, 5}, options), mask = torch::randn({3, 17, 1}, options);
  scaledot::SdpaOptions call;
  call.attn_mask = mask;
  call.is_causal = true;
  call.return_weights = true;
  const scaledot::SdpaResult result = scaledot::scaled_dot_product_attention(query, key, value, call);
  const Tensor expected = plain_attention(query, key, value, mask);
  expect_close(result.output, expected, "output");
  expect_close(result.weights.matmul(value), expected, "weights");

  const Tensor grad = torch::randn_like(expected);
  const auto found = torch::autograd::grad({result.output}, {query, key, value, mask}, {grad});
  const auto exact = torch::autograd::grad({expected}, {query, key, value, mask}, {grad});
  const char* names[] = {"grad_query", "grad_key", "grad_value", "grad_mask"};
  for (size_t k = 0; k < 4; ++k) expect_close(found[k], exact[k], names[k]);
}

void dropout_repeats_with_its_seed() {
  const Tensor query = torch::randn({1, 2, 9, 16});
  scaledot::SdpaOptions call;
  call.dropout_p = 0.5;
  call.dropout_seed = torch::tensor({int64_t(42), int64_t(7)});
  const Tensor first = scaledot::scaled_dot_product_attention(query, query, query, call).output;
  expect_close(scaledot::scaled_dot_product_attention(query, query, query, call).output, first, "the same seed", 0);
  call.dropout_seed = torch::tensor({int64_t(43), int64_t(7)});
  const Tensor other = scaledot::scaled_dot_product_attention(query, query, query, call).output;
  expect(!torch::equal(first, other), "a different seed drops different weights");
}

// A packed sequence gets the same output and gradients as in a call by itself.
void packed_sequences_and_gradients() {
  const auto options = torch::TensorOptions().dtype(torch::kDouble).requires_grad(true);
  const Tensor query = torch::randn({9, 4, 8}, options), key = torch::randn({12, 2, 8}, options);
  const Tensor value = torch::randn({12, 2, 5}, options);
  const Tensor cu_seq_q = torch::tensor({0, 4, 9}, torch::kInt), cu_seq_k = torch::tensor({0, 7, 12}, torch::kInt);
  scaledot::VarlenOptions call;
  call.is_causal = true;
  call.enable_gqa = true;
  const scaledot::VarlenResult result = scaledot::varlen_attention(query, key, value, cu_seq_q, cu_seq_k, 5, 7, call);

  scaledot::SdpaOptions alone;
  alone.is_causal = true;
  alone.enable_gqa = true;
  alone.causal_alignment = "lower_right";
  std::vector<Tensor> outputs, lses;
  const int64_t rows[] = {0, 4, 9}, keys[] = {0, 7, 12};
  for (int b = 0; b < 2; ++b) {
    const auto rows_of = [b](const Tensor& packed, const int64_t* bounds) {
      return packed.slice(0, bounds[b], bounds[b + 1]).transpose(0, 1);
    };
    const scaledot::SdpaResult one =
        scaledot::scaled_dot_product_attention(rows_of(query, rows), rows_of(key, keys), rows_of(value, keys), alone);
    outputs.push_back(one.output.transpose(0, 1));
    lses.push_back(one.lse);
  }
  const Tensor output = torch::cat(outputs), lse = torch::cat(lses, 1);
  expect_close(result.output, output, "packed output", 0);
  expect_close(result.lse, lse, "packed lse", 0);

  const Tensor grad = torch::randn_like(output), grad_lse = torch::randn_like(lse);
  const auto found = torch::autograd::grad({result.output, result.lse}, {query, key, value}, {grad, grad_lse});
  const auto exact = torch::autograd::grad({output, lse}, {query, key, value}, {grad, grad_lse});
  const char* names[] = {"packed grad_query", "packed grad_key", "packed grad_value"};
  for (size_t k = 0; k < 3; ++k) expect_close(found[k], exact[k], names[k]);
}

void pages_dropout_and_errors_of_packed_sequences() {
  const Tensor query = torch::randn({2, 2, 8}), cu_seq_q = torch::tensor({0, 1, 2}), pool = torch::randn({3, 4, 2, 8});
  scaledot::VarlenOptions call;
  call.block_table = torch::tensor({2, 0, 1, -1}).view({2, 2});
  call.seqused_k = torch::tensor({6, 3});
  const Tensor paged = scaledot::varlen_attention(query, pool, pool, cu_seq_q, {}, 1, 8, call).output;
  const Tensor keys = torch::cat({pool[2], pool[0].slice(0, 0, 2), pool[1].slice(0, 0, 3)});
  const Tensor cu_seq_k = torch::tensor({0, 6, 9});
  expect_close(paged, scaledot::varlen_attention(query, keys, keys, cu_seq_q, cu_seq_k, 1, 6).output, "pages", 0);

  scaledot::VarlenOptions dropping;
  dropping.dropout_p = 0.5;
  const auto draw = [&](uint64_t seed) {
    dropping.generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    return scaledot::varlen_attention(query, keys, keys, cu_seq_q, cu_seq_k, 1, 6, dropping).output;
  };
  expect_close(draw(3), draw(3), "the same generator", 0);
  expect(!torch::equal(draw(3), draw(4)), "a different generator drops different weights");

  const std::string text = scaledot::explain_varlen(query, keys, keys, cu_seq_q, cu_seq_k, 1, 6);
  expect(text.find("\"sequences\": 2") != std::string::npos, "explain_varlen: " + text);
  std::string message;
  try {
    scaledot::varlen_attention(query, keys, keys, cu_seq_q, cu_seq_k, 1, 5);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  expect(message.find("max_k") != std::string::npos, "a sequence longer than max_k: '" + message + "'");
}

// A block mask and a relative bias stand for a dense mask, and the bias gets a gradient of the same shape.
void masks_by_blocks_and_by_distances() {
  const auto options = torch::TensorOptions().dtype(torch::kDouble).requires_grad(true);
  const Tensor query = torch::randn({2, 3, 40, 8}, options), bias = torch::randn({3, 9}, options);  // distances to 4
  const Tensor rows = torch::arange(40).unsqueeze(1), keys = torch::arange(40);
  const Tensor same_document = rows.floor_divide(15) == keys.floor_divide(15);
  scaledot::SdpaOptions call;
  call.block_mask = scaledot::BlockMask::from_dense(same_document, /*block_rows=*/8, /*block_keys=*/16);
  call.relative_bias = bias;
  call.is_causal = true;
  expect(torch::equal(call.block_mask->to_dense(), same_document), "a block mask and back");
  const Tensor found = scaledot::scaled_dot_product_attention(query, query, query, call).output;

  const Tensor index = (keys - rows).clamp(-4, 4) + 4;
  const Tensor mask = bias.index_select(1, index.flatten()).view({3, 40, 40}).masked_fill(~same_document, -INFINITY);
  const Tensor expected = plain_attention(query, query, query, mask);
  expect_close(found, expected, "block mask and relative bias");
  const Tensor grad = torch::randn_like(expected);
  const auto gradients = torch::autograd::grad({found}, {query, bias}, {grad});
  const auto exact = torch::autograd::grad({expected}, {query, bias}, {grad});
  expect_close(gradients[0], exact[0], "grad_query beside a block mask");
  expect_close(gradients[1], exact[1], "grad_relative_bias");
}

void a_quantised_cache_is_read_in_place() {
  const Tensor query = torch::randn({2, 4, 16}), cu_seq_q = torch::tensor({0, 1, 2}),
               cu_seq_k = torch::tensor({0, 50, 80});
  for (const auto dtype : {torch::kChar, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
    const Tensor key = (torch::randn({80, 2, 16}) * 40).to(dtype), value = (torch::randn({80, 2, 16}) * 40).to(dtype);
    scaledot::VarlenOptions call;
    call.enable_gqa = true;
    call.k_scale = torch::tensor({0.02f, 0.03f});  // one for each KV head
    call.v_scale = torch::tensor(0.1f);
    const Tensor found = scaledot::varlen_attention(query, key, value, cu_seq_q, cu_seq_k, 1, 50, call).output;
    scaledot::VarlenOptions plain;
    plain.enable_gqa = true;
    const Tensor wide_key = key.to(torch::kFloat) * call.k_scale->unsqueeze(1),
                 wide_value = value.to(torch::kFloat) * 0.1f;
    const Tensor expected =
        scaledot::varlen_attention(query, wide_key, wide_value, cu_seq_q, cu_seq_k, 1, 50, plain).output;
    expect_close(found, expected, "a quantised cache", 1e-4);
  }
}

// The mask of a draft tree, or biases: of the last keys of each sequence. Those before are not affected.
void a_tree_mask_is_a_dense_mask_of_the_last_keys() {
  const auto options = torch::TensorOptions().dtype(torch::kDouble).requires_grad(true);
  const Tensor query = torch::randn({8, 2, 16}, options), key = torch::randn({40, 2, 16}, options);
  const Tensor cu_seq_q = torch::tensor({0, 5, 8}), cu_seq_k = torch::tensor({0, 30, 40});
  scaledot::VarlenOptions call;
  call.attn_mask = torch::randn({8, 6}, options);
  const Tensor found = scaledot::varlen_attention(query, key, key, cu_seq_q, cu_seq_k, 5, 30, call).output;
  std::vector<Tensor> outputs;
  for (const auto& [row, rows, first, keys] : {std::array{0, 5, 0, 30}, std::array{5, 3, 30, 10}}) {
    const Tensor own = key.narrow(0, first, keys).transpose(0, 1);
    const Tensor mask = torch::constant_pad_nd(call.attn_mask->narrow(0, row, rows), {keys - 6, 0});
    const Tensor output =
        torch::scaled_dot_product_attention(query.narrow(0, row, rows).transpose(0, 1), own, own, mask);
    outputs.push_back(output.transpose(0, 1));
  }
  const Tensor expected = torch::cat(outputs);
  expect_close(found, expected, "a tree mask");
  const Tensor grad = torch::randn_like(expected);
  const auto gradients = torch::autograd::grad({found}, {query, *call.attn_mask}, {grad});
  const auto exact = torch::autograd::grad({expected}, {query, *call.attn_mask}, {grad});
  expect_close(gradients[0], exact[0], "grad_query beside a tree mask");
  expect_close(gradients[1], exact[1], "grad_attn_mask of packed sequences");
}

void explain_names_a_kernel() {
  const Tensor query = torch::randn({1, 2, 9, 16});
  const std::string text = scaledot::explain(query, query, query);
  expect(text.find("\"kernel\"") != std::string::npos, "explain: " + text);
}

void errors_name_the_argument() {
  const Tensor query = torch::randn({1, 2, 9, 16});
  std::string message;
  try {
    scaledot::scaled_dot_product_attention(query, torch::randn({1, 2, 9, 8}), query);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  expect(message.find("key") != std::string::npos, "a key with a different head_dim: '" + message + "'");
  message.clear();
  try {
    scaledot::nn::MultiHeadAttention(scaledot::nn::MultiHeadAttentionOptions(16, 3));
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  expect(message.find("qk_dim") != std::string::npos, "16 features for 3 heads: '" + message + "'");
}

void a_layer_trains() {
  scaledot::nn::MultiHeadAttention layer(
      scaledot::nn::MultiHeadAttentionOptions(32, 4).num_kv_heads(2).out_dim(16).dropout(0.1));
  const Tensor x = torch::randn({8, 12, 32}), target = torch::randn({8, 12, 16});
  const Tensor key_mask = torch::arange(12).expand({8, 12}) < 9;
  torch::optim::Adam adam(layer->parameters(), 1e-2);
  const auto loss_of = [&] {
    const Tensor output = std::get<0>(layer(x, Tensor(), Tensor(), Tensor(), key_mask, /*is_causal=*/true));
    return torch::mse_loss(output, target);
  };
  layer->eval();
  const double before = loss_of().item<double>();
  layer->train();
  for (int step = 0; step < 20; ++step) {
    adam.zero_grad();
    const Tensor loss = loss_of();
    loss.backward();
    adam.step();
  }
  layer->eval();
  const double after = loss_of().item<double>();
  std::cout << "loss " << before << " -> " << after << '\n';
  expect(after < 0.9 * before, "the loss goes down");
}

void a_layer_is_a_torch_module() {
  scaledot::nn::MultiHeadAttention layer(scaledot::nn::MultiHeadAttentionOptions(24, 3).out_proj(false).bias(false));
  const Tensor x = torch::randn({5, 24});
  const auto [output, weights] =
      layer(x, Tensor(), Tensor(), Tensor(), Tensor(), false, scaledot::nn::Window{2, {}}, true);
  expect(output.sizes() == torch::IntArrayRef({5, 24}), "an unbatched output");
  expect(weights.sizes() == torch::IntArrayRef({3, 5, 5}), "unbatched weights");
  expect(weights.select(1, 4).slice(1, 0, 2).abs().max().item<double>() == 0, "the window hides keys");
  expect(!std::get<1>(layer(x)).defined(), "no weights without need_weights");

  const auto copy = std::dynamic_pointer_cast<scaledot::nn::MultiHeadAttentionImpl>(layer->clone());
  expect_close(std::get<0>(copy->forward(x)), std::get<0>(layer(x)), "a clone", 0);
  torch::nn::AnyModule any(layer);
  const auto from_any = any.forward<std::tuple<Tensor, Tensor>>(x);
  expect_close(std::get<0>(from_any), std::get<0>(layer(x)), "AnyModule", 0);
  layer->to(torch::kDouble);
  expect(std::get<0>(layer(x.to(torch::kDouble))).scalar_type() == torch::kDouble, "to(kDouble)");
}

// The file holds a Python layer's parameters, inputs and results. Options are those of test_cpp_package.py.
void a_layer_gives_pythons_results(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto saved = torch::pickle_load(bytes).toGenericDict();
  const auto tensor = [&](const std::string& name) { return saved.at(name).toTensor(); };
  scaledot::nn::MultiHeadAttention layer(
      scaledot::nn::MultiHeadAttentionOptions(24, 4).kdim(10).vdim(12).out_dim(7).qk_dim(32).v_dim(20).num_kv_heads(2));
  layer->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  size_t parameters = 0;
  for (auto& parameter : layer->named_parameters()) {
    parameter.value().copy_(tensor("layer." + parameter.key()));
    ++parameters;
  }
  expect(int64_t(parameters) == tensor("parameters").item<int64_t>(), "the number of parameters is Python's");
  const auto [output, weights] = layer(tensor("query"), tensor("key"), tensor("value"), tensor("attn_mask"),
                                       tensor("key_mask"), false, scaledot::nn::Window{{}, 3}, true);
  expect_close(output, tensor("output"), "Python's output", 1e-12);
  expect_close(weights, tensor("weights"), "Python's weights", 1e-12);

  // The same state of the generator gives the same dropout as in Python.
  const Tensor rows = tensor("rows");
  scaledot::SdpaOptions call;
  call.dropout_p = 0.5;
  call.return_weights = true;
  torch::manual_seed(7);
  const Tensor dropped = scaledot::scaled_dot_product_attention(rows, rows, rows, call).weights;
  expect(torch::equal(dropped.eq(0), tensor("dropped").eq(0)), "the weights that Python drops");
}

}  // namespace

int main(int argc, char** argv) {
  torch::manual_seed(1);
  try {
    function_and_gradients();
    dropout_repeats_with_its_seed();
    packed_sequences_and_gradients();
    pages_dropout_and_errors_of_packed_sequences();
    masks_by_blocks_and_by_distances();
    a_quantised_cache_is_read_in_place();
    a_tree_mask_is_a_dense_mask_of_the_last_keys();
    explain_names_a_kernel();
    errors_name_the_argument();
    a_layer_trains();
    a_layer_is_a_torch_module();
    if (argc > 1) a_layer_gives_pythons_results(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << "FAILED: " << error.what() << '\n';
    return 1;
  }
  std::cout << "all is well\n";
  return 0;
}
