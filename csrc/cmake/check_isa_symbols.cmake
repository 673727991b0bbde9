# Fails if an instruction-set object defines a weak or unique symbol (nm: W, V, u). The linker keeps one definition of
# such a symbol for the whole library: if it kept the one compiled for AVX-512, other code would crash on older CPUs.
#   cmake -DNM=nm -DOBJECTS=a.o;b.o -DISAS=avx2;avx512 -P check_isa_symbols.cmake
set(checked 0)
foreach(object IN LISTS OBJECTS)
  cmake_path(GET object STEM LAST_ONLY source)  # avx2.cpp
  cmake_path(GET source STEM isa)
  if(NOT object MATCHES "/csrc/cpu/" OR NOT isa IN_LIST ISAS)
    continue()
  endif()
  math(EXPR checked "${checked} + 1")
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]*" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " weak)
    message(SEND_ERROR "${isa}.cpp defines symbols that could replace those of other files:\n  ${weak}")
  endif()
endforeach()
list(LENGTH ISAS expected)
if(NOT checked EQUAL expected)
  message(FATAL_ERROR "expected the objects of ${ISAS}, found ${checked} among ${OBJECTS}")
endif()
message(STATUS "${checked} objects define no weak symbol")
