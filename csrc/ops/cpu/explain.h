// The answers of explain() and explain_varlen() for a problem on the CPU.
#pragma once

#include <sstream>

#include "core/kernel.h"

namespace scaledot {

void explain_cpu(std::ostringstream& json, const Problem& problem, Pass pass);
void explain_packed_cpu(std::ostringstream& json, const Problem& packed, Pass pass);

}  // namespace scaledot
