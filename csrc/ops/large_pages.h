// Memory whose pages are new at every call.
#pragma once

#include <cstdint>

namespace scaledot {

// For memory that is about to be written from end to end. malloc has large blocks from the operating system and gives them back when they
// are freed, so that each of their pages is mapped and cleared at its first use, which may cost nearly as much as what is computed: Linux is
// asked for large pages instead of small ones, as NumPy does. No more than a wish.
void prefer_large_pages(void* data, int64_t bytes);

}  // namespace scaledot
