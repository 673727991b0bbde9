// Definitions of functions that compilers and their headers take from newer C and C++ runtimes without being asked.
// With them a library that a new compiler made also loads on an older system (manylinux_2_28: glibc 2.28, libstdc++ of
// gcc 8).
// Some of these symbols are in torch's libraries too, but not in each build of torch.
// All are hidden, so nobody else sees them. The assembler's name distinguishes each from a header's declaration.
// core/math.h does the same for functions of libm. test_build.py and `bash tests/wheel` find whatever else is too new.
#include <exception>
#include <new>
#include <sstream>

#if defined(__GLIBCXX__)

#define SCALEDOT_SYMBOL(name) __asm__(name)
#define SCALEDOT_DEFINES(name) SCALEDOT_SYMBOL(name) __attribute__((visibility("hidden")))

extern "C" void* __cxa_begin_catch(void*) noexcept;

// Members of templates that libstdc++ has ready-made since gcc 9 and 11: made here instead.
__asm__(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
__asm__(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC2Ev");
template std::basic_ostringstream<char>::basic_ostringstream();
#if _GLIBCXX_RELEASE >= 11
__asm__(".hidden _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
template std::string std::basic_stringbuf<char>::str() const&;
__asm__(".hidden _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
template std::string std::basic_stringbuf<char>::str() &&;
#endif

namespace scaledot {

// libstdc++ of gcc 11, for std::exception_ptr. Two older functions count the same references: a constructor adds one,
// and the destructor of std::nested_exception, whose only member is an exception_ptr, gives one back.
void construct_exception_ptr(void* result, void* exception) noexcept
    SCALEDOT_SYMBOL("_ZNSt15__exception_ptr13exception_ptrC1EPv");
void add_reference(void** pointer) noexcept SCALEDOT_DEFINES("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void** pointer) noexcept {
  void* never_destroyed;
  construct_exception_ptr(&never_destroyed, *pointer);
}

void destroy_nested_exception(void* nested) SCALEDOT_SYMBOL("_ZNSt16nested_exceptionD1Ev");
void release(void** pointer) noexcept SCALEDOT_DEFINES("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void** pointer) noexcept {
  void* nested[2] = {nullptr, *pointer};  // the table of virtual functions, the member
  static_assert(sizeof nested == sizeof(std::nested_exception) && sizeof(void*) == sizeof(std::exception_ptr));
  *pointer = nullptr;
  destroy_nested_exception(nested);
}

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

#endif
