// torch's allocator for tensors of the host, by blocks that are kept (blocks.h).
//
// Built for one minor of torch by anychip/torch_extension.py; anychip/host_memory.py calls it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>

#include "blocks.h"

#define ANYCHIP_EXPORT extern "C" __attribute__((visibility("default")))

ANYCHIP_EXPORT const char* anychip_extension_key() { return ANYCHIP_EXTENSION_KEY; }

namespace anychip::host {
namespace {

// Never destroyed: tensors outlive everything else in a process.
Blocks& blocks() {
  static Blocks* made = [] {
    pthread_atfork([] { blocks().lock(); }, [] { blocks().unlock(); }, [] { blocks().unlock(); });
    return new Blocks(0, true);
  }();
  return *made;
}

void release_small(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  c10::free_cpu(data);
}

void release_block(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  blocks().release(data);
}

void release_any(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  if (!blocks().release(data)) c10::free_cpu(data);
}

class KeptMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const bool is_small = nbytes < kLeastNbytes;
    void* data = is_small ? c10::alloc_cpu(nbytes) : blocks().allocate(nbytes);
    TORCH_CHECK(is_small || data != nullptr,
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", nbytes,
                " bytes. Error code 12 (Cannot allocate memory)");
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, is_small ? &release_small : &release_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

KeptMemory& kept_memory() {
  static auto* made = new KeptMemory;
  return *made;
}

}  // namespace
}  // namespace anychip::host

using anychip::host::blocks;
using anychip::host::kept_memory;

// Tensors made from now on are in kept blocks. False if somebody else has replaced torch's
// allocator, which then stays.
ANYCHIP_EXPORT bool anychip_host_keep(size_t limit, bool huge_pages) {
  c10::Allocator* now = c10::GetCPUAllocator();
  if (now != &kept_memory() && now != c10::GetDefaultCPUAllocator()) return false;
  blocks().set_limit(limit, huge_pages);
  c10::SetCPUAllocator(&kept_memory());
  return true;
}

// Tensors made from now on are torch's again; blocks in use are kept no longer when they are freed.
ANYCHIP_EXPORT void anychip_host_stop() {
  if (c10::GetCPUAllocator() == &kept_memory()) {
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  }
  blocks().set_limit(0, true);
}

ANYCHIP_EXPORT void anychip_host_trim(size_t keep) { blocks().trim(keep); }

ANYCHIP_EXPORT void anychip_host_reset_peak() { blocks().reset_peak(); }

ANYCHIP_EXPORT void anychip_host_statistics(anychip::host::Statistics* found) {
  *found = blocks().statistics();
}
