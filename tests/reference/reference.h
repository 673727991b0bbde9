// The reference kernel, the oracle of all tests in C++, and kernels by their names.
#pragma once

#include <stdexcept>
#include <string>

#include "core/kernel.h"
#include "core/number.h"

namespace scaledot {

extern const Kernel kReferenceKernel;  // called "reference"

// Element `index` of an array, which may be of quantised keys or values.
template <class T>
T load_stored_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::float8_e4m3fn: return T(widen(static_cast<const Float8E4M3*>(data)[index]));
    case DType::float8_e5m2: return T(widen(static_cast<const Float8E5M2*>(data)[index]));
    case DType::int8: return T(widen(static_cast<const Int8*>(data)[index]));
    default: return load_element<T>(data, dtype, index);
  }
}

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
