// Checks inputs without libFuzzer, and goes on after a failure:
//   scaledot_replay corpus.txt        one input a line, in base64
//   scaledot_replay crash-...         an input that libFuzzer has saved; prints the problem first
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"

namespace {

using Bytes = std::vector<uint8_t>;

class Failures : public ::testing::EmptyTestEventListener {
 public:
  int count = 0;

 private:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) ++count, std::cerr << result.message() << '\n';
  }
};

Bytes from_base64(const std::string& line) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  Bytes result;
  unsigned word = 0, bits = 0;
  for (char c : line) {
    if (c == '=') break;
    word = word << 6 | unsigned(digits.find(c)), bits += 6;
    if (bits >= 8) bits -= 8, result.push_back(uint8_t(word >> bits));
  }
  return result;
}

// Returns whether the input passed.
bool replay(const Bytes& input, Failures& failures) {
  const int before = failures.count;
  scaledot::testing::check(input.data(), input.size());
  if (failures.count > before) scaledot::testing::print(input.data(), input.size());
  return failures.count == before;
}

}  // namespace

int main(int argc, char** argv) {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  Failures failures;
  listeners.Append(&failures);
  int inputs = 0, wrong = 0;
  for (int k = 1; k < argc; ++k) {
    const std::string path = argv[k];
    std::ifstream file(path, std::ios::binary);
    if (!file) return std::cerr << "scaledot_replay: got " << path << "; needs a file\n", 1;
    if (path.ends_with(".txt")) {
      for (std::string line; std::getline(file, line); ++inputs) wrong += !replay(from_base64(line), failures);
    } else {
      const Bytes input{std::istreambuf_iterator<char>(file), {}};
      scaledot::testing::print(input.data(), input.size());
      wrong += !replay(input, failures), ++inputs;
    }
  }
  listeners.Release(&failures);
  std::cout << inputs << " inputs, " << wrong << " wrong\n";
  return inputs == 0 || wrong > 0;
}
