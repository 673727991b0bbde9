// scaledot::explain: which kernel of the table a call would use, why each faster one was refused, and its workspace.
#include <torch/library.h>

#include "ops/explain.h"
#include "ops/run_cpu.h"
#include "ops/sdpa_dense.h"

namespace scaledot {
namespace {

void explain_pass_cpu(std::ostringstream& json, const Problem& problem, Pass pass) {
  const KernelTable table = cpu_kernels();
  const Kernel& chosen = select(table, problem, pass);
  explain_pass(json, table, chosen, chosen.workspace(problem, pass, cpu_workers(problem)), problem, pass);
}

std::string explain_cpu(const SdpaArgs& args) {
  const PretendedProblems problems = pretend(args);
  std::ostringstream json;
  json << "{";
  explain_pass_cpu(json, problems.forward, Pass::forward);
  json << ", ";
  explain_pass_cpu(json, problems.backward, Pass::backward);
  json << ", \"device\": \"cpu\", \"capability\": \"" << cpu_capability() << "\"}";
  return json.str();
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) { m.impl("explain", explain_kernel<&explain_cpu>); }
// Meta tensors stand for tensors that do not fit in memory; they are answered for the CPU.
TORCH_LIBRARY_IMPL(scaledot, Meta, m) { m.impl("explain", explain_kernel<&explain_cpu>); }

}  // namespace scaledot
