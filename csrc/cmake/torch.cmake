# The torch packages to build for, by path: find_package(Torch) on a CUDA build of torch demands a full CUDA toolkit.
#   SCALEDOT_TORCH_DIRS          their folders      SCALEDOT_TORCH_CUDA   ON if one of them is a CUDA build
#   SCALEDOT_TORCH_CUDA_VERSIONS   of these builds, e.g. 13.0
#   scaledot_find_torch()        a target to link, for one of them
#   SCALEDOT_OPENMP_FLAGS        for the sources that call at::parallel_for
if(NOT SCALEDOT_TORCH_DIRS)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/python/scaledot_build/torch_folder.py
    OUTPUT_VARIABLE found ERROR_VARIABLE reason OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT found)
    message(FATAL_ERROR "${reason}")
  endif()
  set_property(CACHE SCALEDOT_TORCH_DIRS PROPERTY VALUE ${found})
endif()

# Sets `version`, e.g. 2.13.0+cpu, and `cuda`, e.g. 13.0 or empty, of the torch in `dir`.
macro(scaledot_read_torch_version dir)
  set(version)
  set(cuda)
  file(STRINGS ${dir}/version.py lines REGEX "^(__version__|cuda)[: ].*= *'")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE ".*= *'([^']*)'.*" "\\1" text "${line}")
    if(line MATCHES "^cuda")
      set(cuda ${text})
    else()
      set(version ${text})
    endif()
  endforeach()
  if(NOT version)
    message(FATAL_ERROR "${dir}/version.py names no version: is this a torch package?")
  endif()
endmacro()

set(SCALEDOT_TORCH_CUDA OFF)
set(SCALEDOT_TORCH_CUDA_VERSIONS)
foreach(dir IN LISTS SCALEDOT_TORCH_DIRS)
  scaledot_read_torch_version(${dir})
  message(STATUS "torch ${version} in ${dir}")
  if(cuda)
    set(SCALEDOT_TORCH_CUDA ON)
    list(APPEND SCALEDOT_TORCH_CUDA_VERSIONS ${cuda})
  endif()
endforeach()

# One OpenMP runtime in the process, torch's own: with a second one torch.set_num_threads would not reach us. Wheels of
# torch bundle GNU's, some under other names, so the ops name none: they find GNU's functions through
# libtorch_cpu.so, which needs them too. Everything else has to be found when the library is linked.
find_package(OpenMP REQUIRED COMPONENTS CXX)
separate_arguments(SCALEDOT_OPENMP_FLAGS NATIVE_COMMAND "${OpenMP_CXX_FLAGS}")
set(SCALEDOT_OPENMP_LINK ${OpenMP_CXX_LIBRARIES} ${SCALEDOT_ALL_DEFINED})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  include(CheckLinkerFlag)
  check_linker_flag(CXX LINKER:--ignore-unresolved-symbol=GOMP_parallel SCALEDOT_LINKER_IGNORES)
  set(SCALEDOT_OPENMP_LINK)  # other linkers than GNU's cannot leave out single symbols
  if(SCALEDOT_LINKER_IGNORES)
    set(SCALEDOT_OPENMP_LINK ${SCALEDOT_ALL_DEFINED})
    foreach(symbol GOMP_parallel omp_get_num_threads omp_get_thread_num)
      list(APPEND SCALEDOT_OPENMP_LINK LINKER:--ignore-unresolved-symbol=${symbol})
    endforeach()
  endif()
endif()

# Adds the interface library `target`: the headers of the torch in `dir`, libtorch_cpu and libc10. Not libtorch: nothing
# here needs it, and in CUDA builds it has functions of the C++ runtime that would be taken from it. Sets version and
# minor (2.13).
function(scaledot_find_torch target dir)
  scaledot_read_torch_version(${dir})
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor ${version})
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE ${dir}/include ${dir}/include/torch/csrc/api/include)
  foreach(name torch_cpu c10)
    target_link_libraries(${target} INTERFACE ${dir}/lib/lib${name}${CMAKE_SHARED_LIBRARY_SUFFIX})
  endforeach()
  return(PROPAGATE version minor)
endfunction()
