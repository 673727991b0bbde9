// The capability that the CPU and the operating system support, lowered by SCALEDOT_CPU_CAPABILITY.
#include <cstdlib>
#include <cstring>

#include "cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(SCALEDOT_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace scaledot {
namespace {

#if defined(__x86_64__)
#if defined(SCALEDOT_HAS_AMX)
// Whether the CPU has the tile unit and its products of bfloat16, and the system saves tiles. `features`: EDX of leaf 7
// of CPUID.
bool has_tiles(unsigned features, unsigned xcr0) {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kTileState = 3u << 17;
  return (features & kAmxBf16) && (features & kAmxTile) && (xcr0 & kTileState) == kTileState;
}

// A process has to ask Linux once, for all its threads, before it uses tiles (Documentation/arch/x86/xstate.rst). Linux
// refuses if a thread has a signal stack that is too small for tiles. Sandboxes may refuse the call, or ignore it.
bool may_use_tiles() {
  constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t permitted = 0;
  return syscall(SYS_arch_prctl, kGetPermission, &permitted) == 0 && (permitted >> kTileData & 1);
}
#else
bool has_tiles(unsigned, unsigned) { return false; }
bool may_use_tiles() { return false; }
#endif

// Intel SDM volume 1, section 14: CPUID has to report a feature, and XCR0 that the system saves its registers.
Capability hardware() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Capability::default_isa;
  const bool fma = c & bit_FMA, f16c = c & bit_F16C, osxsave = c & bit_OSXSAVE;
  if (!fma || !f16c || !osxsave) return Capability::default_isa;
  unsigned xcr0, xcr0_high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
  if ((xcr0 & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Capability::default_isa;
  if (!(b & bit_AVX2)) return Capability::default_isa;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
  if ((xcr0 & kZmm) != kZmm || (b & kAvx512) != kAvx512) return Capability::avx2;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  const bool tiles = has_tiles(d, xcr0);
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & kAvx512Bf16)) return Capability::avx512;
  return tiles ? Capability::amx_bf16 : Capability::avx512_bf16;
}
#elif defined(__aarch64__)
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;  // HWCAP2_BF16 of the Linux kernel's asm/hwcap.h
  return getauxval(AT_HWCAP2) & kHwcap2Bf16;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
#else
  return false;
#endif
}
Capability hardware() { return has_bf16() ? Capability::neon_bf16 : Capability::neon; }
#else
Capability hardware() { return Capability::default_isa; }
#endif

Capability wanted_of(Capability best) {
  const char* wanted = std::getenv("SCALEDOT_CPU_CAPABILITY");
  if (!wanted) return best;
  for (int level = 0; level <= int(best); ++level)
    if (std::strcmp(wanted, kCapabilityLevels[level].name) == 0) return Capability(level);
  return best;  // this machine does not have that level: ops/common/environment.cpp warns
}

Capability detect() {
  const Capability level = wanted_of(hardware());
#if defined(__x86_64__)
  if (level == Capability::amx_bf16 && !may_use_tiles()) return Capability::avx512_bf16;
#endif
  return level;
}

}  // namespace

Capability capability() {
  static const Capability detected = detect();
  return detected;
}

const char* cpu_capability_name(int level) { return level < kCapabilities ? kCapabilityLevels[level].name : nullptr; }

const char* cpu_capability() { return kCapabilityLevels[int(capability())].name; }

}  // namespace scaledot
