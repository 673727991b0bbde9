// The text of the wgmma instructions, one for every width: inline assembly must name each register. For wgmma.h.
#pragma once

// clang-format off
#define SCALEDOT_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SCALEDOT_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define SCALEDOT_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SCALEDOT_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define SCALEDOT_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SCALEDOT_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SCALEDOT_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define SCALEDOT_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define SCALEDOT_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define SCALEDOT_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define SCALEDOT_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define SCALEDOT_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define SCALEDOT_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define SCALEDOT_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define SCALEDOT_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define SCALEDOT_R15 "%120, %121, %122, %123, %124, %125, %126, %127"

#define SCALEDOT_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SCALEDOT_REGS_32 SCALEDOT_R0 ", " SCALEDOT_R1
#define SCALEDOT_SUMS_32 SCALEDOT_D8(0), SCALEDOT_D8(8)
#define SCALEDOT_REGS_64 SCALEDOT_REGS_32 ", " SCALEDOT_R2 ", " SCALEDOT_R3
#define SCALEDOT_SUMS_64 SCALEDOT_SUMS_32, SCALEDOT_D8(16), SCALEDOT_D8(24)
#define SCALEDOT_REGS_80 SCALEDOT_REGS_64 ", " SCALEDOT_R4
#define SCALEDOT_SUMS_80 SCALEDOT_SUMS_64, SCALEDOT_D8(32)
#define SCALEDOT_REGS_128 SCALEDOT_REGS_80 ", " SCALEDOT_R5 ", " SCALEDOT_R6 ", " SCALEDOT_R7
#define SCALEDOT_SUMS_128 SCALEDOT_SUMS_80, SCALEDOT_D8(40), SCALEDOT_D8(48), SCALEDOT_D8(56)
#define SCALEDOT_REGS_256 SCALEDOT_REGS_128 ", " SCALEDOT_R8 ", " SCALEDOT_R9 ", " SCALEDOT_R10 ", " SCALEDOT_R11 \
    ", " SCALEDOT_R12 ", " SCALEDOT_R13 ", " SCALEDOT_R14 ", " SCALEDOT_R15
#define SCALEDOT_SUMS_256 SCALEDOT_SUMS_128, SCALEDOT_D8(64), SCALEDOT_D8(72), SCALEDOT_D8(80), SCALEDOT_D8(88), \
    SCALEDOT_D8(96), SCALEDOT_D8(104), SCALEDOT_D8(112), SCALEDOT_D8(120)

// The other operands follow the registers of the accumulator: a descriptor or four registers for a, a descriptor for b,
// whether to accumulate, and which matrices in shared memory are MN-major.
#define SCALEDOT_WGMMA_SS(n, type, a0, b0, add, ta, tb)                                                               \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\n"                                                \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" SCALEDOT_REGS_##n "}, %" #a0      \
               ", %" #b0 ", add, 1, 1, %" #ta ", %" #tb ";\n}\n"                                                    \
               : SCALEDOT_SUMS_##n                                                                                   \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kA)), "n"(int(kB)))
#define SCALEDOT_WGMMA_RS(n, type, a0, a1, a2, a3, b0, add, tb)                                                       \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\n"                                                \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" SCALEDOT_REGS_##n "}, {%" #a0     \
               ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", add, 1, 1, %" #tb ";\n}\n"                              \
               : SCALEDOT_SUMS_##n                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kB)))

#define SCALEDOT_IF_WIDTH(n) if constexpr (kN == n)
#define SCALEDOT_WGMMA_SS_OF_WIDTH(type) \
    SCALEDOT_IF_WIDTH(32) SCALEDOT_WGMMA_SS(32, type, 16, 17, 18, 19, 20); \
    SCALEDOT_IF_WIDTH(64) SCALEDOT_WGMMA_SS(64, type, 32, 33, 34, 35, 36); \
    SCALEDOT_IF_WIDTH(80) SCALEDOT_WGMMA_SS(80, type, 40, 41, 42, 43, 44); \
    SCALEDOT_IF_WIDTH(128) SCALEDOT_WGMMA_SS(128, type, 64, 65, 66, 67, 68); \
    SCALEDOT_IF_WIDTH(256) SCALEDOT_WGMMA_SS(256, type, 128, 129, 130, 131, 132);

#define SCALEDOT_WGMMA_RS_OF_WIDTH(type) \
    SCALEDOT_IF_WIDTH(32) SCALEDOT_WGMMA_RS(32, type, 16, 17, 18, 19, 20, 21, 22); \
    SCALEDOT_IF_WIDTH(64) SCALEDOT_WGMMA_RS(64, type, 32, 33, 34, 35, 36, 37, 38); \
    SCALEDOT_IF_WIDTH(80) SCALEDOT_WGMMA_RS(80, type, 40, 41, 42, 43, 44, 45, 46); \
    SCALEDOT_IF_WIDTH(128) SCALEDOT_WGMMA_RS(128, type, 64, 65, 66, 67, 68, 69, 70); \
    SCALEDOT_IF_WIDTH(256) SCALEDOT_WGMMA_RS(256, type, 128, 129, 130, 131, 132, 133, 134);

// clang-format on
