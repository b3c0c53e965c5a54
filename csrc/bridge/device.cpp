// What torch asks of a device: which is current, streams, events, generators.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "bridge.h"

namespace anychip_bridge {
namespace {

constexpr int kPool = 32;  // streams of one priority; torch hands them out again and again

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::vector<c10::StreamId> thread_streams;  // 0, the default, where nothing was set

c10::StreamId& thread_stream(c10::DeviceIndex device) {
  if (thread_streams.size() <= static_cast<size_t>(device)) thread_streams.resize(num_devices, 0);
  return thread_streams[device];
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.index() < 0 ? thread_device : device.index();
}

void check_index(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < num_devices, chip.name, " has devices 0 to ", num_devices - 1,
              ", got ", static_cast<int>(device));
}

// The streams of one device: ids 1 to kPool of the usual priority, then kPool of the higher one.
struct Pool {
  std::mutex mutex;
  std::array<anychip_stream, 2 * kPool> handles{};
  std::array<int, 2> next{};

  c10::StreamId take(c10::DeviceIndex device, bool is_high) {
    if (!has_streams()) return 0;
    std::lock_guard<std::mutex> lock(mutex);
    const int slot = is_high * kPool + next[is_high]++ % kPool;
    if (!handles[slot])
      check(chip.stream_create(device, is_high ? -1 : 0, &handles[slot]), "stream_create", device);
    return slot + 1;
  }
};

// Never destroyed: threads may use them until the process ends.
Pool& pool(c10::DeviceIndex device) {
  static auto* pools = new std::vector<Pool>(num_devices);
  return (*pools)[device];
}

// A generator whose numbers are drawn on the host, by an inner one: host kernels take no other.
struct Generator final : at::CPUGeneratorImpl {
  at::Generator inner;

  explicit Generator(c10::DeviceIndex device,
                     uint64_t seed = c10::detail::getNonDeterministicRandom())
      : at::CPUGeneratorImpl(seed), inner(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    device_ = c10::Device(kChip, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index(), inner.current_seed());
    copy->inner = inner.clone();
    return copy;
  }
};

const std::vector<at::Generator>& default_generators() {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < num_devices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return *generators;
}

std::atomic<bool> hands_out_default{false};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kChip;

  c10::DeviceType type() const override { return kChip; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kChip, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kChip, thread_device}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) thread_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_index(device);
    check(chip.device_synchronize(device), "device_synchronize", device);
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_stream_id(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return stream(index_of(device), pool(index_of(device)).take(index_of(device), is_high));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto device = next.device_index();
    return stream(device, std::exchange(thread_stream(device), next.id()));
  }
  void* getStreamNativeHandle(const c10::Stream of) const override {
    return reinterpret_cast<void*>(stream_handle(of.device_index(), of.id()));
  }
  bool queryStream(const c10::Stream& of) const override {
    const auto device = of.device_index();
    if (!has_streams()) return synchronizeDevice(device), true;
    int32_t done = 0;
    check(chip.stream_query(device, stream_handle(device, of.id()), &done), "stream_query", device);
    return done != 0;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    const auto device = of.device_index();
    if (!has_streams()) return synchronizeDevice(device);
    synchronize_stream(device, stream_handle(device, of.id()));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    allocator()->recordStream(data, on);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    const auto device = on.device_index();
    static_cast<Event*>(*event)->record(device, stream_handle(device, on.id()));
  }
  void block(void* event, const c10::Stream& on) const override {
    const auto device = on.device_index();
    if (event) static_cast<Event*>(event)->wait(device, stream_handle(device, on.id()));
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "elapsed_time: both events have to be recorded before");
    return static_cast<Event*>(start)->elapsed_ms(*static_cast<Event*>(end));
  }

 private:
  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kChip, device), id);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return thread_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    const auto index = device < 0 ? thread_device : device;
    check_index(index);
    return default_generators()[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    const auto index = device < 0 ? thread_device : device;
    if (hands_out_default) return getDefaultGenerator(index);
    check_index(index);
    return at::make_generator<Generator>(index, c10::detail::getNonDeterministicRandom());
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return {kChip, static_cast<c10::DeviceIndex>(device_of(address))};
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "a storage that cannot be resized");
    const auto device = impl->device().index();
    const c10::DeviceGuard guard(impl->device());
    auto data = allocator()->allocate(nbytes);
    if (const auto kept = std::min(nbytes, impl->nbytes())) {
      copy_on_device(device, place_of(data.get()), place_of(impl->data()), kept);
      // The old memory may be another stream's, which must not use it again before the copy.
      allocator()->recordStream(impl->data_ptr(), Guard().getStream(impl->device()));
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

c10::DeviceIndex current_device() { return thread_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  if (device < 0) return thread_device;
  check_index(device);
  return std::exchange(thread_device, device);
}

c10::StreamId current_stream_id(c10::DeviceIndex device) { return thread_stream(device); }

anychip_stream stream_handle(c10::DeviceIndex device, c10::StreamId id) {
  if (id == 0) return 0;
  TORCH_CHECK(id > 0 && id <= 2 * kPool && pool(device).handles[id - 1], chip.name,
              " has no stream with the number ", id);
  return pool(device).handles[id - 1];
}

void synchronize_stream(c10::DeviceIndex device, anychip_stream stream) {
  if (has_streams()) check(chip.stream_synchronize(device, stream), "stream_synchronize", device);
}

at::Generator default_generator(c10::DeviceIndex device) {
  return default_generators()[device < 0 ? thread_device : device];
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

void Event::record(c10::DeviceIndex device, anychip_stream stream) {
  TORCH_CHECK(device_ < 0 || device_ == device, "an event of device ", static_cast<int>(device_),
              " cannot be recorded on a stream of device ", static_cast<int>(device));
  device_ = device;
  if (!has_streams()) return;
  if (!handle_) check(chip.event_create(device, &handle_), "event_create", device);
  check(chip.event_record(device, handle_, stream), "event_record", device);
}

void Event::wait(c10::DeviceIndex device, anychip_stream stream) const {
  if (handle_) return check(chip.event_wait(device, handle_, stream), "event_wait", device);
  // One queue per device: only another device has to wait, and for all of it.
  if (device_ >= 0 && device_ != device) synchronize();
}

bool Event::query() const {
  if (!handle_) return synchronize(), true;
  int32_t done = 0;
  check(chip.event_query(device_, handle_, &done), "event_query", device_);
  return done != 0;
}

void Event::synchronize() const {
  if (handle_) return check(chip.event_synchronize(device_, handle_), "event_synchronize", device_);
  if (device_ >= 0) check(chip.device_synchronize(device_), "device_synchronize", device_);
}

double Event::elapsed_ms(const Event& end) const {
  TORCH_CHECK(chip.event_elapsed && handle_ && end.handle_, chip.name,
              " measures no time between events");
  double milliseconds = 0;
  check(chip.event_elapsed(device_, handle_, end.handle_, &milliseconds), "event_elapsed", device_);
  return milliseconds;
}

Event::~Event() {
  if (handle_) chip.event_destroy(device_, handle_);
}

}  // namespace anychip_bridge

extern "C" __attribute__((visibility("default"))) void anychip_bridge_hand_out_default(int on) {
  anychip_bridge::hands_out_default = on != 0;
}
