# Instruction sets: the files csrc/cpu/<isa>.cpp, tests/csrc/simd_<isa>.cpp and tests/bench/peaks/<isa>.cpp are compiled
# with their own flags. Everything else runs on every CPU of the architecture. tests/csrc/check_isa_symbols.py checks
# that such a file defines no symbol that the linker could use in place of another file's.
set(x86_64_isas avx2 avx512 avx512_bf16 amx_bf16)
set(arm64_isas neon neon_bf16)
set(SCALEDOT_ISA_FLAGS_default)
set(SCALEDOT_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SCALEDOT_ISA_FLAGS_avx512 ${SCALEDOT_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(SCALEDOT_ISA_FLAGS_avx512_bf16 ${SCALEDOT_ISA_FLAGS_avx512} -mavx512bf16)
set(SCALEDOT_ISA_FLAGS_amx_bf16 ${SCALEDOT_ISA_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
set(SCALEDOT_ISA_FLAGS_neon)  # every ARM64 CPU has it
set(SCALEDOT_ISA_FLAGS_neon_bf16 -march=armv8.2-a+bf16)

set(SCALEDOT_ISAS default)  # of this architecture
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND SCALEDOT_ISAS ${x86_64_isas})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  list(APPEND SCALEDOT_ISAS ${arm64_isas})
endif()

# The tile unit of AMX: only where Linux gives tiles to a process, and the compiler and its assembler know them. The
# sources that choose an instruction set are compiled with SCALEDOT_HAS_AMX then.
set(SCALEDOT_HAS_AMX OFF)
if(amx_bf16 IN_LIST SCALEDOT_ISAS)
  include(CheckCXXSourceCompiles)
  list(JOIN SCALEDOT_ISA_FLAGS_amx_bf16 " " CMAKE_REQUIRED_FLAGS)
  check_cxx_source_compiles("
      #include <immintrin.h>
      #include <sys/syscall.h>
      static_assert(SYS_arch_prctl > 0);
      int main() { _tile_zero(0); _tile_dpbf16ps(0, 1, 2); _tile_release(); }" SCALEDOT_COMPILES_AMX)
  unset(CMAKE_REQUIRED_FLAGS)
  if(SCALEDOT_COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(SCALEDOT_HAS_AMX ON)
    set_property(SOURCE csrc/cpu/capability.cpp csrc/cpu/kernels.cpp tests/csrc/simd_test.cpp
                 APPEND PROPERTY COMPILE_DEFINITIONS SCALEDOT_HAS_AMX)
  else()
    list(REMOVE_ITEM SCALEDOT_ISAS amx_bf16)
  endif()
endif()
set(SCALEDOT_OTHER_ISAS ${x86_64_isas} ${arm64_isas})
list(REMOVE_ITEM SCALEDOT_OTHER_ISAS ${SCALEDOT_ISAS})

# Sets the flags of the instruction-set files in the named list, and removes the files of other sets from it.
# Returns the remaining instruction sets in SCALEDOT_ISAS_BUILT.
function(scaledot_isa_flags list_name)
  set(kept ${${list_name}})
  foreach(isa IN LISTS SCALEDOT_OTHER_ISAS)
    list(FILTER kept EXCLUDE REGEX "/(simd_)?${isa}\\.cpp$")
  endforeach()
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
  set(SCALEDOT_ISAS_BUILT ${built} PARENT_SCOPE)
  set(${list_name} ${kept} PARENT_SCOPE)
endfunction()
