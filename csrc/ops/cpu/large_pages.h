// Memory whose pages are new at every call.
#pragma once

#include <cstdint>

namespace scaledot {

// Requests transparent huge pages (madvise) for a large block that is about to be written from end to end; only a hint.
// malloc takes large blocks from the operating system at every call and gives them back, so each page is mapped and
// cleared at its first use. With 4 KiB pages that may cost nearly as much as the computation. NumPy does the same.
void prefer_large_pages(void* data, int64_t bytes);

}  // namespace scaledot
