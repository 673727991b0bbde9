// From a dtype at run time to a template argument.
#pragma once

#include "core/number.h"

namespace scaledot {

template <class T>
struct Type {
  using type = T;
};

// Calls body(Type<Storage>{}) with the C++ type of the dtype.
template <class Body>
SCALEDOT_FN void with_storage(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32: body(Type<float>{}); break;
    case DType::float64: body(Type<double>{}); break;
    case DType::bfloat16: body(Type<BFloat16>{}); break;
    case DType::float16: body(Type<Float16>{}); break;
    default: break;
  }
}

// Calls body(Type<Storage>) for the dtype of quantised keys and values.
template <class Body>
SCALEDOT_FN void with_quantised_storage(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float8_e4m3fn: body(Type<Float8E4M3>{}); break;
    case DType::float8_e5m2: body(Type<Float8E5M2>{}); break;
    case DType::int8: body(Type<Int8>{}); break;
    default: break;
  }
}

// The type of sums, softmax and lse.
template <class Storage>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};

}  // namespace scaledot
