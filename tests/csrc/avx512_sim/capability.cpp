// Replaces csrc/cpu/capability.cpp in the program whose AVX-512 kernels are emulated (immintrin.h in this folder).
#include "cpu/cpu.h"

namespace scaledot {

Capability capability() { return Capability::avx512_bf16; }

const char* cpu_capability() { return "avx512_bf16"; }

}  // namespace scaledot
