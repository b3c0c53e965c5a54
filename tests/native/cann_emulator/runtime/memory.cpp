// Device memory: a file in memory per device, mapped twice.
//
// torch_npu gets addresses of the first mapping, the emulator works through the second
// (reachable()). In strict mode the first can neither be read nor written, so that code on the host
// which touches device memory ends with a message that says so. Without it both are the same
// mapping.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "runtime/state.h"

namespace cann {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }
bool is_strict() {
  static const bool strict = setting("STRICT", 1) != 0;
  return strict;
}
size_t capacity() {
  static const size_t bytes = static_cast<size_t>(setting("MEMORY_MB", 65536)) << 20;
  return bytes;
}

// The memory of one device. Free ranges are kept by their start; neighbours are joined.
struct DeviceMemory {
  int file = -1;
  char* given = nullptr;    // what torch_npu knows
  char* reached = nullptr;  // what the emulator uses
  size_t used = 0;
  std::map<size_t, size_t> free_ranges;  // offset: size
  std::map<size_t, size_t> taken;
};

struct HostBlock {
  size_t size;
};

// A range of a device's file that was mapped at a reserved address (expandable segments).
struct Mapping {
  size_t size;
  char* reached;
};

struct Physical {
  int device;
  size_t offset;
  size_t size;
};

std::mutex mutex;
std::map<int, DeviceMemory> devices;
std::map<uintptr_t, HostBlock> host_blocks;
std::map<uintptr_t, Mapping> mappings;

DeviceMemory& memory_of(int device) {
  DeviceMemory& memory = devices[device];
  if (memory.file >= 0) return memory;
  memory.file = memfd_create("cann_emulator", MFD_CLOEXEC);
  if (memory.file < 0 || ftruncate(memory.file, static_cast<off_t>(capacity())) != 0) {
    throw std::runtime_error("no memory file for a device");
  }
  const auto map = [&](int protection) {
    void* address =
        mmap(nullptr, capacity(), protection, MAP_SHARED | MAP_NORESERVE, memory.file, 0);
    if (address == MAP_FAILED) throw std::runtime_error("the memory of a device cannot be mapped");
    return static_cast<char*>(address);
  };
  memory.reached = map(PROT_READ | PROT_WRITE);
  memory.given = is_strict() ? map(PROT_NONE) : memory.reached;
  memory.free_ranges[0] = capacity();
  return memory;
}

// First fit; returns the offset.
size_t take(DeviceMemory& memory, size_t size) {
  for (auto range = memory.free_ranges.begin(); range != memory.free_ranges.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < size) continue;
    memory.free_ranges.erase(range);
    if (length > size) memory.free_ranges[offset + size] = length - size;
    memory.taken[offset] = size;
    memory.used += size;
    return offset;
  }
  throw std::bad_alloc();
}

void give_back(DeviceMemory& memory, size_t offset) {
  const size_t size = memory.taken.at(offset);
  memory.taken.erase(offset);
  memory.used -= size;
  // The pages themselves go back to the host.
  fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(size));
  auto [range, inserted] = memory.free_ranges.emplace(offset, size);
  const auto next = std::next(range);
  if (next != memory.free_ranges.end() && offset + size == next->first) {
    range->second += next->second;
    memory.free_ranges.erase(next);
  }
  if (range != memory.free_ranges.begin()) {
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      memory.free_ranges.erase(range);
    }
  }
}

std::string numbers(size_t size, const DeviceMemory& memory, int device) {
  return "device " + std::to_string(device) + ": " + std::to_string(size) + " bytes are wanted, " +
         std::to_string(capacity() - memory.used) + " of " + std::to_string(capacity()) +
         " are free";
}

int allocate(void** address, size_t size) {
  return guarded("aclrtMalloc", [&]() -> int {
    *address = nullptr;
    if (const Status fault = fault_at_allocation()) return fault;
    const std::lock_guard<std::mutex> lock(mutex);
    const int device = current_device().value_or(0);
    DeviceMemory& memory = memory_of(device);
    size = rounded_up(size == 0 ? 1 : size, kAlignment);
    try {
      *address = memory.given + take(memory, size);
    } catch (const std::bad_alloc&) {
      set_error(numbers(size, memory, device));
      return kOutOfMemory;
    }
    return kSuccess;
  });
}

int allocate_host(void** address, size_t size) {
  if (posix_memalign(address, 4096, size == 0 ? 1 : size) != 0) return kOutOfMemory;
  const std::lock_guard<std::mutex> lock(mutex);
  host_blocks[reinterpret_cast<uintptr_t>(*address)] = {size};
  return kSuccess;
}

// The device that an address belongs to, or -1. The lock is held.
int device_of(uintptr_t address) {
  for (const auto& [device, memory] : devices) {
    const auto start = reinterpret_cast<uintptr_t>(memory.given);
    if (address >= start && address < start + capacity()) return device;
  }
  return -1;
}

const Mapping* mapping_of(uintptr_t address, uintptr_t* start) {
  auto after = mappings.upper_bound(address);
  if (after == mappings.begin()) return nullptr;
  --after;
  if (address >= after->first + after->second.size) return nullptr;
  *start = after->first;
  return &after->second;
}

struct sigaction watched_before;

// What a person reads when code on the host touches device memory. Only functions that a signal
// handler may call.
void say_what_was_touched(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  uintptr_t start = 0;
  if (device_of(address) >= 0 || mapping_of(address, &start) != nullptr) {
    constexpr char text[] =
        "cann emulator, strict mode: code on the host touched device memory. On a device this is a "
        "crash or garbage: copy to the host first. (ANYCHIP_CANN_STRICT=0 allows it.)\n";
    const ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    static_cast<void>(written);
  }
  // The access happens again, for whoever watched before: Python's faulthandler, or the end.
  sigaction(SIGSEGV, &watched_before, nullptr);
}

}  // namespace

void watch_strict_memory() {
  if (!is_strict()) return;
  struct sigaction action{};
  action.sa_sigaction = say_what_was_touched;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &watched_before);
}

void* reachable(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(mutex);
  const int device = device_of(address);
  if (device >= 0) {
    const DeviceMemory& memory = devices[device];
    return memory.reached + (address - reinterpret_cast<uintptr_t>(memory.given));
  }
  uintptr_t start = 0;
  if (const Mapping* mapping = mapping_of(address, &start)) {
    return mapping->reached + (address - start);
  }
  return const_cast<void*>(pointer);
}

bool is_on_device(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(mutex);
  uintptr_t start = 0;
  return device_of(address) >= 0 || mapping_of(address, &start) != nullptr;
}

}  // namespace cann

using namespace cann;

CANN_API int aclrtMalloc(void** address, size_t size, int) { return allocate(address, size); }
CANN_API int aclrtMallocAlign32(void** address, size_t size, int) {
  return allocate(address, size);
}
CANN_API int aclrtFree(void* address) {
  return guarded("aclrtFree", [&]() -> int {
    const std::lock_guard<std::mutex> lock(mutex);
    const int device = device_of(reinterpret_cast<uintptr_t>(address));
    if (device < 0) {
      set_error("aclrtFree: the address is not of device memory");
      return kInvalidParameter;
    }
    DeviceMemory& memory = devices[device];
    const size_t offset = static_cast<size_t>(static_cast<char*>(address) - memory.given);
    if (memory.taken.count(offset) == 0) {
      set_error("aclrtFree: the address was not allocated, or is free already");
      return kInvalidParameter;
    }
    give_back(memory, offset);
    return kSuccess;
  });
}
CANN_API int aclrtMallocHost(void** address, size_t size) { return allocate_host(address, size); }
CANN_API int aclrtMallocHostWithCfg(void** address, uint64_t size, void*) {
  return allocate_host(address, size);
}
CANN_API int aclrtFreeHost(void* address) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (host_blocks.erase(reinterpret_cast<uintptr_t>(address)) == 0) return kInvalidParameter;
  }
  free(address);
  return kSuccess;
}
CANN_API int aclrtHostRegister(void* address, uint64_t, int, void** device_address) {
  if (device_address != nullptr) *device_address = address;
  return kSuccess;
}
CANN_API int aclrtHostUnregister(void*) { return kSuccess; }

CANN_API int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total_bytes) {
  return guarded("aclrtGetMemInfo", [&]() -> int {
    const std::lock_guard<std::mutex> lock(mutex);
    *total_bytes = capacity();
    *free_bytes = capacity() - memory_of(current_device().value_or(0)).used;
    return kSuccess;
  });
}

// Copies that the host waits for do not wait for any stream: what they read must be there.
CANN_API int aclrtMemcpy(void* to, size_t room, const void* from, size_t size, int) {
  if (size > room) {
    set_error("aclrtMemcpy: " + std::to_string(size) + " bytes into " + std::to_string(room));
    return kInvalidParameter;
  }
  if (size != 0) memmove(reachable(to), reachable(from), size);
  return kSuccess;
}
CANN_API int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int,
                              Stream stream) {
  if (size > room) {
    set_error("aclrtMemcpyAsync: " + std::to_string(size) + " bytes into " + std::to_string(room));
    return kInvalidParameter;
  }
  return launch(stream, "aclrtMemcpyAsync", [=] {
    if (size != 0) memmove(reachable(to), reachable(from), size);
  });
}
CANN_API int aclrtMemset(void* to, size_t, int32_t value, size_t size) {
  memset(reachable(to), value, size);
  return kSuccess;
}
CANN_API int aclrtMemsetAsync(void* to, size_t, int32_t value, size_t size, Stream stream) {
  return launch(stream, "aclrtMemsetAsync", [=] { memset(reachable(to), value, size); });
}

namespace {
struct PointerAttributes {
  uint32_t device;
  int type;  // 0 host, 1 device, 2 not registered
  uint32_t page_size;
  uint32_t reserved[4];
};
}  // namespace

CANN_API int aclrtPointerGetAttributes(const void* pointer, PointerAttributes* attributes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  *attributes = PointerAttributes{};
  attributes->type = 2;
  const std::lock_guard<std::mutex> lock(mutex);
  uintptr_t start = 0;
  const int device = device_of(address);
  if (device >= 0 || mapping_of(address, &start) != nullptr) {
    attributes->type = 1;
    attributes->device = static_cast<uint32_t>(std::max(device, 0));
    return kSuccess;
  }
  auto after = host_blocks.upper_bound(address);
  if (after != host_blocks.begin() &&
      address < std::prev(after)->first + std::prev(after)->second.size) {
    attributes->type = 0;
  }
  return kSuccess;
}

// Expandable segments: addresses are reserved first, and ranges of physical memory mapped to them.
CANN_API int aclrtReserveMemAddress(void** address, size_t size, size_t, void*, uint64_t) {
  void* start = mmap(nullptr, size + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<void*>(rounded_up(reinterpret_cast<uintptr_t>(start), kHugePage));
  return kSuccess;
}
CANN_API int aclrtReleaseMemAddress(void*) { return kSuccess; }
CANN_API int aclrtMallocPhysical(void** handle, size_t size, const void*, uint64_t) {
  return guarded("aclrtMallocPhysical", [&]() -> int {
    if (const Status fault = fault_at_allocation()) return fault;
    const std::lock_guard<std::mutex> lock(mutex);
    const int device = current_device().value_or(0);
    DeviceMemory& memory = memory_of(device);
    try {
      *handle = new Physical{device, take(memory, rounded_up(size, 4096)), size};
    } catch (const std::bad_alloc&) {
      set_error(numbers(size, memory, device));
      return kOutOfMemory;
    }
    return kSuccess;
  });
}
CANN_API int aclrtFreePhysical(void* handle) {
  return guarded("aclrtFreePhysical", [&]() -> int {
    const std::lock_guard<std::mutex> lock(mutex);
    auto* physical = static_cast<Physical*>(handle);
    give_back(devices[physical->device], physical->offset);
    delete physical;
    return kSuccess;
  });
}
CANN_API int aclrtMapMem(void* address, size_t size, size_t offset, void* handle, uint64_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* physical = static_cast<Physical*>(handle);
  DeviceMemory& memory = devices[physical->device];
  const int protection = is_strict() ? PROT_NONE : PROT_READ | PROT_WRITE;
  const size_t from = physical->offset + offset;
  void* mapped = mmap(address, size, protection, MAP_SHARED | MAP_FIXED, memory.file,
                      static_cast<off_t>(from));
  if (mapped == MAP_FAILED) {
    set_error("aclrtMapMem: the address cannot be mapped");
    return kInvalidParameter;
  }
  mappings[reinterpret_cast<uintptr_t>(address)] = {size, memory.reached + from};
  return kSuccess;
}
CANN_API int aclrtUnmapMem(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(reinterpret_cast<uintptr_t>(address));
  if (found == mappings.end()) return kInvalidParameter;
  mmap(address, found->second.size, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  mappings.erase(found);
  return kSuccess;
}
CANN_API int aclrtMemExportToShareableHandle(void*, int, uint64_t, uint64_t*) {
  return kNotSupported;
}
CANN_API int aclrtMemImportFromShareableHandle(uint64_t, int32_t, void**) { return kNotSupported; }
CANN_API int aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return kNotSupported; }
