#include "ops/common/environment.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "core/kernel.h"

namespace scaledot {
namespace {

constexpr const char* kCapabilityVariable = "SCALEDOT_CPU_CAPABILITY";
// The second is the former name of the first.
constexpr const char* kSaveVariables[] = {"SCALEDOT_SAVE_FOR_BACKWARD", "SCALEDOT_KEEP_WEIGHTS"};

std::string_view value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

// The problem of a level that cpu/capability.cpp ignores; empty if it has none.
std::string problem_of_capability(std::string_view wanted) {
  if (wanted.empty() || wanted == cpu_capability()) return "";
  std::string known;
  for (int level = 0; const char* name = cpu_capability_name(level); ++level) {
    if (wanted == name) return "is more than this machine offers";
    known.append(level ? ", " : "").append(name);
  }
  return "is not one of " + known;
}

std::string problem_of_switch(std::string_view value) {
  return value.empty() || value == "0" || value == "1" ? "" : "is not one of 0, 1";
}

void add_warning(std::vector<std::string>& warnings, const char* variable, const std::string& problem,
                 const std::string& used) {
  if (problem.empty()) return;
  warnings.push_back(std::string(variable).append("=").append(value_of(variable)) + " " + problem + ": using " + used +
                     ".");
}

}  // namespace

bool save_for_backward_at_start() {
  for (const char* variable : kSaveVariables)
    if (std::getenv(variable)) return value_of(variable) != "0";
  return true;
}

std::vector<std::string> take_environment_warnings() {
  static std::atomic<bool> taken{false};
  std::vector<std::string> warnings;
  if (taken.exchange(true)) return warnings;
  add_warning(warnings, kCapabilityVariable, problem_of_capability(value_of(kCapabilityVariable)), cpu_capability());
  for (const char* variable : kSaveVariables)
    add_warning(warnings, variable, problem_of_switch(value_of(variable)), "1");
  return warnings;
}

void warn_of_environment() {
  [[maybe_unused]] static const bool done = [] {
    for (const std::string& warning : take_environment_warnings()) TORCH_WARN(warning);
    return true;
  }();
}

}  // namespace scaledot
