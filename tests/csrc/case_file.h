// The lines of tests/data/cases.txt, which the C++ and the Python tests read.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "problem_builder.h"

namespace scaledot::testing {

// A name, and the options in which the case differs from a default one.
struct CaseLine {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;

  void apply(Case& c) const;
};

// The lines of a section that C++ reads, in their order.
const std::vector<CaseLine>& case_lines(const std::string& section);

}  // namespace scaledot::testing
