# lib/torchX.Y/libscaledot.so for each torch, and the CMake package for C++ programs.
# Makes `#include <scaledot/...>` work in the source tree as it does for users of the installed package.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/include)
file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR}/csrc ${CMAKE_BINARY_DIR}/include/scaledot SYMBOLIC)
file(GLOB_RECURSE op_sources CONFIGURE_DEPENDS csrc/ops/*.cpp csrc/nn/*.cpp)

# Four batches. Parsing torch's headers takes longer than all else that the compiler does for most of these files, so
# the files of a batch are compiled as one. They then share a scope: no two may use a name for different things.
foreach(source IN LISTS op_sources)
  cmake_path(GET source PARENT_PATH folder)
  cmake_path(GET folder FILENAME batch)
  if(batch MATCHES "^(ops|cpu|dropin|registration)$")
    set(batch common)
  elseif(batch STREQUAL "cuda")
    set(batch varlen)
  endif()
  set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${batch})
endforeach()

# lib/torchX.Y/libscaledot.so: the ops and the C++ API, compiled for one minor version of torch.
# Symbols keep the default visibility, because C++ users call the ops.
function(scaledot_add_ops target torch_dir)
  scaledot_find_torch(${target}_torch ${torch_dir})  # sets minor, version
  add_library(${target} SHARED ${op_sources})
  target_include_directories(${target} PRIVATE csrc ${CMAKE_BINARY_DIR}/include ${CMAKE_BINARY_DIR}/generated)
  target_link_libraries(${target} PRIVATE scaledot_kernels ${target}_torch scaledot_warnings)
  # Without -fopenmp, at::parallel_for is serial. GCC 12 warns of an overflow in the destructor of torch's IValue; there
  # is none.
  target_compile_options(${target} PRIVATE -fno-semantic-interposition ${SCALEDOT_OPENMP_FLAGS}
                         $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>)
  target_compile_definitions(${target} PRIVATE
      SCALEDOT_TORCH_VERSION="${version}" SCALEDOT_OP_NAMESPACE=${SCALEDOT_OP_NAMESPACE})
  target_link_options(${target} PRIVATE ${SCALEDOT_OPENMP_LINK})
  if(SCALEDOT_BATCHES)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  else()
    target_precompile_headers(${target} PRIVATE <ATen/core/Tensor.h> <torch/library.h>)
  endif()
  set_target_properties(${target} PROPERTIES OUTPUT_NAME scaledot LIBRARY_OUTPUT_DIRECTORY lib/torch${minor})
  # The library may stand beside torch in site-packages. An editable one has torch elsewhere.
  set(rpath "${SCALEDOT_ORIGIN}/.." "${SCALEDOT_ORIGIN}/../../../torch/lib")
  if(SCALEDOT_EDITABLE)
    list(APPEND rpath ${torch_dir}/lib)
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath}")
  install(TARGETS ${target} LIBRARY DESTINATION lib/torch${minor} COMPONENT scaledot)
endfunction()

set(number 0)
foreach(dir IN LISTS SCALEDOT_TORCH_DIRS)
  scaledot_add_ops(scaledot_ops_${number} ${dir})
  math(EXPR number "${number} + 1")
endforeach()
