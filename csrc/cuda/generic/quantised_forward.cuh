// The forward over quantised keys and values, for one type of queries. Its plan is that of the other packed sequences.
#pragma once

#include "cuda/generic/forward_launch.cuh"
#include "cuda/generic/generic.h"

namespace scaledot {
namespace {

// Runs the configuration of the panel that Generic takes (panel_fits).
template <class Storage, int kNarrow, int kWide>
const char* quantised_forward(const Problem& p, const DeviceExecutor& executor) {
  if (panel_fits(p, kNarrow)) return run_forward_of<QuantisedConfig<Storage, kNarrow, true>>(p, executor);
  return run_forward_of<QuantisedConfig<Storage, kWide, false>>(p, executor);
}

}  // namespace
}  // namespace scaledot
