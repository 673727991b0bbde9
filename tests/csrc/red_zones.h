// Memory that a kernel must not touch: in a program with AddressSanitizer, an access ends it with a report. The
// functions that are declared weak exist only there.
#pragma once

#include <vector>

#include "test_tensor.h"

extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* begin, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
}

namespace scaledot::testing {

// Everything that was added is accessible again when this ends.
class RedZones {
 public:
  RedZones() = default;
  RedZones(const RedZones&) = delete;
  ~RedZones() {
    for (const Zone& zone : zones_) __asan_unpoison_memory_region(zone.begin, zone.bytes);
  }

  // Makes all of this memory accessible.
  static void open(const void* begin, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(begin, bytes);
  }

  void add(const void* begin, size_t bytes) {
    if (!__asan_poison_memory_region || bytes == 0) return;
    zones_.push_back({begin, bytes});
    __asan_poison_memory_region(begin, bytes);
  }
  // Poisons the bytes before, between and after the elements.
  void add(const TestTensor& tensor) {
    if (__asan_poison_memory_region)
      tensor.for_each_gap([this](const void* begin, size_t bytes) { add(begin, bytes); });
  }

 private:
  struct Zone {
    const void* begin;
    size_t bytes;
  };
  std::vector<Zone> zones_;
};

}  // namespace scaledot::testing
