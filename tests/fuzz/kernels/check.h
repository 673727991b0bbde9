// Runs every CPU kernel on a problem that was made from bytes, and compares the results with the reference kernel's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace scaledot::testing {

// Failures go to GoogleTest.
void check(const uint8_t* data, size_t size);

// Prints the problem, once a check of it has failed.
void print(const uint8_t* data, size_t size);

}  // namespace scaledot::testing
