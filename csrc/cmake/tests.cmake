# The GoogleTest programs of tests/csrc, and a check of the instruction-set files. Run by ctest.
find_package(GTest REQUIRED)
include(GoogleTest)
file(GLOB test_sources CONFIGURE_DEPENDS tests/csrc/*.cpp)
if(test_sources)
  add_executable(scaledot_tests ${test_sources})
  target_include_directories(scaledot_tests PRIVATE csrc tests/csrc ${CMAKE_BINARY_DIR}/include)
  target_link_libraries(scaledot_tests PRIVATE scaledot scaledot_torch scaledot_warnings GTest::gtest_main)
  target_compile_definitions(scaledot_tests PRIVATE ${SCALEDOT_ISA_DEFINITIONS})
  gtest_discover_tests(scaledot_tests DISCOVERY_TIMEOUT 60)
endif()

add_test(NAME isa_symbols
         COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} "-DOBJECTS=$<TARGET_OBJECTS:scaledot>" "-DISAS=${SCALEDOT_ISAS_BUILT}"
                 -P ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cmake/check_isa_symbols.cmake)
