// operator new and delete of the fuzzer. AddressSanitizer's own notes the stack of each call and keeps freed memory
// back, which would take most of the time of a small problem. Here too, free memory and the ends of blocks are
// poisoned, so that an access to them is reported. Blocks of more than kLargest bytes come from malloc.
#include <sanitizer/asan_interface.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr size_t kPoolBytes = size_t(1) << 28, kPageBytes = size_t(1) << 21, kRedZone = 32;
constexpr size_t kLeast = 64, kLargest = kPageBytes / 2 - kRedZone;

struct Free {
  Free* next;
};

alignas(kPageBytes) unsigned char pool[kPoolBytes];
std::atomic<size_t> pages_used{0};
uint8_t class_of_page[kPoolBytes / kPageBytes];  // each page has blocks of one size, a power of two
thread_local Free* free_blocks[64];

bool in_pool(const void* block) { return block >= pool && block < pool + kPoolBytes; }

// Cuts a new page into blocks. Returns false if the pool is full.
bool add_page(int size_class) {
  const size_t page = pages_used++;
  if (page >= kPoolBytes / kPageBytes) return false;
  class_of_page[page] = uint8_t(size_class);
  unsigned char* const begin = pool + page * kPageBytes;
  for (size_t at = 0; at < kPageBytes; at += size_t(1) << size_class)
    free_blocks[size_class] = new (begin + at) Free{free_blocks[size_class]};
  __asan_poison_memory_region(begin, kPageBytes);
  return true;
}

void* from_malloc(size_t bytes) {
  void* const block = std::malloc(bytes);
  if (!block) std::abort();
  return block;
}

}  // namespace

void* operator new(size_t bytes) {
  if (bytes > kLargest) return from_malloc(bytes);
  const int size_class = std::bit_width((bytes < kLeast ? kLeast : bytes) + kRedZone - 1);
  if (!free_blocks[size_class] && !add_page(size_class)) return from_malloc(bytes);
  Free* const block = free_blocks[size_class];
  __asan_unpoison_memory_region(block, bytes < sizeof(Free) ? sizeof(Free) : bytes);
  free_blocks[size_class] = block->next;
  return block;
}

void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return operator new(bytes); }

void operator delete(void* block) noexcept {
  if (!in_pool(block)) return std::free(block);
  const int size_class = class_of_page[size_t(static_cast<unsigned char*>(block) - pool) / kPageBytes];
  free_blocks[size_class] = new (block) Free{free_blocks[size_class]};
  __asan_poison_memory_region(block, size_t(1) << size_class);
}

void operator delete(void* block, size_t) noexcept { operator delete(block); }
