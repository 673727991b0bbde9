// The CPU kernels of each instruction set, and which instruction sets this machine supports.
#pragma once

#include "core/kernel.h"

namespace scaledot {

// The levels of this architecture: each has the instruction sets of those before it.
struct CapabilityLevel {
  const char* name;   // for users; "default" is what torch calls the level without any
  const char* below;  // why a machine below it cannot run its kernels
};
#if defined(__x86_64__)
enum class Capability : int { default_isa, avx2, avx512, avx512_bf16, amx_bf16 };
constexpr CapabilityLevel kCapabilityLevels[] = {{"default", nullptr},
                                                 {"avx2", "cpu_capability() is below avx2"},
                                                 {"avx512", "cpu_capability() is below avx512"},
                                                 {"avx512_bf16", "cpu_capability() is below avx512_bf16"},
                                                 {"amx_bf16", "cpu_capability() is below amx_bf16"}};
#elif defined(__aarch64__)
enum class Capability : int { default_isa, neon, neon_bf16 };
constexpr CapabilityLevel kCapabilityLevels[] = {{"default", nullptr},
                                                 {"neon", "cpu_capability() is below neon"},
                                                 {"neon_bf16", "cpu_capability() is below neon_bf16"}};
#else
enum class Capability : int { default_isa };
constexpr CapabilityLevel kCapabilityLevels[] = {{"default", nullptr}};
#endif
constexpr int kCapabilities = sizeof(kCapabilityLevels) / sizeof(kCapabilityLevels[0]);

Capability capability();  // csrc/cpu/capability.cpp

// Why this machine cannot run what needs `least`; nullptr if it can.
static inline const char* why_below(Capability least) {
  return capability() < least ? kCapabilityLevels[int(least)].below : nullptr;
}

extern const Kernel kDefaultKernel, kDefaultDecodeKernel, kDefaultKeyListsKernel;
#if defined(__x86_64__)
extern const Kernel kAvx2Kernel, kAvx2DecodeKernel, kAvx2KeyListsKernel;
extern const Kernel kAvx512Kernel, kAvx512DecodeKernel, kAvx512KeyListsKernel;
extern const Kernel kAvx512Bf16Kernel;
// Only in a build with SCALEDOT_HAS_AMX.
extern const Kernel kAmxBf16Kernel, kAmxBf16DecodeKernel, kAmxBf16KeyListsKernel;
#elif defined(__aarch64__)
extern const Kernel kNeonKernel, kNeonDecodeKernel, kNeonKeyListsKernel;
extern const Kernel kNeonBf16Kernel;
#endif

}  // namespace scaledot
