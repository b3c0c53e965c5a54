// Attaches a chip's library, and the C functions by which the Python side drives the bridge.

#include <dlfcn.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "bridge.h"

namespace anychip_bridge {

anychip_library chip = {};
int num_devices = 0;

namespace {

thread_local std::string last_error;

const char* status_name(anychip_status status) {
  switch (status) {
    case ANYCHIP_OK:
      return "ANYCHIP_OK";
    case ANYCHIP_ENOTSUP:
      return "ANYCHIP_ENOTSUP";
    case ANYCHIP_EINVAL:
      return "ANYCHIP_EINVAL";
    case ANYCHIP_ENOMEM:
      return "ANYCHIP_ENOMEM";
    case ANYCHIP_EDEVICE:
      return "ANYCHIP_EDEVICE";
    case ANYCHIP_EABORTED:
      return "ANYCHIP_EABORTED";
    default:
      return "a status of its own";
  }
}

void log(int32_t level, const char* text) {
  if (level >= 1) std::fprintf(stderr, "%s: %s\n", chip.name ? chip.name : "chip", text);
}

const anychip_host host = {sizeof(anychip_host), ANYCHIP_ABI_MINOR, &log, &scratch};

// A library without all of a group has none of it.
void drop_halves() {
  const bool streams = chip.stream_create && chip.stream_destroy && chip.stream_synchronize &&
                       chip.stream_query && chip.event_create && chip.event_destroy &&
                       chip.event_record && chip.event_wait && chip.event_synchronize &&
                       chip.event_query;
  if (!streams) chip.stream_create = nullptr;
  if (!chip.host_alloc || !chip.host_free) chip.host_alloc = nullptr;
  if (!chip.find_operator) chip.operators = nullptr;
}

void attach(const char* path) {
  TORCH_CHECK(!chip.name, "this process has the chip ", chip.name, " already");
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(handle, dlerror());
  auto entry = reinterpret_cast<decltype(&anychip_entry)>(dlsym(handle, "anychip_entry"));
  TORCH_CHECK(entry, path, " has no anychip_entry");
  const anychip_library* table = nullptr;
  const auto status = entry(ANYCHIP_ABI_MAJOR, &host, &table);
  TORCH_CHECK(status == ANYCHIP_OK && table, path, ": anychip_entry gave ", status);
  std::memcpy(&chip, table, std::min<size_t>(table->struct_size, sizeof chip));
  drop_halves();
  int32_t count = 0;
  check(chip.device_count(&count), "device_count", -1);
  num_devices = count;
  register_hooks();
  register_operators();
}

template <class Function>
int guarded(Function&& function) {
  try {
    function();
    return 0;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return -1;
}

}  // namespace

std::string describe(anychip_status status, const char* what, int device) {
  const char* said = chip.last_error ? chip.last_error() : nullptr;
  std::ostringstream text;
  text << chip.name << ": " << what;
  if (device >= 0) text << "(device " << device << ")";
  text << " failed with " << status_name(status) << " (" << status << ")";
  if (said && *said) text << ": " << said;
  return text.str();
}

void check(anychip_status status, const char* what, int device) {
  if (status == ANYCHIP_OK) return;
  const auto text = describe(status, what, device);
  TORCH_CHECK_WITH(OutOfMemoryError, status != ANYCHIP_ENOMEM, text);
  TORCH_CHECK(false, text);
}

}  // namespace anychip_bridge

using namespace anychip_bridge;

extern "C" {

// Read from the file before it is loaded: which torch it was made for, and of which sources.
__attribute__((visibility("default"), used)) extern const char anychip_bridge_key[] =
    ANYCHIP_EXTENSION_KEY;

__attribute__((visibility("default"))) const char* anychip_bridge_error() {
  return last_error.c_str();
}

__attribute__((visibility("default"))) int anychip_bridge_attach(const char* path) {
  return guarded([&] { attach(path); });
}

// The library's status as it is; the text of a bad one is the error.
__attribute__((visibility("default"))) int anychip_bridge_synchronize(int device) {
  const auto status = chip.device_synchronize(device);
  if (status != ANYCHIP_OK) last_error = describe(status, "device_synchronize", device);
  return status;
}

__attribute__((visibility("default"))) void anychip_bridge_profile(int on) { profile(on != 0); }

__attribute__((visibility("default"))) const char* anychip_bridge_profiled() {
  thread_local std::string text;
  text = profiled();
  return text.c_str();
}

__attribute__((visibility("default"))) const char* anychip_bridge_calls(int native, int reset) {
  thread_local std::string text;
  text = calls(native != 0, reset != 0);
  return text.c_str();
}

__attribute__((visibility("default"))) int anychip_bridge_serve(const char* name,
                                                                const char* schema) {
  return guarded([&] { serve(name, schema); });
}

// Where the library's own functions find a tensor, for calls that are none of torch's operators.
__attribute__((visibility("default"))) int anychip_bridge_place(const void* address,
                                                                anychip_memory* memory,
                                                                int64_t* offset) {
  return guarded([&] {
    const auto place = place_of(address);
    *memory = place.memory;
    *offset = place.offset;
  });
}

// The calling thread's.
__attribute__((visibility("default"))) anychip_stream anychip_bridge_current_stream(int device) {
  return current_stream(static_cast<c10::DeviceIndex>(device));
}
}
