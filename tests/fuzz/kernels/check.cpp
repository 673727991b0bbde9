#include "check.h"

#include <cstdio>

#include "input.h"
#include "packed_check.h"

namespace scaledot::testing {
namespace {

// The kernels that run: all for which takes(kernel) is true, or the one that the input names.
template <class Takes>
std::vector<const Kernel*> chosen(const Input& input, const Takes& takes) {
  const KernelTable table = cpu_kernels();
  std::vector<const Kernel*> result;
  for (int k = 0; k < table.count; ++k)
    if (takes(table.kernels[k])) result.push_back(&table.kernels[k]);
  if (input.kernel == kAllKernels || result.empty()) return result;
  return {result[size_t(input.kernel) % result.size()]};
}

// The inputs of a backward. What is kept comes from a forward of the same kernel, as in a call.
void set_forward(const Kernel& kernel, Built& b, const Oracle& oracle) {
  if (b.saved_softmax.present() || b.output_low.present()) {
    b.saved_softmax.fill_with_poison();
    b.output_low.fill_with_poison();
    run(kernel.why_not(b.problem(), Pass::forward) ? kReferenceKernel : kernel, b, Pass::forward);
  }
  set_results(b, oracle.forward);
}

void check_pass(const Input& input, Built& b, const Oracle& oracle, Pass pass) {
  const Problem p = b.problem();
  const bool backward = pass == Pass::backward;
  for (const Kernel* kernel : chosen(input, [&](const Kernel& k) { return !k.why_not(p, pass); })) {
    SCOPED_TRACE(kernel->name);
    if (backward) set_forward(*kernel, b, oracle);
    for_each_result(b, backward, [](const char*, TestTensor& t) { t.fill_with_poison(); });
    run(*kernel, b, pass);
    backward ? expect_backward(b, oracle) : expect_forward(b, oracle);
    if (input.again) expect_same_results(*kernel, b, pass, input.workers, &input.shuffle);
  }
}

void check_dense(const Input& input) {
  Built b = build(input);
  const Oracle oracle = solve(b, false, input.backward);
  if (input.saved_keys > 0 && can_save_softmax(b.problem()) && has_scores(b.problem()))
    add_saved_softmax(b, input.saved_keys);
  if (input.saved_keys > 0 && has_output_low(b.c.dtype) && !b.problem().part.given) add_output_low(b);
  if (input.forward) check_pass(input, b, oracle, Pass::forward);
  if (input.backward) check_pass(input, b, oracle, Pass::backward);
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
  const auto run_pass = [&](Pass pass) {
    for_each_sequence(b.problem, [&](const Problem& p) {
      for (const Kernel* kernel : chosen(input, [&](const Kernel& k) { return !k.why_not(p, pass); }))
        run_shuffled(*kernel, p, pass, input.workers, input.shuffle);
    });
  };
  if (input.forward) run_pass(Pass::forward);
  if (!input.backward) return;
  ask_for_gradients(b);
  run_pass(Pass::backward);
}

void check_packed(PackedBuilt& b, const Input& input) {
  for (const Built& one : b.sequences) b.oracles.push_back(solve(one, false, input.backward));
  const auto check_pass = [&](Pass pass) {
    for (const Kernel* kernel : chosen(input, [&](const Kernel& k) { return takes(k, b, pass); }))
      check_packed(b, *kernel, pass, input.workers, input.shuffle);
  };
  if (input.forward) check_pass(Pass::forward);
  if (!input.backward) return;
  prepare_backward(b);
  check_pass(Pass::backward);
}

}  // namespace

void check(const uint8_t* data, size_t size) {
  const Input input = parse(data, size);
  if (input.form == Form::dense) return check_dense(input);
  PackedBuilt b = build(input.packed);
  input.form == Form::hostile ? run_hostile(b, input) : check_packed(b, input);
}

void print(const uint8_t* data, size_t size) {
  std::fprintf(stderr, "input ");
  for (size_t k = 0; k < size; ++k) std::fprintf(stderr, "%02x", data[k]);
  std::fprintf(stderr, "\n%s\n", describe(parse(data, size)).c_str());
}

}  // namespace scaledot::testing
