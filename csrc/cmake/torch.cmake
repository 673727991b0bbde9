# The torch to build for, by path: find_package(Torch) on a CUDA build of torch demands a full CUDA toolkit.
#   scaledot_torch               its headers, libtorch, libtorch_cpu, libc10 and the OpenMP runtime it uses
#   SCALEDOT_TORCH_VERSION       e.g. 2.13.0+cpu      SCALEDOT_TORCH_CUDA   e.g. 13.0, empty for a CPU build
#   SCALEDOT_OPENMP_FLAGS        for the sources that call at::parallel_for
if(NOT SCALEDOT_TORCH_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/python/scaledot_build/torch_folder.py
    OUTPUT_VARIABLE found ERROR_VARIABLE reason OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT found)
    message(FATAL_ERROR "${reason}")
  endif()
  set_property(CACHE SCALEDOT_TORCH_DIR PROPERTY VALUE ${found})
endif()

file(STRINGS ${SCALEDOT_TORCH_DIR}/version.py lines REGEX "^(__version__|cuda)[: ].*= *'")
foreach(line IN LISTS lines)
  string(REGEX REPLACE ".*= *'([^']*)'.*" "\\1" text "${line}")
  if(line MATCHES "^cuda")
    set(SCALEDOT_TORCH_CUDA ${text})
  else()
    set(SCALEDOT_TORCH_VERSION ${text})
  endif()
endforeach()
if(NOT SCALEDOT_TORCH_VERSION)
  message(FATAL_ERROR "${SCALEDOT_TORCH_DIR}/version.py names no version: is this a torch package?")
endif()
message(STATUS "torch ${SCALEDOT_TORCH_VERSION} in ${SCALEDOT_TORCH_DIR}")

add_library(scaledot_torch INTERFACE)
target_include_directories(scaledot_torch SYSTEM INTERFACE
    ${SCALEDOT_TORCH_DIR}/include ${SCALEDOT_TORCH_DIR}/include/torch/csrc/api/include)
set(SCALEDOT_TORCH_LIBRARY_DIRS ${SCALEDOT_TORCH_DIR}/lib)
foreach(name torch torch_cpu c10)
  find_library(TORCH_LIBRARY_${name} ${name} PATHS ${SCALEDOT_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(scaledot_torch INTERFACE ${TORCH_LIBRARY_${name}})
endforeach()

# One OpenMP runtime in the process, torch's own: with a second one torch.set_num_threads would not reach us. Wheels
# bundle GNU's under a name of their own; a torch built from source uses the system's.
find_package(OpenMP REQUIRED COMPONENTS CXX)
separate_arguments(SCALEDOT_OPENMP_FLAGS NATIVE_COMMAND "${OpenMP_CXX_FLAGS}")
file(GLOB bundled ${SCALEDOT_TORCH_DIR}/lib/libgomp*.so* ${SCALEDOT_TORCH_DIR}/../torch.libs/libgomp*.so*)
if(bundled AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(GET bundled 0 openmp)
  cmake_path(GET openmp PARENT_PATH openmp_dir)
  list(APPEND SCALEDOT_TORCH_LIBRARY_DIRS ${openmp_dir})
  list(REMOVE_DUPLICATES SCALEDOT_TORCH_LIBRARY_DIRS)
  target_link_libraries(scaledot_torch INTERFACE ${openmp})
else()
  target_link_libraries(scaledot_torch INTERFACE ${OpenMP_CXX_LIBRARIES})
endif()
