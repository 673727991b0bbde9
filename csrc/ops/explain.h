// The answer of scaledot::explain, for the table of any device.
#pragma once

#include <sstream>

#include "core/kernel.h"

namespace scaledot {

// One pass: the kernel, why each faster one was refused, and its workspace. Kernel names and reasons are literals of ours without
// a quote or backslash: nothing to escape.
template <class Table, class AnyKernel>
void explain_pass(std::ostringstream& json, const Table& table, const AnyKernel& chosen, int64_t workspace_bytes,
                  const Problem& problem, Pass pass) {
  json << (pass == Pass::forward ? "\"forward\": " : "\"backward\": ") << "{\"kernel\": \"" << chosen.name
       << "\", \"refused\": [";
  const char* separator = "";
  for (const AnyKernel* kernel = table.kernels; kernel != &chosen && kernel != table.kernels + table.count; ++kernel) {
    if (const char* reason = kernel->why_not(problem, pass)) {
      json << separator << "[\"" << kernel->name << "\", \"" << reason << "\"]";
      separator = ", ";
    }
  }
  json << "], \"workspace_bytes\": " << workspace_bytes << "}";
}

}  // namespace scaledot
