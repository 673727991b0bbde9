# The CMake package for C++ programs, installed beside the library: find_package(scaledot), scaledot::scaledot.
include(CMakePackageConfigHelpers)
install(CODE "file(REMOVE_RECURSE \"\${CMAKE_INSTALL_PREFIX}/include/scaledot\")")  # headers that are no more
install(FILES csrc/scaledot.h DESTINATION include/scaledot)
install(FILES csrc/ops/common/options.h DESTINATION include/scaledot/ops/common)
install(FILES csrc/ops/sdpa/block_mask.h csrc/ops/sdpa/sdpa.h DESTINATION include/scaledot/ops/sdpa)
install(FILES csrc/ops/varlen/varlen.h DESTINATION include/scaledot/ops/varlen)
install(DIRECTORY csrc/nn DESTINATION include/scaledot FILES_MATCHING PATTERN "*.h")
if(SCALEDOT_EDITABLE)
  list(JOIN SCALEDOT_TORCH_DIRS "\" \"" dirs)
  set(SCALEDOT_TORCH_HINT "\"${dirs}\"")
endif()
configure_package_config_file(csrc/cmake/scaledotConfig.cmake.in
    ${CMAKE_BINARY_DIR}/generated/scaledotConfig.cmake INSTALL_DESTINATION share/cmake/scaledot)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/generated/scaledotConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/generated/scaledotConfig.cmake
              ${CMAKE_BINARY_DIR}/generated/scaledotConfigVersion.cmake DESTINATION share/cmake/scaledot)
