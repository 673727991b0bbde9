// Runs a GPU kernel on packed sequences in the simulation.
#pragma once

#include "device_check.h"
#include "packed_case.h"

namespace scaledot::testing {

inline void run_packed(const DeviceKernel& kernel, const PackedBuilt& b, Pass pass) {
  RedZones zones;
  for_each_tensor(b, false, [&](const TestTensor& t, bool) { zones.add(t); });
  run_device(kernel, b.problem, pass, [&] { for_each_tensor(b, pass == Pass::backward, register_tensor); });
}

inline void solve_sequences(PackedBuilt& b) {
  for (const Built& one : b.sequences) b.oracles.push_back(solve_for_device(one.c));
}

}  // namespace scaledot::testing
