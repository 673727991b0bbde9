// Memory accesses that ThreadSanitizer is not to look at: those of code that runs on one thread, for speed. The
// functions that are declared weak exist only in a program with ThreadSanitizer.
#pragma once

extern "C" {
[[gnu::weak]] void __tsan_ignore_thread_begin();
[[gnu::weak]] void __tsan_ignore_thread_end();
}

namespace scaledot::testing {

// This thread's accesses are not looked at until this ends.
class Unchecked {
 public:
  Unchecked() {
    if (__tsan_ignore_thread_begin) __tsan_ignore_thread_begin();
  }
  Unchecked(const Unchecked&) = delete;
  ~Unchecked() {
    if (__tsan_ignore_thread_end) __tsan_ignore_thread_end();
  }
};

}  // namespace scaledot::testing
