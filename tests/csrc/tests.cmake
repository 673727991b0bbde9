# The GoogleTest programs of tests/csrc (kernels, without torch) and tests/csrc/torch (the C++ module), and a check of
# the instruction-set files. ctest runs them.
find_package(GTest REQUIRED)
set(isas ${SCALEDOT_ISAS_BUILT})
file(GLOB test_sources CONFIGURE_DEPENDS tests/csrc/*.cpp tests/csrc/device_sim/*.cpp)
set(device_sources ${test_sources})
list(FILTER device_sources INCLUDE REGEX "/device_")
if(CMAKE_CROSSCOMPILING)  # the GPU kernels are the same for every host
  list(REMOVE_ITEM test_sources ${device_sources})
endif()
scaledot_isa_flags(test_sources)
# The oracle of the C++ tests, the bench and the fuzzer.
add_library(scaledot_reference OBJECT tests/reference/reference.cpp)
target_include_directories(scaledot_reference PRIVATE csrc PUBLIC tests/reference)
target_link_libraries(scaledot_reference PRIVATE scaledot_warnings)
set(test_isas ${SCALEDOT_ISAS_BUILT})
add_executable(scaledot_tests ${test_sources} csrc/ops/compat.cpp)
set_source_files_properties(tests/csrc/case_file.cpp PROPERTIES COMPILE_DEFINITIONS
                            "SCALEDOT_CASES=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/data/cases.txt\"")
# GPU kernels, compiled for the host: they have nvcc's unrolling pragmas.
set_property(SOURCE ${device_sources} APPEND PROPERTY COMPILE_OPTIONS -Wno-unknown-pragmas)
target_include_directories(scaledot_tests PRIVATE csrc tests/csrc ${CMAKE_BINARY_DIR}/include)
target_link_libraries(scaledot_tests PRIVATE scaledot_cpu scaledot_reference scaledot_warnings GTest::gtest_main)

# Tests <prefix>_<k>_of_4: the cases of a program, run with further arguments. A process for each of thousands of short
# cases would take longer than the case. With a few processes, ctest -j still helps.
function(scaledot_add_shards prefix program)
  set(shards 4)
  foreach(shard RANGE 1 ${shards})
    math(EXPR index "${shard} - 1")
    add_test(NAME ${prefix}_${shard}_of_${shards} COMMAND ${program} --gtest_brief=1 ${ARGN})
    set_tests_properties(${prefix}_${shard}_of_${shards} PROPERTIES
                         ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${index}")
  endforeach()
endfunction()
scaledot_add_shards(csrc scaledot_tests)

if(avx512_bf16 IN_LIST isas)
  add_subdirectory(tests/csrc/avx512_sim)
endif()

if(SCALEDOT_OPS)
  add_executable(scaledot_torch_tests tests/csrc/torch/multi_head_attention_test.cpp)
  target_include_directories(scaledot_torch_tests PRIVATE csrc)
  target_link_libraries(scaledot_torch_tests
                        PRIVATE scaledot_ops_0 scaledot_ops_0_torch scaledot_warnings GTest::gtest_main)
  add_test(NAME csrc_torch COMMAND scaledot_torch_tests --gtest_brief=1)

  # csrc/core for Python's property tests, through pybind11, whose headers torch has.
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  list(GET SCALEDOT_TORCH_DIRS 0 torch_dir)
  Python_add_library(scaledot_core MODULE WITH_SOABI tests/csrc/python/core.cpp)
  target_include_directories(scaledot_core PRIVATE csrc)
  target_include_directories(scaledot_core SYSTEM PRIVATE ${torch_dir}/include)
  target_link_libraries(scaledot_core PRIVATE scaledot_warnings)
  add_test(NAME csrc_core_from_python
           COMMAND ${Python_EXECUTABLE} -m pytest -q --noconftest -p no:cacheprovider
                   ${CMAKE_CURRENT_SOURCE_DIR}/tests/csrc/python/test_core.py)
  set_tests_properties(csrc_core_from_python PROPERTIES ENVIRONMENT "PYTHONPATH=$<TARGET_FILE_DIR:scaledot_core>")
endif()

function(scaledot_check_isa_symbols target isas)
  list(JOIN isas "," names)
  add_test(NAME isa_symbols_of_${target}
           COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/csrc/check_isa_symbols.py
                   ${CMAKE_NM} "${names}" $<TARGET_OBJECTS:${target}>
           COMMAND_EXPAND_LISTS)
endfunction()
scaledot_check_isa_symbols(scaledot_cpu "${isas}")
scaledot_check_isa_symbols(scaledot_tests "${test_isas}")

# Checks ptxas's report for register spills. float64 is not checked: it is not fast anywhere.
if(SCALEDOT_CUDA_ENABLED)
  set(csrc_tests ${CMAKE_CURRENT_SOURCE_DIR}/tests/csrc)
  set_property(TARGET scaledot_cuda PROPERTY CUDA_COMPILER_LAUNCHER ${Python_EXECUTABLE} ${csrc_tests}/ptxas_report.py
                                             ${CMAKE_CUDA_COMPILER_LAUNCHER})
  add_test(NAME cuda_spills
           COMMAND ${Python_EXECUTABLE} ${csrc_tests}/spills.py --leave-out fp64 --
                   ${CMAKE_BINARY_DIR}/CMakeFiles/scaledot_cuda.dir)
  # Compares the machine code that was built with tests/gpu/sass_table.json.
  if("sm_90a" IN_LIST SCALEDOT_CUDA_ARCHS)
    add_test(NAME cuda_sass
             COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/sass
                     --nvcc ${CMAKE_CUDA_COMPILER_VERSION} --cache ${CMAKE_BINARY_DIR}/sass
                     $<TARGET_FILE:scaledot_cuda>)
  endif()
endif()
