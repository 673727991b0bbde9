// scaledot for LibTorch programs: #include <scaledot/scaledot.h>, find_package(scaledot), link scaledot::scaledot.
#pragma once

#include "ops/sdpa.h"
