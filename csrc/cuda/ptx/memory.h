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
