// Runs a model package written by torch._inductor.aoti_compile_and_package, without Python.
//   packaged MODEL.pt2 IO.pt
// test_aotinductor.py writes IO.pt, a dict of tensors: inputs x and key_mask; expected output, weights and lse.
// A packaged model needs nothing from scaledot but the linked library; see CMakeLists.txt.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: packaged MODEL.pt2 IO.pt\n";
    return 2;
  }
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const auto saved = torch::pickle_load(bytes).toGenericDict();
    const auto tensor = [&](const char* name) { return saved.at(name).toTensor(); };

    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const std::vector<torch::Tensor> results = model.run({tensor("x"), tensor("key_mask")});
    const char* names[] = {"output", "weights", "lse"};
    if (results.size() != std::size(names)) throw std::runtime_error("the number of results");
    for (size_t k = 0; k < results.size(); ++k) {
      if (!torch::allclose(results[k], tensor(names[k]), 1e-5, 1e-6)) throw std::runtime_error(names[k]);
    }
  } catch (const std::exception& error) {
    std::cerr << "FAILED: " << error.what() << '\n';
    return 1;
  }
  std::cout << "all is well\n";
  return 0;
}
