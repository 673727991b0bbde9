// What compilers and their headers take from newer C and C++ runtimes without being asked. With definitions of our own,
// a library that a new compiler made also loads on an older system (manylinux_2_28: glibc 2.28, libstdc++ of gcc 8).
// They are hidden, so nobody else sees them. The assembler's name keeps each apart from a header's declaration.
// core/math.h does the same for exp and log. `bash tests/wheel` lists whatever else is too new.
#include <exception>
#include <new>

#define SCALEDOT_DEFINES(symbol) __asm__(symbol) __attribute__((visibility("hidden")))

extern "C" void* __cxa_begin_catch(void*) noexcept;

namespace scaledot {

// glibc 2.32, for std::shared_ptr of gcc 11: whether a count may be changed without an atomic instruction. Never: a
// process with torch has threads.
extern char single_threaded SCALEDOT_DEFINES("__libc_single_threaded");
char single_threaded = 0;

// libstdc++ of gcc 11, for std::allocator and std::vector.
[[noreturn]] void throw_bad_array_new_length() SCALEDOT_DEFINES("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// libstdc++ of gcc 13, for <iostream>: makes std::cout ready before main. Nothing here prints.
void init_iostream() SCALEDOT_DEFINES("_ZSt21ios_base_library_initv");
void init_iostream() {}

// libstdc++ of gcc 14, for an exception that leaves a noexcept function.
[[noreturn]] void call_terminate(void* exception) SCALEDOT_DEFINES("__cxa_call_terminate");
void call_terminate(void* exception) {
  if (exception != nullptr) __cxa_begin_catch(exception);
  std::terminate();
}

}  // namespace scaledot
