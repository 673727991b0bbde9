#include "check.h"

#include <cstdio>

#include "input.h"
#include "packed_check.h"

namespace scaledot::testing {
namespace {

void run_both(const Kernel& kernel, const Built& b, const Oracle& oracle, const Input& input, Pass pass) {
  run(kernel, b, pass);
  pass == Pass::forward ? expect_forward(b, oracle) : expect_backward(b, oracle);
  expect_same_results(kernel, b, pass, input.workers, &input.shuffle);
}

void check_dense(const Input& input) {
  const Built b = build(input);
  const Oracle oracle = solve(b);
  for (int k = 0; k < cpu_kernels().count - 1; ++k) {
    const Kernel& kernel = cpu_kernels().kernels[k];
    SCOPED_TRACE(kernel.name);
    if (!kernel.why_not(b.problem(), Pass::forward)) {
      const Built mine = b;
      run_both(kernel, mine, oracle, input, Pass::forward);
    }
    if (input.common().average_weights || kernel.why_not(b.problem(), Pass::backward)) continue;
    const Built mine = b;
    run(kernel_by_name("reference"), mine, Pass::forward);
    run_both(kernel, mine, oracle, input, Pass::backward);
  }
}

// Numbers that a GPU would read without a check: kernels stay inside the tensors.
void make_hostile(PackedBuilt& b, uint64_t seed) {
  Random random(seed);
  const auto spoil = [&](auto& numbers) {
    for (auto& x : numbers)
      if (random.uniform() < 0.5) x = int32_t(random.uniform() < 0.3 ? random.bits() : random.bits() % 300) - 20;
  };
  spoil(b.cu_seq_q), spoil(b.cu_seq_k), spoil(b.used), spoil(b.table);
}

void run_hostile(PackedBuilt& b, const Input& input) {
  make_hostile(b, input.shuffle);
  RedZones zones;
  for_each_tensor(b, false, [&](const TestTensor& t, bool) { zones.add(t); });
  for (Pass pass : {Pass::forward, Pass::backward}) {
    for_each_sequence(b.problem, [&](const Problem& p) {
      for (int k = 0; k < cpu_kernels().count; ++k)
        if (!cpu_kernels().kernels[k].why_not(p, pass))
          run_shuffled(cpu_kernels().kernels[k], p, pass, input.workers, input.shuffle);
    });
    if (is_paged(b.problem)) return;  // forward only
    ask_for_gradients(b);
  }
}

}  // namespace

void check(const uint8_t* data, size_t size) {
  const Input input = parse(data, size);
  if (input.form == Form::dense) return check_dense(input);
  PackedBuilt b = build(input.packed);
  if (input.form == Form::hostile) return run_hostile(b, input);
  for (const Built& one : b.sequences) b.oracles.push_back(solve(one.c));
  check_packed(b, input.form == Form::paged, input.workers, input.shuffle);
}

void print(const uint8_t* data, size_t size) {
  std::fprintf(stderr, "input ");
  for (size_t k = 0; k < size; ++k) std::fprintf(stderr, "%02x", data[k]);
  std::fprintf(stderr, "\n%s\n", describe(parse(data, size)).c_str());
}

}  // namespace scaledot::testing
