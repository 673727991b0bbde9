// The CPU kernels of each instruction set, and which instruction sets this machine supports.
#pragma once

#include "core/kernel.h"

namespace scaledot {

// The levels of this architecture, by their names for users: each has the instruction sets of those before it.
// "default" is what torch calls the level without any; so is its kernel.
#if defined(__x86_64__)
enum class Capability : int { baseline, avx2, avx512, avx512_bf16 };
constexpr const char* kCapabilityNames[] = {"default", "avx2", "avx512", "avx512_bf16"};
constexpr const char* kBelowCapability[] = {nullptr, "cpu_capability() is below avx2",
                                            "cpu_capability() is below avx512",
                                            "cpu_capability() is below avx512_bf16"};
#elif defined(__aarch64__)
enum class Capability : int { baseline, neon, neon_bf16 };
constexpr const char* kCapabilityNames[] = {"default", "neon", "neon_bf16"};
constexpr const char* kBelowCapability[] = {nullptr, "cpu_capability() is below neon",
                                            "cpu_capability() is below neon_bf16"};
#else
enum class Capability : int { baseline };
constexpr const char* kCapabilityNames[] = {"default"};
constexpr const char* kBelowCapability[] = {nullptr};
#endif
constexpr int kCapabilities = sizeof(kCapabilityNames) / sizeof(kCapabilityNames[0]);

Capability capability();  // csrc/cpu/capability.cpp

// Why this machine cannot run what needs `least`; nullptr if it can.
static inline const char* why_below(Capability least) {
  return capability() < least ? kBelowCapability[int(least)] : nullptr;
}

extern const Kernel kReferenceKernel;
extern const Kernel kBaselineKernel, kBaselineDecodeKernel;
#if defined(__x86_64__)
extern const Kernel kAvx2Kernel, kAvx2DecodeKernel;
extern const Kernel kAvx512Kernel, kAvx512DecodeKernel;
extern const Kernel kAvx512Bf16Kernel;
#elif defined(__aarch64__)
extern const Kernel kNeonKernel, kNeonDecodeKernel;
extern const Kernel kNeonBf16Kernel;
#endif

}  // namespace scaledot
