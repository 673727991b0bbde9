// The reference kernel, the oracle of all tests in C++, and kernels by their names.
#pragma once

#include <stdexcept>
#include <string>

#include "core/kernel.h"

namespace scaledot {

extern const Kernel kReferenceKernel;  // called "reference"

// A kernel of the table, or the reference kernel.
inline const Kernel& kernel_by_name(const std::string& name) {
  if (name == kReferenceKernel.name) return kReferenceKernel;
  const KernelTable table = cpu_kernels();
  std::string known = kReferenceKernel.name;
  for (int k = 0; k < table.count; ++k) {
    if (name == table.kernels[k].name) return table.kernels[k];
    known += std::string(", ") + table.kernels[k].name;
  }
  throw std::invalid_argument("no kernel is called '" + name + "'; there are " + known);
}

}  // namespace scaledot
