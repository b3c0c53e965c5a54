// Devices: how many, which is current, what they are; versions; and what is accepted without
// effect.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime/state.h"

namespace cann {

void watch_strict_memory();

std::optional<int>& current_device() {
  thread_local std::optional<int> current;
  return current;
}

int device_count() {
  static const int count = static_cast<int>(setting("DEVICES", 2));
  return count;
}

}  // namespace cann

using namespace cann;

namespace {

constexpr int kAlreadyInitialised = 100002;
constexpr int kVectorCores = 48;
constexpr int kCubeCores = 24;

std::mutex options_mutex;
std::map<int, int64_t> system_options;
std::map<int, std::string> compile_options;

// A context is its device: an address inside this array.
char contexts[64];

std::string version() { return setting_text("VERSION", "8.5.0"); }

}  // namespace

CANN_API int aclInit(const char*) {
  static bool is_initialised = false;
  const std::lock_guard<std::mutex> lock(options_mutex);
  if (is_initialised) return kAlreadyInitialised;
  is_initialised = true;
  check_settings();
  watch_strict_memory();
  return kSuccess;
}
CANN_API int aclFinalize() { return kSuccess; }

// torch_npu takes the path of its operators by this name, so that it must be one that it knows.
CANN_API const char* aclrtGetSocName() {
  static const std::string name = setting_text("SOC", "Ascend910B1");
  return name.c_str();
}
// A function that puts a value where it is told, and does nothing else.
#define GIVES(name, value, ...)    \
  CANN_API int name(__VA_ARGS__) { \
    value;                         \
    return kSuccess;               \
  }
GIVES(aclrtGetDeviceCount, *count = static_cast<uint32_t>(device_count()), uint32_t* count)
CANN_API int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) {
    set_error("device " + std::to_string(device) + " of " + std::to_string(device_count()));
    return kInvalidDevice;
  }
  current_device() = device;
  return kSuccess;
}
CANN_API int aclrtGetDevice(int32_t* device) {
  if (!current_device()) return kNoContext;
  *device = *current_device();
  return kSuccess;
}
CANN_API int aclrtResetDevice(int32_t device) { return wait_for_device(device, -1); }
CANN_API int aclrtGetCurrentContext(void** context) {
  if (!current_device()) return kNoContext;
  *context = &contexts[*current_device()];
  return kSuccess;
}
CANN_API int aclrtSetCurrentContext(void* context) {
  const auto index = static_cast<char*>(context) - contexts;
  if (context == nullptr || index < 0 || index >= device_count()) return kNoContext;
  current_device() = static_cast<int>(index);
  return kSuccess;
}
CANN_API int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* is_active) {
  if (flags != nullptr) *flags = 0;
  if (is_active != nullptr) *is_active = 1;
  return kSuccess;
}
GIVES(aclrtDeviceCanAccessPeer, *can = 1, int32_t* can, int32_t, int32_t)
CANN_API int aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return kSuccess; }
GIVES(aclrtDeviceGetBareTgid, *process = getpid(), int32_t* process)
GIVES(aclrtGetLogicDevIdByUserDevId, *logical = user, int32_t user, int32_t* logical)
GIVES(aclGetDeviceCapability, *value = kCubeCores, uint32_t, int, int64_t* value)
CANN_API int aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
  switch (attribute) {
    case 101:
    case 102:
      *value = kCubeCores;
      return kSuccess;
    case 201:
      *value = kVectorCores;
      return kSuccess;
    default:
      set_error("aclrtGetDeviceInfo: the emulator does not know attribute " +
                std::to_string(attribute));
      return kNotSupported;
  }
}

namespace {
uint32_t cores(int type) { return type == 0 ? kCubeCores : kVectorCores; }
}  // namespace

GIVES(aclrtGetDeviceResLimit, *value = cores(type), int32_t, int type, uint32_t* value)
GIVES(aclrtGetStreamResLimit, *value = cores(type), Stream, int type, uint32_t* value)
GIVES(aclrtGetResInCurrentThread, *value = cores(type), int type, uint32_t* value)
CANN_API int aclrtSetDeviceResLimit(int32_t, int, uint32_t) { return kSuccess; }

// Versions. The structure has the version first, and texts of its parts that nobody reads.
CANN_API int aclsysGetCANNVersion(int, char* package) {
  snprintf(package, 128, "%s", version().c_str());
  return kSuccess;
}
CANN_API int aclsysGetVersionStr(char*, char* text) {
  snprintf(text, 128, "%s", version().c_str());
  return kSuccess;
}
GIVES(aclGetCannAttribute, *value = 1, int, int32_t* value)
CANN_API int aclGetCannAttributeList(const int** list, size_t* length) {
  static const int attributes[] = {0, 1};
  *list = attributes;
  *length = 2;
  return kSuccess;
}

// Options are remembered and given back; they change nothing here.
CANN_API int aclrtSetSysParamOpt(int option, int64_t value) {
  const std::lock_guard<std::mutex> lock(options_mutex);
  system_options[option] = value;
  return kSuccess;
}
CANN_API int aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}
CANN_API int aclrtGetSysParamOpt(int option, int64_t* value) {
  const std::lock_guard<std::mutex> lock(options_mutex);
  *value = system_options[option];
  return kSuccess;
}
CANN_API int aclSetCompileopt(int option, const char* value) {
  const std::lock_guard<std::mutex> lock(options_mutex);
  compile_options[option] = value == nullptr ? "" : value;
  return kSuccess;
}
CANN_API size_t aclGetCompileoptSize(int option) {
  const std::lock_guard<std::mutex> lock(options_mutex);
  return compile_options[option].size() + 1;
}
CANN_API int aclGetCompileopt(int option, char* value, size_t room) {
  const std::lock_guard<std::mutex> lock(options_mutex);
  snprintf(value, room, "%s", compile_options[option].c_str());
  return kSuccess;
}
CANN_API int aclrtSetDeviceSatMode(int) { return kSuccess; }
CANN_API int aclrtSetOpExecuteTimeOut(uint32_t) { return kSuccess; }
CANN_API int aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return kSuccess;
}
CANN_API int aclrtSetOpWaitTimeout(uint32_t) { return kSuccess; }
CANN_API int aclrtPeekAtLastError(int) { return kSuccess; }
CANN_API int aclrtGetLastError(int) { return kSuccess; }

// LOG=level prints what torch_npu logs, from 0 (debug) to 3 (error).
CANN_API void aclAppLog(int level, const char* function, const char*, uint32_t line,
                        const char* format, ...) {
  static const long least = setting("LOG", 4);
  if (level < least) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[torch_npu %d] %s:%u ", level, function, line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

// Dumps and profiling are accepted and do nothing.
CANN_API int aclmdlInitDump() { return kSuccess; }
CANN_API int aclmdlFinalizeDump() { return kSuccess; }
CANN_API int aclmdlSetDump(const char*) { return kSuccess; }
CANN_API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
CANN_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
CANN_API int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
CANN_API int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
CANN_API int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
CANN_API uint64_t MsprofSysCycleTime() { return 0; }

// Kernels as binaries cannot run here.
CANN_API int aclrtBinaryGetFunction(void*, const char*, void**) { return kNotSupported; }
CANN_API int aclrtBinaryLoadFromData(const void*, size_t, const void*, void**) {
  return kNotSupported;
}
CANN_API int aclrtGetFunctionAddr(void*, void**, void**) { return kNotSupported; }
CANN_API int rtDevBinaryRegister() { return kNotSupported; }
CANN_API int rtFunctionRegister() { return kNotSupported; }
CANN_API int rtKernelLaunch() { return kNotSupported; }
CANN_API int rtGetC2cCtrlAddr() { return kNotSupported; }
