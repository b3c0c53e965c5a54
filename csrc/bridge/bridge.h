// The bridge makes a torch device of a library that keeps to anychip/abi.h. What its parts share:
// the attached library, errors, streams, and where a tensor's elements are in the library's memory.
// It knows no chip by name and nothing of Python. One chip per process: torch has one private-use
// device type.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <anychip/abi.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <optional>
#include <string>

namespace anychip_bridge {

constexpr auto kChip = c10::DeviceType::PrivateUse1;

// The library's table; what it does not know of is NULL here. All zero before attach().
extern anychip_library chip;
extern int num_devices;

// A status as an exception of torch's: `what` is the function that gave it.
void check(anychip_status status, const char* what, int device);
std::string describe(anychip_status status, const char* what, int device);

inline bool has_streams() { return chip.stream_create != nullptr; }

// --- device.cpp: what is current in the calling thread

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::StreamId current_stream_id(c10::DeviceIndex device);
// The library's stream for torch's number of it.
anychip_stream stream_handle(c10::DeviceIndex device, c10::StreamId id);
inline anychip_stream current_stream(c10::DeviceIndex device) {
  return stream_handle(device, current_stream_id(device));
}
// The host waits for a stream; without streams copies are over when they return.
void synchronize_stream(c10::DeviceIndex device, anychip_stream stream);
at::Generator default_generator(c10::DeviceIndex device);
// The generator on the host that holds the state of one of ours.
at::Generator host_generator(const at::Generator& generator);
void register_hooks();

// An event of the library; without events, waiting for one waits for the device.
class Event {
 public:
  void record(c10::DeviceIndex device, anychip_stream stream);
  void wait(c10::DeviceIndex device, anychip_stream stream) const;
  bool query() const;
  void synchronize() const;
  double elapsed_ms(const Event& end) const;
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();

 private:
  c10::DeviceIndex device_ = -1;
  anychip_event handle_ = 0;
};

// --- memory.cpp

struct Place {
  anychip_memory memory = 0;
  int64_t offset = 0;  // bytes
};

c10::DeviceAllocator* allocator();
// Scratch of an operator; lives until release_scratch() in the same thread.
anychip_status scratch(int32_t device, anychip_stream stream, uint64_t nbytes,
                       anychip_memory* memory) noexcept;
void release_scratch();
// Where an address that the allocator gave, and what lies behind it, is in the library's memory.
Place place_of(const void* address);
// Where a tensor's first element is.
Place place_of(const at::Tensor& tensor);
int device_of(const void* address);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// Keeps a pinned block until the work that has been queued on the stream is done with it.
void record_pinned(const void* address, c10::DeviceIndex device, anychip_stream stream);
void copy_on_device(c10::DeviceIndex device, Place target, Place source, uint64_t nbytes);
std::pair<uint64_t, uint64_t> memory_info(c10::DeviceIndex device);

// --- tensors.cpp

at::Tensor empty_strided_on(c10::Device device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            c10::ScalarType dtype);
// A contiguous copy on the host; complete.
at::Tensor to_host(const at::Tensor& tensor);

// --- host.cpp

// The device that a call is about: its first tensor's of ours, or the one that it names.
c10::DeviceIndex device_of_call(const torch::jit::Stack& stack, size_t begin);
bool takes_generator(const c10::Argument& argument);
// Computes on the host what the chip does not, and counts it.
void host_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// How often an operator was called on the device, or on the host instead; holds for ever.
std::atomic<int64_t>& call_count(const std::string& name, bool is_native);
// A line for each that was called: its name, and how often.
std::string calls(bool is_native, bool reset);

// --- numbers.cpp

// Where a number of the host, a tensor whose elements are one, is on a device; none where there is
// no room for another one.
std::optional<Place> number_on(c10::DeviceIndex device, const at::Tensor& number);

// --- profile.cpp

// From zero, while it is on.
void profile(bool on);
// Lines "who name calls ns copied_ns copied_bytes".
std::string profiled();

// Work from here to its end, while profiling; what copies `nbytes` counts as copies of the work
// that it is inside of.
class Timed {
 public:
  Timed(const char* who, const char* name, c10::DeviceIndex device, int64_t nbytes = 0);
  ~Timed();
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  void drop() { is_kept_ = false; }  // it was not done

 private:
  std::string name_;
  c10::DeviceIndex device_;
  int64_t begin_ns_ = 0, nbytes_;
  bool is_kept_ = true;
};

// --- operators.cpp

// Makes an operator that the library lists, and torch does not know, torch.ops.anychip_library.*;
// the schema ends in the list of results, and gives a bool: false where the library does not do it.
void serve(const std::string& name, const std::string& schema);
// Registers what the library has, for every form of each name.
void register_operators();
// target[...] = source by the library's "copy", both on one device; false: it does not do that.
bool native_copy(const at::Tensor& target, const at::Tensor& source);

}  // namespace anychip_bridge
