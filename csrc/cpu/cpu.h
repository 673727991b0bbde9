// The CPU kernels of each instruction set, and which instruction sets this machine supports.
#pragma once

#include "core/kernel.h"

namespace scaledot {

enum class Capability : int { baseline, avx2, avx512, avx512_bf16 };

Capability capability();  // csrc/cpu/capability.cpp

extern const Kernel kReferenceKernel;
extern const Kernel kBaselineKernel, kBaselineDecodeKernel;
#if defined(SCALEDOT_X86)
extern const Kernel kAvx2Kernel, kAvx2DecodeKernel;
extern const Kernel kAvx512Kernel, kAvx512DecodeKernel;
extern const Kernel kAvx512Bf16Kernel;
#endif

}  // namespace scaledot
