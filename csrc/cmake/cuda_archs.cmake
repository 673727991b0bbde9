# scaledot_find_cuda_archs(<words>): the GPU architectures that words as those of TORCH_CUDA_ARCH_LIST name, for nvcc
# (CMAKE_CUDA_ARCHITECTURES) and as messages and build_info() name them (SCALEDOT_CUDA_ARCHS, as in
# "sm_80;compute_80;sm_90a"). "native": the GPUs of this machine.
function(scaledot_find_cuda_archs words)
  string(REGEX REPLACE "[ ,]+" ";" words "${words}")
  if("native" IN_LIST words)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE found ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
    if(NOT found)
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: got native, but nvidia-smi names no GPU; needs architectures such as "
                          "8.0, 9.0a or 9.0+PTX")
    endif()
    list(TRANSFORM found REPLACE "^9\\.0$" "9.0a")  # without the a there are no wgmma instructions
    list(TRANSFORM words REPLACE "^native$" "${found}")
  endif()
  list(REMOVE_DUPLICATES words)
  foreach(word IN LISTS words)
    if(NOT word MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: got '${word}'; needs native, or architectures such as 8.0, 9.0a or "
                          "9.0+PTX")
    endif()
    list(APPEND for_nvcc "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
    list(APPEND names "sm_${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if(CMAKE_MATCH_3)
      list(APPEND for_nvcc "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-virtual")
      list(APPEND names "compute_${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${for_nvcc}" PARENT_SCOPE)
  set(SCALEDOT_CUDA_ARCHS "${names}" PARENT_SCOPE)
endfunction()
