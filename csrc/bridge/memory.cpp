// Memory: a caching allocator that knows which streams use a block, and page-locked host memory.
//
// torch identifies memory by addresses, the library by handles that nobody may add to. So each
// block gets a range of addresses of its own that no access is allowed to: ranges never overlap,
// and host code that reads a device's tensor ends in SIGSEGV at once, on every chip.

#include <c10/core/DeviceGuard.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "bridge.h"

namespace anychip_bridge {
namespace {

constexpr uint64_t kSmall = 512, kLarge = 1 << 20, kStep = 64 << 10, kPage = 4096;

struct Block {
  anychip_memory handle;
  char* address;
  uint64_t nbytes;
  c10::DeviceIndex device;
  c10::StreamId stream;               // it was allocated on, and is free for
  std::vector<c10::StreamId> others;  // that use it too, by record_stream
};

// A block that was given back while other streams may still use it.
struct Pending {
  Block* block;
  std::vector<std::unique_ptr<Event>> events;
};

struct PerDevice {
  // By stream and size; sizes stay when the last of them is taken, and come back soon.
  std::map<std::pair<c10::StreamId, uint64_t>, std::vector<Block*>> free;
  std::vector<Pending> pending;
  int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
};

uint64_t rounded(uint64_t nbytes) {
  const uint64_t step = nbytes < kLarge ? kSmall : kStep;
  return (nbytes + step - 1) / step * step;
}

void release(void* block);

// One lock: blocks are freed by any thread. Never destroyed: tensors may outlive everything.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    TORCH_CHECK(device < num_devices, "no device ", static_cast<int>(device));
    const c10::Device where(kChip, device);
    if (nbytes == 0) return {nullptr, nullptr, &release, where};
    Block* block = take(device, rounded(nbytes), nbytes);
    return {block->address, block, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    copy_on_device(static_cast<c10::DeviceIndex>(device_of(target)), place_of(target),
                   place_of(source), nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < num_devices; ++device) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &release || !data.get_context()) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    auto& others = block->others;
    if (stream.device_index() != block->device || stream.id() == block->stream) return;
    if (std::find(others.begin(), others.end(), stream.id()) == others.end())
      others.push_back(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& of = devices_[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = of.allocated;
    stats.allocated_bytes[0].peak = of.peak;
    stats.reserved_bytes[0].current = of.reserved;
    stats.reserved_bytes[0].peak = of.peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& of = devices_[device];
    of.peak = of.allocated;
    of.peak_reserved = of.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_info(device);
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& of = devices_[block->device];
    of.allocated -= block->nbytes;
    if (block->others.empty()) return put(of, block);
    Pending pending{block, {}};
    try {
      for (const auto id : std::exchange(block->others, {})) {
        pending.events.push_back(std::make_unique<Event>());
        pending.events.back()->record(block->device, stream_handle(block->device, id));
      }
      of.pending.push_back(std::move(pending));
    } catch (const c10::Error&) {
      // The device has failed, which the next wait says; the block is never used again.
    }
  }
  // The block that an address lies in, or NULL.
  const Block* find(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(static_cast<const char*>(address));
    if (next == blocks_.begin()) return nullptr;
    const Block* block = std::prev(next)->second;
    return address < block->address + block->nbytes ? block : nullptr;
  }
  int64_t reserved(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return devices_[device].reserved;
  }

 private:
  static void put(PerDevice& of, Block* block) {
    of.free[{block->stream, block->nbytes}].push_back(block);
  }

  Block* take(c10::DeviceIndex device, uint64_t nbytes, uint64_t asked) {
    const auto stream = current_stream_id(device);
    std::unique_lock<std::mutex> lock(mutex_);
    auto& of = devices_[device];
    finish(of, false);
    Block* block = cached(of, stream, nbytes);
    if (!block) {
      lock.unlock();  // the library may wait for the device, or log
      block = fresh(device, stream, nbytes, asked);
      lock.lock();
      blocks_[block->address] = block;
      of.reserved += block->nbytes;
      of.peak_reserved = std::max(of.peak_reserved, of.reserved);
    }
    of.allocated += block->nbytes;
    of.peak = std::max(of.peak, of.allocated);
    return block;
  }

  // A free block of the stream that is at most a quarter too large.
  static Block* cached(PerDevice& of, c10::StreamId stream, uint64_t nbytes) {
    const auto end = of.free.upper_bound({stream, nbytes + nbytes / 4});
    for (auto found = of.free.lower_bound({stream, nbytes}); found != end; ++found) {
      auto& blocks = found->second;
      if (blocks.empty()) continue;
      Block* block = blocks.back();
      blocks.pop_back();
      return block;
    }
    return nullptr;
  }

  Block* fresh(c10::DeviceIndex device, c10::StreamId stream, uint64_t nbytes, uint64_t asked) {
    anychip_memory handle = 0;
    auto status = chip.mem_alloc(device, nbytes, &handle);
    if (status == ANYCHIP_ENOMEM) {
      empty_cache(device);
      status = chip.mem_alloc(device, nbytes, &handle);
    }
    if (status == ANYCHIP_ENOMEM) {
      const auto [free, total] = memory_info(device);
      TORCH_CHECK_WITH(OutOfMemoryError, false, chip.name, ": out of memory: ", asked,
                       " bytes were asked for on device ", static_cast<int>(device), ", and ", free,
                       " of ", total, " bytes are free");
    }
    check(status, "mem_alloc", device);
    void* address =
        mmap(nullptr, pages(nbytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
      chip.mem_free(device, handle);
      TORCH_CHECK_WITH(OutOfMemoryError, false, chip.name, ": no addresses for ", nbytes, " bytes");
    }
    return new Block{handle, static_cast<char*>(address), nbytes, device, stream, {}};
  }

  // Puts back what other streams are done with; with `wait`, all of it.
  static void finish(PerDevice& of, bool wait) {
    for (size_t i = 0; i < of.pending.size();) {
      auto& events = of.pending[i].events;
      while (!events.empty()) {
        if (wait) events.back()->synchronize();
        if (!events.back()->query()) break;
        events.pop_back();
      }
      if (!events.empty()) {
        ++i;
        continue;
      }
      put(of, of.pending[i].block);
      of.pending.erase(of.pending.begin() + i);
    }
  }

  void empty_cache(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& of = devices_[device];
    if (of.free.empty() && of.pending.empty()) return;
    // Work that is queued on its own stream may still use a free block.
    check(chip.device_synchronize(device), "device_synchronize", device);
    finish(of, true);
    while (!of.free.empty()) {
      auto& blocks = of.free.begin()->second;
      if (blocks.empty()) {
        of.free.erase(of.free.begin());
        continue;
      }
      const std::unique_ptr<Block> block(blocks.back());
      blocks.pop_back();
      blocks_.erase(block->address);
      of.reserved -= block->nbytes;
      munmap(block->address, pages(block->nbytes));
      check(chip.mem_free(device, block->handle), "mem_free", device);
    }
  }

  static uint64_t pages(uint64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, PerDevice> devices_;
  std::map<const char*, Block*> blocks_;
};

Allocator& the_allocator() {
  static auto* made = new Allocator;
  return *made;
}

void release(void* block) {
  if (block) the_allocator().give_back(static_cast<Block*>(block));
}

thread_local std::vector<c10::DataPtr> thread_scratch;

// Page-locked host memory, which copies may use after its tensor is gone.
struct Pinned {
  char* address;
  uint64_t nbytes;
  std::vector<std::unique_ptr<Event>> events;
};

std::mutex pinned_mutex;

std::map<const char*, Pinned*>& pinned() {
  static auto* blocks = new std::map<const char*, Pinned*>;
  return *blocks;
}

Pinned* find_pinned(const void* address) {  // under pinned_mutex
  auto next = pinned().upper_bound(static_cast<const char*>(address));
  if (next == pinned().begin()) return nullptr;
  Pinned* block = std::prev(next)->second;
  return address < block->address + block->nbytes ? block : nullptr;
}

std::vector<std::unique_ptr<Pinned>>& given_back() {
  static auto* blocks = new std::vector<std::unique_ptr<Pinned>>;
  return *blocks;
}

bool is_unused(const Pinned& block, bool wait) {
  try {
    for (const auto& event : block.events) {
      if (wait) event->synchronize();
      if (!event->query()) return false;
    }
    return true;
  } catch (const c10::Error&) {
    return false;  // the device has failed, which the next wait says; the block stays
  }
}

// Frees what no copy uses any more; with `wait`, what none will use.
void free_pinned(bool wait) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto& blocks = given_back();
  const auto kept = std::partition(blocks.begin(), blocks.end(),
                                   [&](const auto& block) { return !is_unused(*block, wait); });
  for (auto next = kept; next != blocks.end(); ++next) {
    if (chip.host_alloc)
      chip.host_free((*next)->address);
    else
      std::free((*next)->address);
  }
  blocks.erase(kept, blocks.end());
}

void release_pinned(void* context) {
  if (!context) return;
  std::unique_ptr<Pinned> block(static_cast<Pinned*>(context));
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().erase(block->address);
    given_back().push_back(std::move(block));
  }
  free_pinned(false);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &release_pinned, host};
    void* address = nullptr;
    free_pinned(false);
    if (chip.host_alloc) {
      auto status = chip.host_alloc(nbytes, &address);
      if (status == ANYCHIP_ENOMEM) {
        free_pinned(true);
        status = chip.host_alloc(nbytes, &address);
      }
      check(status, "host_alloc", -1);
    } else {
      address = std::aligned_alloc(kPage, (nbytes + kPage - 1) / kPage * kPage);
    }
    TORCH_CHECK(address, "no ", nbytes, " bytes of host memory");
    auto* block = new Pinned{static_cast<char*>(address), nbytes, {}};
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned()[block->address] = block;
    return {address, block, &release_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

}  // namespace

REGISTER_ALLOCATOR(kChip, &the_allocator());

c10::DeviceAllocator* allocator() { return &the_allocator(); }

anychip_status scratch(int32_t device, anychip_stream, uint64_t nbytes,
                       anychip_memory* memory) noexcept {
  try {
    const c10::DeviceGuard guard({kChip, static_cast<c10::DeviceIndex>(device)});
    thread_scratch.push_back(the_allocator().allocate(std::max<uint64_t>(nbytes, 1)));
    *memory = static_cast<Block*>(thread_scratch.back().get_context())->handle;
    return ANYCHIP_OK;
  } catch (const std::exception&) {
    return ANYCHIP_ENOMEM;
  }
}

void release_scratch() { thread_scratch.clear(); }

Place place_of(const void* address) {
  if (!address) return {};
  const Block* block = the_allocator().find(address);
  TORCH_CHECK(block, "memory at ", address, " is not of ", chip.name);
  return {block->handle, static_cast<const char*>(address) - block->address};
}

Place place_of(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  const auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  if (data.get_deleter() == &release && data.get_context()) {
    const auto* block = static_cast<const Block*>(data.get_context());
    return {block->handle, static_cast<const char*>(data.get()) - block->address + offset};
  }
  if (!data.get()) return {};
  auto place = place_of(data.get());
  place.offset += offset;
  return place;
}

int device_of(const void* address) {
  const Block* block = the_allocator().find(address);
  TORCH_CHECK(block, "memory at ", address, " is not of ", chip.name);
  return block->device;
}

c10::Allocator* pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return find_pinned(address) != nullptr;
}

void record_pinned(const void* address, c10::DeviceIndex device, anychip_stream stream) {
  auto event = std::make_unique<Event>();
  event->record(device, stream);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  Pinned* block = find_pinned(address);
  TORCH_CHECK(block, "host memory that is not page-locked");
  auto& events = block->events;
  while (!events.empty() && events.front()->query()) events.erase(events.begin());
  events.push_back(std::move(event));
}

void copy_on_device(c10::DeviceIndex device, Place target, Place source, uint64_t nbytes) {
  if (nbytes == 0) return;
  const auto stream = current_stream(device);
  if (chip.device_to_device) {
    const auto status = chip.device_to_device(device, target.memory, target.offset, source.memory,
                                              source.offset, nbytes, stream);
    return check(status, "device_to_device", device);
  }
  std::vector<char> bytes(nbytes);
  check(chip.device_to_host(device, bytes.data(), source.memory, source.offset, nbytes, stream),
        "device_to_host", device);
  synchronize_stream(device, stream);
  check(chip.host_to_device(device, target.memory, target.offset, bytes.data(), nbytes, stream),
        "host_to_device", device);
  synchronize_stream(device, stream);
}

std::pair<uint64_t, uint64_t> memory_info(c10::DeviceIndex device) {
  uint64_t free = 0, total = 0;
  if (chip.mem_info) {
    check(chip.mem_info(device, &free, &total), "mem_info", device);
    return {free, total};
  }
  anychip_device_properties properties{};
  properties.struct_size = sizeof properties;
  check(chip.device_properties(device, &properties), "device_properties", device);
  const auto used = std::min<uint64_t>(the_allocator().reserved(device), properties.total_memory);
  return {properties.total_memory - used, properties.total_memory};
}

}  // namespace anychip_bridge
