# Decides whether the CUDA kernels csrc/cuda/**/*.cu are compiled, and for which GPUs.
#   SCALEDOT_CUDA   auto: if torch is a CUDA build and nvcc is found      1: with any torch      0: never
#   TORCH_CUDA_ARCH_LIST (environment variable): the architectures, as for torch's own extensions, e.g. "8.0+PTX;9.0a"
#     or "native"
include(cuda_archs)
set(SCALEDOT_CUDA_ENABLED OFF)
set(SCALEDOT_CUDA_ARCHS)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu)

if(NOT SCALEDOT_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "SCALEDOT_CUDA: got '${SCALEDOT_CUDA}'; needs auto, 1 or 0")
elseif(NOT cuda_sources)
  message(STATUS "CUDA: this version has no CUDA sources, so SCALEDOT_CUDA=${SCALEDOT_CUDA} builds the CPU kernels")
elseif(NOT SCALEDOT_CUDA STREQUAL "0")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND (SCALEDOT_CUDA STREQUAL "1" OR SCALEDOT_TORCH_CUDA))
    set(SCALEDOT_CUDA_ENABLED ON)
  elseif(SCALEDOT_CUDA STREQUAL "1")
    message(FATAL_ERROR "SCALEDOT_CUDA: got 1, but nvcc was not found; needs nvcc on the PATH or in CUDACXX")
  endif()
endif()

if(SCALEDOT_CUDA_ENABLED)
  find_package(CUDAToolkit REQUIRED)
  set(wanted "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(NOT wanted)
    set(wanted "8.0+PTX;9.0a")  # other GPUs compile the PTX
    if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
      list(APPEND wanted 10.0 12.0)
    endif()
  endif()
  scaledot_find_cuda_archs("${wanted}")
  enable_language(CUDA)
  message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${SCALEDOT_CUDA_ARCHS}")
  foreach(version IN LISTS SCALEDOT_TORCH_CUDA_VERSIONS)
    if(NOT version MATCHES "^${CUDAToolkit_VERSION_MAJOR}\\.")
      message(WARNING "nvcc: got CUDA ${CUDAToolkit_VERSION}; needs the major version of torch's CUDA ${version}, or "
                      "the kernels may need a newer driver than torch does")
    endif()
  endforeach()
endif()

option(SCALEDOT_WATCHDOG "Also build watchdog/libscaledot_cuda.so, where a wait of 2 s is an error: tests/gpu" OFF)

# <folder>/libscaledot_cuda.so: the GPU kernels. They include no torch header. The library links the static CUDA runtime
# and nothing of torch, so it loads under every torch.
function(scaledot_add_cuda_library target folder)
  add_library(${target} SHARED ${cuda_sources} csrc/cuda/library.cpp csrc/cuda/old_glibc.cpp)
  target_include_directories(${target} PRIVATE csrc ${CMAKE_BINARY_DIR}/generated)
  target_link_libraries(${target} PRIVATE scaledot_kernels scaledot_warnings CUDA::cudart_static)
  target_link_options(${target} PRIVATE ${SCALEDOT_ALL_DEFINED})
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static
                        OUTPUT_NAME scaledot_cuda LIBRARY_OUTPUT_DIRECTORY ${folder})
  if("sm_90a" IN_LIST SCALEDOT_CUDA_ARCHS)  # without the a there are no wgmma instructions
    target_compile_definitions(${target} PRIVATE SCALEDOT_SM90A=1)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--extended-lambda>"
                         "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SCALEDOT_WERROR}>>:-Werror=all-warnings>")
  # Beside the kernels, or in the package scaledot_cuda beside the package scaledot.
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../scaledot/lib")
endfunction()

function(scaledot_add_cuda_libraries)
  scaledot_add_cuda_library(scaledot_cuda lib)
  install(TARGETS scaledot_cuda LIBRARY DESTINATION lib COMPONENT cuda)
  if(SCALEDOT_WATCHDOG)
    scaledot_add_cuda_library(scaledot_cuda_watchdog watchdog)
    target_compile_definitions(scaledot_cuda_watchdog PRIVATE SCALEDOT_WATCHDOG=1)
    install(TARGETS scaledot_cuda_watchdog LIBRARY DESTINATION lib COMPONENT watchdog EXCLUDE_FROM_ALL)
  endif()
endfunction()
