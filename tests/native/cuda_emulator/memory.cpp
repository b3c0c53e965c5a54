#include "memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "fiber.h"

#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
extern "C" {
void __asan_poison_memory_region(const volatile void* address, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
}
#endif

namespace cuda_emulator {
namespace {

char* map(void* at, size_t bytes) {
  const int fixed = at != nullptr ? MAP_FIXED : 0;
  void* pages = mmap(at, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
  if (pages != MAP_FAILED) return static_cast<char*>(pages);
  std::perror("CUDA emulator: mmap");
  std::abort();
}

// Not memset, and no loop that becomes one: the sanitizers would take it for an access of the
// thread that runs. Writes whole words, and with the last one into the red zone.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void fill(char* from, size_t bytes) {
  auto* words = reinterpret_cast<uint64_t*>(from);
  for (size_t i = 0; i < (bytes + 7) / 8; ++i) words[i] = ~uint64_t{0};
}

void poison([[maybe_unused]] char* from, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  __asan_poison_memory_region(from, bytes);
#endif
}
void unpoison([[maybe_unused]] char* from, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_EMULATOR_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(from, bytes);
#endif
}

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Pages::Pages(size_t bytes) : data_(map(nullptr, bytes)), bytes_(bytes) {}

Pages::~Pages() { munmap(data_, bytes_); }

void Pages::renew(size_t bytes) {
  if (bytes == 0) return;
  munmap(data_, bytes);
  map(data_, bytes);
}

void Pages::forbid(size_t offset, size_t bytes) {
  if (mprotect(data_ + offset, bytes, PROT_NONE) == 0) return;
  std::perror("CUDA emulator: mprotect");
  std::abort();
}

SharedMemory::SharedMemory() : pages_(kArea) {}

void SharedMemory::begin_block(size_t dynamic_bytes, size_t opted_in) {
  if (kThreadSanitizer) pages_.renew(kArea);
  unpoison(pages_.data(), kArea);
  fill(pages_.data(), dynamic_bytes);
  poison(pages_.data() + dynamic_bytes, kArea - dynamic_bytes);
  num_variables_ = 0;
  dynamic_bytes_ = dynamic_bytes;
  opted_in_ = opted_in;
  static_bytes_ = 0;
  used_ = dynamic_bytes + kRedZone;
}

void* SharedMemory::variable(const void* key, size_t bytes, size_t alignment) {
  for (int i = 0; i < num_variables_; ++i) {
    if (variables_[i].key == key) return variables_[i].address;
  }
  // 16: a kernel must not rely on more than the type's alignment, but the device gives no less.
  const size_t offset = round_up(used_, alignment < 16 ? 16 : alignment);
  static_bytes_ = round_up(static_bytes_, alignment) + bytes;
  const size_t most = opted_in_ > 0 ? kMostShared - opted_in_ : kStaticShared - dynamic_bytes_;
  if (num_variables_ == kMaxVariables || alignment > kRedZone || static_bytes_ > kStaticShared ||
      static_bytes_ > most) {
    return nullptr;
  }
  used_ = offset + bytes + kRedZone;
  unpoison(pages_.data() + offset, bytes);
  fill(pages_.data() + offset, bytes);
  variables_[num_variables_++] = {key, pages_.data() + offset};
  return pages_.data() + offset;
}

}  // namespace cuda_emulator
