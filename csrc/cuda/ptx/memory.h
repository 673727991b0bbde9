// Loads and stores. On a GPU they are plain ones. The simulation checks that each is within a buffer, reads what was
// written before, and is ordered by a barrier.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

// Neighbouring elements that are loaded or stored in one access.
template <class Number, int kCount>
struct alignas(sizeof(Number) * kCount) AlignedVector {
  Number x[kCount];
};

#if defined(__CUDACC__)

template <class T>
SCALEDOT_DEVICE T shared_load(const T* from) {
  return *from;
}
template <class T>
SCALEDOT_DEVICE void shared_store(T* to, T x) {
  *to = x;
}
template <class T>
SCALEDOT_DEVICE T global_load(const T* from) {
  return *from;
}
template <class T>
SCALEDOT_DEVICE void global_store(T* to, T x) {
  *to = x;
}

#else

template <class T>
SCALEDOT_DEVICE T shared_load(const T* from) {
  sim::read_shared("shared_load", from, sizeof(T), alignof(T));
  return *from;
}
template <class T>
SCALEDOT_DEVICE void shared_store(T* to, T x) {
  sim::write_shared("shared_store", to, sizeof(T), alignof(T));
  *to = x;
}
template <class T>
SCALEDOT_DEVICE T global_load(const T* from) {
  sim::read_global("global_load", from, sizeof(T), alignof(T));
  return *from;
}
template <class T>
SCALEDOT_DEVICE void global_store(T* to, T x) {
  sim::write_global("global_store", to, sizeof(T), alignof(T));
  *to = x;
}

#endif

// Elements of an array, as T.
template <class T, class Stored>
struct Elements {
  const Stored* data;

  SCALEDOT_MEMBER static T number(Stored x) {
    if constexpr (sizeof(Stored) == 1)
      return T(x != 0);  // boolean
    else
      return T(widen(x));
  }
  SCALEDOT_MEMBER T operator()(int64_t index) const { return number(global_load(data + index)); }
  // Two neighbours, in one load. Their address is a multiple of their size: pairs_at(index).
  SCALEDOT_MEMBER void load_pair(int64_t index, T& first, T& second) const {
    const auto pair = global_load(reinterpret_cast<const AlignedVector<Stored, 2>*>(data + index));
    first = number(pair.x[0]), second = number(pair.x[1]);
  }
  SCALEDOT_MEMBER bool pairs_at(int64_t index) const {
    return reinterpret_cast<uintptr_t>(data + index) % sizeof(AlignedVector<Stored, 2>) == 0;
  }
};

// Calls body(elements) with the Elements of an array whose dtype is only known at run time. The dtype is looked up
// once, so that no load waits for the one before it.
template <class T, class Body>
SCALEDOT_DEVICE void with_elements(const void* data, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32: return body(Elements<T, float>{static_cast<const float*>(data)});
    case DType::float64: return body(Elements<T, double>{static_cast<const double*>(data)});
    case DType::bfloat16: return body(Elements<T, BFloat16>{static_cast<const BFloat16*>(data)});
    case DType::float16: return body(Elements<T, Float16>{static_cast<const Float16*>(data)});
    default: return body(Elements<T, uint8_t>{static_cast<const uint8_t*>(data)});
  }
}

// Element `index` of an array whose dtype is only known at run time.
template <class T>
SCALEDOT_DEVICE T global_element(const void* data, DType dtype, int64_t index) {
#if !defined(__CUDACC__)
  const int64_t size = element_size(dtype);
  sim::read_global("global_element", static_cast<const char*>(data) + index * size, size_t(size), size_t(size));
#endif
  return load_element<T>(data, dtype, index);
}
template <class T>
SCALEDOT_DEVICE void global_store_element(void* data, DType dtype, int64_t index, T x) {
#if !defined(__CUDACC__)
  const int64_t size = element_size(dtype);
  sim::write_global("global_store_element", static_cast<char*>(data) + index * size, size_t(size), size_t(size));
#endif
  store_element(data, dtype, index, x);
}

}  // namespace scaledot
