// The tensor cores of sm_90: wgmma, with the descriptors of its operands in shared memory. Also stmatrix.
#include <algorithm>
#include <cstring>

#include "device_sim/async.h"

namespace scaledot::sim {
namespace {

constexpr uint32_t kPoison = 0xffffabcdu;  // a NaN, for sums that are not ready
constexpr uint32_t kSharedBase = 1024;     // shared memory does not begin at address 0
constexpr int kRows = 64, kDepth = 16;     // of one wgmma: m and k
constexpr uint64_t kSwizzle128 = 1;        // bits 62 and 63 of a descriptor

[[noreturn]] void fail(const char* call, const char* what) { sim::fail(std::string(call) + ": " + what); }

TensorCores& cores() { return block->units->tensor_cores[size_t(my_warpgroup())]; }
unsigned my_bit() { return 1u << my_warp() % kWarpgroupWarps; }
constexpr unsigned kAllWarps = (1u << kWarpgroupWarps) - 1;
// The agent that reads for the products of the warpgroup.
int my_tensor_cores() { return tensor_cores_of(my_warpgroup() * kWarpgroupWarps); }

void warpgroup_collective(const char* call, void* operands, void (*combine)(void* const* all)) {
  if (block->threads % kWarpgroupThreads != 0) fail(call, "the block is not made of warpgroups");
  const int group = my_warpgroup();
  meet_all(block->warpgroup[size_t(group)], call, group * kWarpgroupThreads, kWarpgroupThreads, "warpgroup", operands,
           combine);
}

// PTX ISA, "Matrix Descriptor Format".
struct Descriptor {
  uint32_t start, leading, stride;  // bytes

  Descriptor(const char* call, uint64_t bits)
      : start(uint32_t(bits & 0x3fff) << 4),
        leading(uint32_t(bits >> 16 & 0x3fff) << 4),
        stride(uint32_t(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != kSwizzle128) fail(call, "only operands with 128 byte swizzle are simulated");
    if (bits >> 49 & 7) fail(call, "a base offset is not simulated");
    if (start >> 7 & 7) fail(call, "the operand does not begin where the swizzle's pattern does");
  }

  // The address of eight neighbouring elements: along k if the matrix is K-major, along m or n if it is MN-major.
  // PTX ISA, "Strides":
  //   K-major   8 rows of 128 bytes; `stride` to the next 8 rows
  //   MN-major  8 rows (of k) of 128 bytes, or 64 elements along m or n; `stride` to the next 8 k, `leading` to the
  //             next 64 elements
  uint32_t chunk(bool transposed, int mn, int k) const {
    const uint32_t m = uint32_t(mn), d = uint32_t(k);
    const uint32_t plain = transposed ? start + m / 64 * leading + m % 64 * 2 + d / 8 * stride + d % 8 * 128
                                      : start + m / 8 * stride + m % 8 * 128 + d * 2;
    return plain ^ ((plain >> 7 & 7) << 4);
  }
};

// Reads matrix[mn][k] from shared memory, as the tensor cores do.
void gather(const char* call, uint64_t bits, bool transposed, int count, float (*widen)(uint16_t), const Actor& actor,
            float (*matrix)[kDepth]) {
  const Descriptor descriptor(call, bits);
  for (int mn = 0; mn < count; mn += transposed ? 8 : 1)
    for (int k = 0; k < kDepth; k += transposed ? 1 : 8) {
      const char* from = memory_of(my_rank()) + descriptor.chunk(transposed, mn, k) - kSharedBase;
      read_async(call, from, 16, actor);
      uint16_t number[8];
      std::memcpy(number, from, 16);
      for (int e = 0; e < 8; ++e) (transposed ? matrix[mn + e][k] : matrix[mn][k + e]) = widen(number[e]);
    }
}

// The rows and columns of a thread's registers (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): as for
// mma.m16n8k16, with 16 rows a warp.
int row_of(int thread, int half) { return thread / kLanes * 16 + thread % kLanes / 4 + 8 * half; }
int col_of(int thread, int group, int j) { return 8 * group + 2 * (thread % 4) + j; }

// Calls body(sum, number of the sum) for the registers of threads begin to end.
template <class Body>
void for_each_sum(const Accumulator& a, int begin, int end, const Body& body) {
  for (int t = begin; t < end; ++t)
    for (int e = 0; e < a.n / 2; ++e) body(a.lane[t][e], row_of(t, e / 2 % 2) * a.n + col_of(t, e / 4, e % 2));
}

// The pending sums in these registers. If there are none, new ones start with the registers' values.
Accumulator& accumulator_of(const char* call, void* const* all) {
  const Wgmma& first = *static_cast<const Wgmma*>(all[0]);
  for (Accumulator& a : cores().accumulators) {
    if (a.lane[0] != first.d) continue;
    if (a.n != first.n) fail(call, "other sums are pending in these registers");
    if (a.waited) fail(call, "only some warps have waited for these sums");
    return a;
  }
  Accumulator made = {};
  made.n = first.n;
  made.sums.resize(size_t(kRows * made.n));
  for (int t = 0; t < kWarpgroupThreads; ++t) made.lane[t] = static_cast<const Wgmma*>(all[t])->d;
  for_each_sum(made, 0, kWarpgroupThreads, [&](float& x, int at) { made.sums[size_t(at)] = x; });
  for_each_sum(made, 0, kWarpgroupThreads, [&](float& x, int) { std::memcpy(&x, &kPoison, 4); });
  cores().accumulators.push_back(std::move(made));
  return cores().accumulators.back();
}

void multiply(const char* call, void* const* all) {
  const Wgmma& first = *static_cast<const Wgmma*>(all[0]);
  TensorCores& c = cores();
  if (!c.fenced) fail(call, "no wgmma_fence since the last wgmma_commit or wgmma_wait");

  // The tensor cores know only what all four warps know.
  const int thread = my_warpgroup() * kWarpgroupThreads;
  Actor actor = actor_of(thread);
  Clock known = *actor.knows;
  known[size_t(thread)] = actor.now;
  for (int t = thread + kLanes; t < thread + kWarpgroupThreads; t += kLanes) {
    Clock other = block->thread[size_t(t)].knows;
    other[size_t(t)] = block->thread[size_t(t)].now;
    meet(known, other);
  }
  // Its time is later than its earlier reads, and than the copies that the threads have waited for.
  actor = {my_tensor_cores(), -1, ++block->time, &known, 0, 0};

  static float x[kRows][kDepth], y[256][kDepth];
  if (first.a) {
    RegisterOperand operand = {};
    operand.group = c.group;
    for (int t = 0; t < kWarpgroupThreads; ++t) {
      const Wgmma& o = *static_cast<const Wgmma*>(all[t]);
      operand.lane[t] = o.a;
      std::memcpy(operand.value[t], o.a, 16);
      for (int r = 0; r < 4; ++r)
        for (int j = 0; j < 2; ++j)
          x[row_of(t, r % 2)][r / 2 * 8 + t % 4 * 2 + j] = o.widen(uint16_t(o.a[r] >> (16 * j)));
    }
    c.operands.push_back(operand);
  } else {
    gather(call, first.descriptor_a, first.transposed_a, kRows, first.widen, actor, x);
  }
  gather(call, first.descriptor_b, first.transposed_b, first.n, first.widen, actor, y);
  for (auto& reads : c.reads) {
    if (reads.empty() || reads.back().first != c.group) reads.push_back({c.group, 0});
    reads.back().second = actor.now;
  }

  Accumulator& sums = accumulator_of(call, all);
  sums.group = c.group;
  static float columns[kDepth][256], row[256];
  const int n = first.n;
  for (int j = 0; j < n; ++j)
    for (int k = 0; k < kDepth; ++k) columns[k][j] = y[j][k];
  for (int i = 0; i < kRows; ++i) {
    std::fill(row, row + n, 0.0f);
    for (int k = 0; k < kDepth; ++k) {
      const float factor = x[i][k];
      for (int j = 0; j < n; ++j) row[j] += factor * columns[k][j];
    }
    float* sum = sums.sums.data() + i * n;
    for (int j = 0; j < n; ++j) sum[j] = first.accumulate ? sum[j] + row[j] : row[j];
  }
}

// The calling warp has waited for the groups before `up_to`. Its registers get their sums, and it knows that its own
// part of these products has read shared memory.
void finish(const char* call, uint64_t up_to) {
  TensorCores& c = cores();
  const int warp = my_warp(), begin = warp % kWarpgroupWarps * kLanes, end = begin + kLanes;
  for (RegisterOperand& o : c.operands) {
    if (o.group >= up_to || o.waited & my_bit()) continue;
    for (int t = begin; t < end; ++t)
      if (std::memcmp(o.lane[t], o.value[t], 16) != 0)
        fail(call, "an operand in registers was changed before the wgmma that reads it was waited for");
    o.waited |= my_bit();
  }
  std::erase_if(c.operands, [](const RegisterOperand& o) { return o.waited == kAllWarps; });
  for (Accumulator& a : c.accumulators) {
    if (a.group >= up_to || a.waited & my_bit()) continue;
    for_each_sum(a, begin, end, [&](float& x, int at) {
      if (std::memcmp(&x, &kPoison, 4) != 0) fail(call, "sums were written before their wgmma was waited for");
      x = a.sums[size_t(at)];
    });
    a.waited |= my_bit();
  }
  std::erase_if(c.accumulators, [](const Accumulator& a) { return a.waited == kAllWarps; });
  auto& reads = c.reads[warp % kWarpgroupWarps];
  Time done = 0;
  while (!reads.empty() && reads.front().first < up_to) {
    done = reads.front().second;
    reads.pop_front();
  }
  for (int t = warp * kLanes; t < (warp + 1) * kLanes && done > 0; ++t)
    block->thread[size_t(t)].knows[size_t(tensor_cores_of(warp))] = done;
}

}  // namespace

void check_tensor_cores_end(const TensorCores& c) {
  const auto waits = [](const auto& pending) { return !(pending.waited & my_bit()); };
  if (std::any_of(c.accumulators.begin(), c.accumulators.end(), waits) ||
      std::any_of(c.operands.begin(), c.operands.end(), waits))
    sim::fail("wgmma: the thread ended without wgmma_wait");
}

uint32_t shared_address(const void* address) {
  return uint32_t(static_cast<const char*>(address) - memory_of(my_rank())) + kSharedBase;
}

void wgmma(const char* call, const Wgmma& operands) {
  if (operands.n % 8 != 0 || operands.n < 8 || operands.n > 256) fail(call, "not a number of columns");
  struct Named {
    Wgmma operands;
    const char* call;
  } mine = {operands, call};
  warpgroup_collective(call, &mine, [](void* const* all) { multiply(static_cast<Named*>(all[0])->call, all); });
}

void wgmma_fence(const char* call) {
  warpgroup_collective(call, nullptr, [](void* const*) { cores().fenced = true; });
}

void wgmma_commit(const char* call) {
  warpgroup_collective(call, nullptr, [](void* const*) {
    ++cores().group;
    cores().fenced = false;
  });
}

void wgmma_wait(const char* call, int pending) {
  struct Operands {
    const char* call;
    int pending;
  } mine = {call, pending};
  warp_collective(call, &mine, [](void* const* all) {
    const Operands& o = *static_cast<Operands*>(all[0]);
    const uint64_t group = cores().group;
    cores().fenced = false;
    finish(o.call, group > uint64_t(o.pending) ? group - uint64_t(o.pending) : 0);
  });
}

// The inverse of ldmatrix_x4.
void stmatrix_x4(const char* call, void* row, const uint32_t (&r)[4], bool transposed) {
  write_shared(call, row, 16, 16);
  struct Operands {
    const uint32_t* r;
    char* row;
    bool transposed;
  } mine = {r, static_cast<char*>(row), transposed};
  warp_collective(call, &mine, [](void* const* all) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Operands& o = *static_cast<Operands*>(all[lane]);
      for (int m = 0; m < 4; ++m)
        for (int k = 0; k < 2; ++k) {
          const uint16_t bits = uint16_t(o.r[m] >> (16 * k));
          const int i = o.transposed ? lane % 4 * 2 + k : lane / 4, j = o.transposed ? lane / 4 : lane % 4 * 2 + k;
          std::memcpy(static_cast<Operands*>(all[m * 8 + i])->row + 2 * j, &bits, 2);
        }
    }
  });
}

}  // namespace scaledot::sim
