# Cross-compiling for ARM64 with Debian's and Ubuntu's g++-aarch64-linux-gnu, and running under QEMU. With CXX=clang++
# Clang compiles, with the same headers and libraries.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if("$ENV{CXX}" MATCHES "clang")
  set(CMAKE_CXX_COMPILER $ENV{CXX})
  set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
else()
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64;-cpu;max;-L;/usr/aarch64-linux-gnu")
