// scaledot::explain_varlen on the CPU: which kernels of the table the sequences of a call would use.
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/varlen.h"
#include "ops/explain.h"
#include "ops/run_cpu.h"
#include "ops/varlen_dense.h"

namespace scaledot {
namespace {

// The workspace is the most that there is at one time: that of one sequence with all threads, or that of as many sequences as
// there are threads.
void write_pass_cpu(std::ostringstream& json, const Problem& packed, Pass pass) {
  SequenceChoices choices;
  int64_t with_all_threads = 0;
  std::vector<int64_t> of_one_thread;
  if (has_scores(packed)) {
    const KernelTable table = cpu_kernels();
    const SequencePlan plan = plan_sequences(packed);
    for (size_t k = 0; k < plan.order.size(); ++k) {
      const Problem p = sequence(packed, plan.order[k]);
      if (!has_scores(p)) continue;
      const Kernel& chosen = select(table, p, pass);
      choices.add(table, chosen, p, pass);
      if (k < plan.with_all_threads) {
        with_all_threads = max(with_all_threads, chosen.workspace(p, pass, cpu_workers(p)));
      } else {
        of_one_thread.push_back(chosen.workspace(p, pass, 1));
      }
    }
    std::sort(of_one_thread.begin(), of_one_thread.end(), std::greater<>());
    of_one_thread.resize(min(of_one_thread.size(), size_t(plan.threads)));
  }
  const int64_t shared = std::accumulate(of_one_thread.begin(), of_one_thread.end(), int64_t(0));
  choices.write(json, max(with_all_threads, shared), pass);
}

std::string explain_cpu(const VarlenArgs& args) {
  return explain_varlen_dense(kCpuBackend, args, &write_pass_cpu, "cpu", cpu_capability());
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) { m.impl("explain_varlen", explain_varlen_kernel<&explain_cpu>); }
// As for scaledot::explain, meta tensors are answered for the CPU.
TORCH_LIBRARY_IMPL(scaledot, Meta, m) { m.impl("explain_varlen", explain_varlen_kernel<&explain_cpu>); }

}  // namespace scaledot
