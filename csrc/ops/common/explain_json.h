// The answers of scaledot::explain and explain_varlen, for the table of any device.
#pragma once

#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/kernel.h"

namespace scaledot {

// The kernel and why each faster one was refused. Kernel names and reasons are literals of ours without a quote or
// backslash: nothing to escape.
template <class Table, class AnyKernel>
void explain_choice(std::ostringstream& json, const Table& table, const AnyKernel& chosen, const Problem& problem,
                    Pass pass) {
  json << "\"kernel\": \"" << chosen.name << "\", \"refused\": [";
  const char* separator = "";
  for (const AnyKernel* kernel = table.kernels; kernel != &chosen && kernel != table.kernels + table.count; ++kernel) {
    if (const char* reason = kernel->why_not(problem, pass)) {
      json << separator << "[\"" << kernel->name << "\", \"" << reason << "\"]";
      separator = ", ";
    }
  }
  json << "]";
}

inline const char* pass_name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

// One pass: its choice, and its workspace.
template <class Table, class AnyKernel>
void explain_pass(std::ostringstream& json, const Table& table, const AnyKernel& chosen, int64_t workspace_bytes,
                  const Problem& problem, Pass pass) {
  json << "\"" << pass_name(pass) << "\": {";
  explain_choice(json, table, chosen, problem, pass);
  json << ", \"workspace_bytes\": " << workspace_bytes << "}";
}

// One pass of a call without scores, which fills the results with zeros and runs no kernel.
inline void explain_no_pass(std::ostringstream& json, Pass pass) {
  json << "\"" << pass_name(pass) << "\": {\"kernel\": \"none\", \"refused\": [], \"workspace_bytes\": 0}";
}

// The choices of one pass over packed sequences: those that are alike once, with their number.
class SequenceChoices {
 public:
  template <class Table, class AnyKernel>
  void add(const Table& table, const AnyKernel& chosen, const Problem& problem, Pass pass, int64_t sequences = 1) {
    std::ostringstream choice;
    explain_choice(choice, table, chosen, problem, pass);
    const auto [place, is_new] = places_.try_emplace(choice.str(), counts_.size());
    if (is_new) counts_.emplace_back(choice.str(), 0);
    counts_[place->second].second += sequences;
  }

  void write(std::ostringstream& json, int64_t workspace_bytes, Pass pass) const {
    json << "\"" << pass_name(pass) << "\": {\"kernels\": [";
    const char* separator = "";
    for (const auto& [choice, sequences] : counts_) {
      json << separator << "{" << choice << ", \"sequences\": " << sequences << "}";
      separator = ", ";
    }
    json << "], \"workspace_bytes\": " << workspace_bytes << "}";
  }

 private:
  std::unordered_map<std::string, size_t> places_;
  std::vector<std::pair<std::string, int64_t>> counts_;  // in the order of their first sequences
};

}  // namespace scaledot
