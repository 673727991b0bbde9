// scaledot for LibTorch programs: #include <scaledot/scaledot.h>, find_package(scaledot), link scaledot::scaledot.
#pragma once

#include "nn/multi_head_attention.h"
#include "ops/sdpa/sdpa.h"
#include "ops/varlen/varlen.h"
