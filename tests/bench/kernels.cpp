// The bench of the CPU kernels (`scaledot_bench --help`), without torch. The limits of the machine and the kernels are
// measured in turn, in one process.
#include <cstdio>
#include <exception>

#include "command.h"
#include "report.h"

namespace scaledot::bench {
namespace {

void print_machine(const Command& command, Machine& machine) {
  std::printf("%s, %s, %d thread%s\n", cpu_model().c_str(), cpu_capability(), command.threads,
              command.threads == 1 ? "" : "s");
  constexpr int kReadings = 9;
  for (const ArithmeticLoop* loop : Machine::arithmetic()) {
    std::vector<double> readings;
    for (int k = 0; k < kReadings; ++k) readings.push_back(machine.measure(*loop) / 1e9);
    std::printf("  %-20s %8.1f GFLOP/s\n", loop->name, median(readings));
  }
  // Reading a large buffer takes a while: only if a case is compared with it.
  const bool decodes = std::any_of(command.items.begin(), command.items.end(),
                                   [](const Item& item) { return parse_shape(item.shape).decode(); });
  std::vector<double> readings;
  for (int k = 0; k < kReadings && decodes; ++k) readings.push_back(machine.read_bandwidth() / 1e9);
  if (median(readings) > 0) std::printf("  %-20s %8.1f GB/s, %s\n", "read", median(readings), machine.read_loop());
  std::printf("\n");
}

// nullptr, after printing the reason, if the kernel does not take the case.
const Kernel* kernel_for(const std::string& name, const Case& c, const Problem& problem) {
  const Kernel& kernel = name.empty() ? select(cpu_kernels(), problem, c.pass) : kernel_by_name(name);
  const char* reason = kernel.why_not(problem, c.pass);
  if (!reason) return &kernel;
  std::printf("%-22s %-9s %-9s not run: %s: %s\n", text_of(c.shape).c_str(), name_of(c.dtype), name_of(c.pass),
              kernel.name, reason);
  return nullptr;
}

void show_schedule(const Kernel& kernel, const Case& c, const Problem& problem, int cores) {
  constexpr int kRuns = 3;
  if (c.pass == Pass::backward) run_alone(select(cpu_kernels(), problem, Pass::forward), problem, Pass::forward);
  const Memory workspace = allocate(kernel.workspace(problem, c.pass, cores));
  Recorder recorder;
  std::vector<Recording> runs;
  for (int k = 0; k < kRuns; ++k)
    runs.push_back(recorder.record([&] { run(kernel, problem, c.pass, recorder.executor(cores, workspace.get())); }));
  print_schedule(c, kernel.name, median_of(runs), cores);
}

int main_of(const Command& command) {
  Pool pool(command.threads);
  Machine machine(pool);
  if (command.schedule == 0) {
    print_machine(command, machine);
    print_heading();
  }
  std::vector<Measured> rows;
  for (const Item& item : command.items)
    for (DType dtype : command.dtypes)
      for (Pass pass : command.passes)
        for (const std::string& name : command.kernels) {
          const Case c = {parse_shape(item.shape), dtype, pass, item.options};
          const Work work(c);
          const Kernel* kernel = kernel_for(name, c, work.problem());
          if (!kernel) continue;
          check(*kernel, c);
          if (command.schedule > 0) {
            show_schedule(*kernel, c, work.problem(), command.schedule);
          } else {
            rows.push_back(measure(*kernel, c, work, pool, machine, command.effort));
            print_row(rows.back());
          }
        }
  if (!command.json.empty()) write_json(command.json, rows, command.threads);
  return 0;
}

}  // namespace
}  // namespace scaledot::bench

int main(int argc, char** argv) {
  try {
    return scaledot::bench::main_of(scaledot::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "scaledot_bench: %s\n", error.what());
    return dynamic_cast<const std::invalid_argument*>(&error) ? 2 : 1;
  }
}
