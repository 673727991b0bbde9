// Replaces csrc/cpu/capability.cpp in the program whose AVX-512 kernels are emulated (immintrin.h in this folder).
#include "cpu/cpu.h"

namespace scaledot {

#if defined(SCALEDOT_HAS_AMX)
Capability capability() { return Capability::amx_bf16; }
#else
Capability capability() { return Capability::avx512_bf16; }
#endif

const char* cpu_capability() { return kCapabilityLevels[int(capability())].name; }

}  // namespace scaledot
