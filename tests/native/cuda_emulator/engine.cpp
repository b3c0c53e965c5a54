// What device code calls, handed to the multiprocessor that runs it.
#include "engine.h"

#include "multiprocessor.h"

namespace cuda_emulator {

__thread Position position
    __attribute__((tls_model("initial-exec"))) = {nullptr, {0, 0, 0}, dim3(), dim3()};

int block_barrier(Barrier kind, bool predicate, Site site) {
  return Multiprocessor::running->barrier(kind, predicate, site);
}

uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int argument,
                        int width, Site site) {
  return Multiprocessor::running->operate(operation, mask, value, argument, width, site);
}

unsigned active_mask(Site site) { return Multiprocessor::running->active_mask(site); }

void sleep(Site site) { Multiprocessor::running->sleep(site); }

void* shared_variable(const void* key, size_t bytes, size_t alignment, const char* name,
                      const char* file, int line) {
  Multiprocessor& here = *Multiprocessor::running;
  void* address = here.shared().variable(key, bytes, alignment);
  if (address == nullptr) {
    here.fail(
        "%s:%d: shared variable %s of %zu bytes: expected at most %zu bytes of static shared "
        "memory, and %zu together with the dynamic; got %zu static and %zu dynamic bytes",
        file, line, name, bytes, kStaticShared, kMostShared, here.shared().static_bytes(),
        here.shared().dynamic_bytes());
  }
  return address;
}

void* dynamic_shared_memory() { return Multiprocessor::running->shared().dynamic(); }

void check_global(const void* address, const char* name, Site site) {
  Multiprocessor& here = *Multiprocessor::running;
  if (!here.shared().contains(address)) return;
  here.fail("%s:%d: %s takes an address in global memory, got one in shared memory", site.file,
            site.line, name);
}

void fence() { Multiprocessor::running->fence(); }
void before_atomic(const void* address) { Multiprocessor::running->before_atomic(address); }
void after_atomic(const void* address) { Multiprocessor::running->after_atomic(address); }

}  // namespace cuda_emulator
