# Instruction sets: the files csrc/cpu/<isa>.cpp, tests/csrc/simd_<isa>.cpp and tests/bench/peaks/<isa>.cpp are compiled
# with their own flags. Everything else runs on any x86-64. check_isa_symbols.py checks that such a file defines no
# symbol that the linker could use in place of another file's.
set(SCALEDOT_ISAS baseline avx2 avx512 avx512_bf16)
set(SCALEDOT_ISA_FLAGS_baseline)
set(SCALEDOT_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SCALEDOT_ISA_FLAGS_avx512 ${SCALEDOT_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(SCALEDOT_ISA_FLAGS_avx512_bf16 ${SCALEDOT_ISA_FLAGS_avx512} -mavx512bf16)

# Sets the flags of the instruction-set files in the named list, and removes the files of other architectures from it.
# Returns the remaining instruction sets in SCALEDOT_ISAS_BUILT.
function(scaledot_isa_flags list_name)
  set(kept ${${list_name}})
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(FILTER kept EXCLUDE REGEX "/(simd_)?avx[^/]*\\.cpp$")
  endif()
  set(built)
  foreach(isa IN LISTS SCALEDOT_ISAS)
    set(files ${kept})
    list(FILTER files INCLUDE REGEX "/(simd_)?${isa}\\.cpp$")
    if(files)
      set_property(SOURCE ${files} APPEND PROPERTY COMPILE_OPTIONS
                   ${SCALEDOT_ISA_FLAGS_${isa}} -ffp-contract=fast -fno-math-errno -fno-trapping-math)
      list(APPEND built ${isa})
    endif()
  endforeach()
  if(avx2 IN_LIST built)
    set(SCALEDOT_ISA_DEFINITIONS SCALEDOT_X86=1 PARENT_SCOPE)
  endif()
  set(SCALEDOT_ISAS_BUILT ${built} PARENT_SCOPE)
  set(${list_name} ${kept} PARENT_SCOPE)
endfunction()
