// The bench's arithmetic against numbers computed by hand. Nothing here depends on times.
#include <gtest/gtest.h>

#include "machine.h"
#include "sets.h"

namespace scaledot::bench {
namespace {

Case case_of(const char* shape, Pass pass, Options options = {}, DType dtype = DType::float32) {
  return {parse_shape(shape), dtype, pass, options};
}

TEST(Shape, ParsesTheNotationOfCompare) {
  const Shape s = parse_shape("2x8:4x5:70x64:96");
  EXPECT_EQ(s.batch, 2);
  EXPECT_EQ(s.heads, 8);
  EXPECT_EQ(s.kv_heads, 4);
  EXPECT_EQ(s.query_length, 5);
  EXPECT_EQ(s.key_length, 70);
  EXPECT_EQ(s.head_dim, 64);
  EXPECT_EQ(s.value_dim, 96);
  EXPECT_EQ(text_of(s), "2x8:4x5:70x64:96");
  EXPECT_EQ(text_of(parse_shape("1x8x1024x64")), "1x8x1024x64");
  for (const char* wrong : {"", "1x8x1024", "1x8x1024x64x2", "1x8:3x5x64", "0x8x5x64", "1x8x-5x64"})
    EXPECT_THROW(parse_shape(wrong), std::invalid_argument) << wrong;
}

TEST(Flops, ForwardHasTwoProductsBackwardFive) {
  // 6 heads of 5 x 7 scores. Forward: Q K^T of depth 4, P V of width 3. Backward: Q K^T again, dS K and dS^T Q of
  // depth 4, dO V^T and P^T dO of width 3. A multiply-add is two operations.
  EXPECT_EQ(flops(case_of("2x3x5:7x4:3", Pass::forward)), 2.0 * 6 * 5 * 7 * (4 + 3));
  EXPECT_EQ(flops(case_of("2x3x5:7x4:3", Pass::backward)), 2.0 * 6 * 5 * 7 * (4 + 3 + 3 + 4 + 4));
}

TEST(Flops, CausalCountsTheTriangle) {
  EXPECT_EQ(attended(case_of("1x1x4x8", Pass::forward, {.causal = true})), 1 + 2 + 3 + 4);
  EXPECT_EQ(attended(case_of("2x3x4x8", Pass::forward, {.causal = true})), 6 * 10);
  EXPECT_EQ(attended(case_of("1x1x5:2x8", Pass::forward, {.causal = true})), 1 + 2 + 2 + 2 + 2);
  EXPECT_EQ(attended(case_of("1x1x4x8", Pass::forward, {.dropout_p = 0.1, .mask = Mask::padding})), 16);
}

TEST(Bytes, CountsEveryKeyAndValueOnce) {
  EXPECT_EQ(key_value_bytes(case_of("3x8:2x1:100x64:32", Pass::forward)), 4.0 * 3 * 2 * 100 * (64 + 32));
  EXPECT_EQ(key_value_bytes(case_of("3x8:2x1:100x64:32", Pass::forward, {}, DType::bfloat16)),
            2.0 * 3 * 2 * 100 * (64 + 32));
  EXPECT_TRUE(parse_shape("1x8x1:4096x64").decode());
  EXPECT_FALSE(parse_shape("1x8x17:4096x64").decode());
  EXPECT_FALSE(parse_shape("1x8x5x64").decode());
}

TEST(Sets, ShapesParseAndBarsCombineAllOtherSetsButCache) {
  size_t items = 0;
  for (const Set& set : sets()) {
    EXPECT_FALSE(set.items.empty()) << set.name;
    for (const Item& item : set.items) EXPECT_NO_THROW(parse_shape(item.shape)) << set.name;
    if (std::string(set.name) != "cache") items += set.items.size();
  }
  EXPECT_EQ(std::string(sets().back().name), "bars");
  EXPECT_EQ(items, 2 * sets().back().items.size());
}

TEST(Median, MedianOfOddAndEvenCounts) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 8}), 3);
  EXPECT_EQ(median({}), 0);
}

TEST(Schedule, FirstFreeCoreTakesTheNextTask) {
  // Two cores. The first phase: core 0 takes 4, core 1 takes 1, 1 and 1: at 3 it is free and takes the last 3, until 6.
  // The second phase is one task of core 0. Serial time is core 0's.
  const Recording recording = {{{4, 1, 1, 1, 3}, {2}}, 1};
  const Schedule two = simulate(recording, 2);
  ASSERT_EQ(two.phases.size(), 2u);
  EXPECT_EQ(two.phases[0].tasks, 5);
  EXPECT_EQ(two.phases[0].longest, 4);
  EXPECT_EQ(two.phases[0].span, 6);
  EXPECT_DOUBLE_EQ(two.phases[0].busy, 10.0 / 12);
  EXPECT_EQ(two.phases[1].span, 2);
  EXPECT_DOUBLE_EQ(two.phases[1].busy, 0.5);
  EXPECT_EQ(two.span, 1 + 6 + 2);
  EXPECT_DOUBLE_EQ(two.idle, 1 - (1 + 10 + 2) / 18.0);
  EXPECT_DOUBLE_EQ(two.worst, 1 - 6 / 9.0);  // core 1 worked 6, core 0 worked 1 + 4 + 2

  const Schedule one = simulate(recording, 1), many = simulate(recording, 8);
  EXPECT_EQ(one.span, 13);
  EXPECT_EQ(one.idle, 0);
  EXPECT_EQ(one.worst, 0);
  EXPECT_EQ(many.span, 1 + 4 + 2);
  EXPECT_DOUBLE_EQ(many.idle, 1 - 13 / 56.0);
  EXPECT_EQ(many.worst, 1);  // three cores never get a task
}

TEST(Schedule, RecordsEveryTaskInItsPhase) {
  Recorder recorder;
  int calls = 0;
  const Recording recording = recorder.record([&] {
    const Executor executor = recorder.executor(16, nullptr);
    EXPECT_EQ(executor.workers, 16);
    parallel(executor, 3, [&](int64_t task, int worker) { calls += task == calls && worker == 0; });
    parallel(executor, 0, [&](int64_t, int) { ++calls; });
    parallel(executor, 2, [&](int64_t, int) { ++calls; });
  });
  EXPECT_EQ(calls, 5);
  ASSERT_EQ(recording.phases.size(), 3u);
  EXPECT_EQ(recording.phases[0].size(), 3u);
  EXPECT_EQ(recording.phases[1].size(), 0u);
  EXPECT_EQ(recording.phases[2].size(), 2u);
  EXPECT_GE(recording.serial, 0);

  const Recording middle = median_of({{{{1, 5}}, 3}, {{{2, 4}}, 1}, {{{9, 6}}, 2}});
  EXPECT_EQ(middle.phases, (std::vector<Phase>{{2, 5}}));
  EXPECT_EQ(middle.serial, 2);
}

TEST(Pool, RunsEveryTaskOnceOnAnyNumberOfThreads) {
  for (int workers : {1, 2, 5}) {
    Pool pool(workers);
    for (int64_t tasks : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<int> wrong{0};
      parallel(pool.executor(nullptr), tasks, [&](int64_t task, int worker) {
        ++runs[size_t(task)];
        wrong += worker < 0 || worker >= workers;
      });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
      EXPECT_EQ(wrong, 0);
    }
    std::atomic<int> seen{0};
    pool.everywhere([&](int worker) { seen += 1 << worker; });
    EXPECT_EQ(seen, (1 << workers) - 1);
  }
}

// Kernels with one error each.
void nothing(const Problem&, const Executor&) {}
void one_number_off(const Problem& p, const Executor& executor) {
  kReferenceKernel.forward(p, executor);
  static_cast<float*>(p.output.data)[0] += 0.01f;
}
void not_a_number(const Problem& p, const Executor& executor) {
  kReferenceKernel.backward(p, executor);
  static_cast<float*>(p.grad_key.data)[0] = std::nanf("");
}
const char* takes_all(const Problem&, Pass) { return nullptr; }
const char* takes_long(const Problem& p, Pass) { return p.key_length < 500 ? "needs 500 keys" : nullptr; }
int64_t as_reference(const Problem& p, Pass pass, int workers) { return kReferenceKernel.workspace(p, pass, workers); }

TEST(Check, RejectsWrongResults) {
  const Kernel& reference = kReferenceKernel;
  const Case forward = case_of("1x2x20x8", Pass::forward), backward = case_of("1x2x20x8", Pass::backward);
  EXPECT_NO_THROW(check(reference, forward));
  EXPECT_NO_THROW(check(reference, backward));
  EXPECT_THROW(check({"nothing", takes_all, as_reference, nothing, nothing}, forward), std::runtime_error);
  EXPECT_THROW(check({"nothing", takes_all, as_reference, nothing, nothing}, backward), std::runtime_error);
  EXPECT_THROW(check({"off", takes_all, as_reference, one_number_off, nothing}, forward), std::runtime_error);
  EXPECT_THROW(check({"nan", takes_all, as_reference, nothing, not_a_number}, backward), std::runtime_error);
}

TEST(Check, EnlargesTheCaseUntilTheKernelTakesIt) {
  const Kernel& reference = kReferenceKernel;
  const Kernel longest = {"long", takes_long, as_reference, reference.forward, reference.backward};
  EXPECT_NO_THROW(check(longest, case_of("1x1x4000x4", Pass::forward)));
  EXPECT_THROW(check(longest, case_of("1x1x400x4", Pass::forward)), std::runtime_error);
}

TEST(Check, CoversEveryOption) {
  std::vector<Options> all = {{.causal = true}, {.weights = true},  {.keep = true},
                              {.blhd = true},   {.dropout_p = 0.3}, {.softcap = 2}};
  for (Mask mask : {Mask::boolean, Mask::padding, Mask::additive, Mask::gradient}) all.push_back({.mask = mask});
  const KernelTable table = cpu_kernels();
  for (const Options& options : all)
    for (Pass pass : {Pass::forward, Pass::backward})
      for (DType dtype : {DType::float32, DType::bfloat16}) {
        const Case c = case_of("2x4:2x40x16:24", pass, options, dtype);
        const Problem p = Work(c).problem();
        for (int k = 0; k < table.count; ++k) {
          if (table.kernels[k].why_not(p, pass)) continue;
          EXPECT_NO_THROW(check(table.kernels[k], c)) << table.kernels[k].name << " " << text_of(options);
        }
      }
}

// Chain k starts at k and approaches 1 by a factor of 3/4 each round. If the compiler dropped a chain or a round, the
// sum would differ.
TEST(Peaks, EveryRoundIsComputed) {
  for (const ArithmeticLoop* loop : Machine::arithmetic()) {
    if (std::string(loop->name).find("FMA") == std::string::npos) continue;
    const double elements = loop->flops_per_round / 2;
    const double first = loop->run(0), third = loop->run(3);
    EXPECT_NEAR(third - elements, (first - elements) * 27 / 64, 1e-3) << loop->name;
    EXPECT_NEAR(loop->run(200), elements, 1e-3) << loop->name;
  }
}

}  // namespace
}  // namespace scaledot::bench
