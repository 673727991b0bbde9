#include "ops/cpu/explain.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "core/varlen.h"
#include "ops/common/explain_json.h"
#include "ops/cpu/run.h"
#include "ops/cpu/sequence_gradients.h"

namespace scaledot {

void explain_cpu(std::ostringstream& json, const Problem& problem, Pass pass) {
  const KernelTable table = cpu_kernels();
  const Kernel& chosen = select(table, problem, pass);
  explain_pass(json, table, chosen, chosen.workspace(problem, pass, cpu_workers(problem)), problem, pass);
}

// The workspace is the most that exists at one time: that of one sequence with all threads, or of as many sequences as
// there are threads. The gradients of relative_bias exist for all sequences at a time.
void explain_packed_cpu(std::ostringstream& json, const Problem& packed, Pass pass) {
  SequenceChoices choices;
  int64_t with_all_threads = 0;
  std::vector<int64_t> with_one_thread;
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
        with_one_thread.push_back(chosen.workspace(p, pass, 1));
      }
    }
    std::sort(with_one_thread.begin(), with_one_thread.end(), std::greater<>());
    with_one_thread.resize(min(with_one_thread.size(), size_t(plan.threads)));
  }
  const int64_t at_once = std::accumulate(with_one_thread.begin(), with_one_thread.end(), int64_t(0));
  choices.write(json, max(with_all_threads, at_once) + SequenceGradients(packed).bytes(), pass);
}

}  // namespace scaledot
