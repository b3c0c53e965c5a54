/* minichip: seven functions, the least that a chip's library can be. Its two devices are memory
 * of this process; a vendor replaces each body by a call of the driver. Everything else, from
 * streams to the last operator, is done for it on the host. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include <anychip/abi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_DEVICES = 2, ALIGNMENT = 256 };
static const uint64_t TOTAL = (uint64_t)4 << 30; /* bytes of each device */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used[NUM_DEVICES];
static _Thread_local char message[128];

/* What lies before each allocation, so that mem_free knows its size. */
typedef union {
  uint64_t nbytes;
  char padding[ALIGNMENT];
} header;

static anychip_status fail(anychip_status status, const char* text) {
  snprintf(message, sizeof message, "%s", text);
  return status;
}

static const char* last_error(void) { return message; }

static int is_device(int32_t device) { return device >= 0 && device < NUM_DEVICES; }

static char* address(anychip_memory memory, int64_t offset) {
  return (char*)(uintptr_t)memory + offset;
}

/* ------------------------------------------------------------------------------ the seven */

static anychip_status device_count(int32_t* count) {
  *count = NUM_DEVICES;
  return ANYCHIP_OK;
}

static anychip_status device_properties(int32_t device, anychip_device_properties* properties) {
  anychip_device_properties known;
  uint32_t size = properties->struct_size;
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  memset(&known, 0, sizeof known);
  known.flags = ANYCHIP_DEVICE_IS_HOST_MEMORY;
  snprintf(known.name, sizeof known.name, "Minichip %d", (int)device);
  known.total_memory = TOTAL;
  known.dtypes = 1u << ANYCHIP_FLOAT32 | 1u << ANYCHIP_FLOAT16 | 1u << ANYCHIP_BFLOAT16;
  known.alignment = ALIGNMENT;
  known.struct_size = size < sizeof known ? size : (uint32_t)sizeof known;
  memcpy(properties, &known, known.struct_size); /* a host that is older knows less */
  return ANYCHIP_OK;
}

/* Nothing is ever queued: each call is over when it returns. */
static anychip_status device_synchronize(int32_t device) {
  return is_device(device) ? ANYCHIP_OK : fail(ANYCHIP_EINVAL, "no such device");
}

static anychip_status mem_alloc(int32_t device, uint64_t nbytes, anychip_memory* memory) {
  void* block = NULL;
  int fits;
  if (!is_device(device) || nbytes == 0) return fail(ANYCHIP_EINVAL, "no device, or no bytes");
  pthread_mutex_lock(&lock);
  fits = nbytes <= TOTAL - used[device];
  if (fits) used[device] += nbytes;
  pthread_mutex_unlock(&lock);
  if (!fits) return fail(ANYCHIP_ENOMEM, "the device's memory is full");
  if (posix_memalign(&block, ALIGNMENT, sizeof(header) + nbytes)) {
    pthread_mutex_lock(&lock);
    used[device] -= nbytes;
    pthread_mutex_unlock(&lock);
    return fail(ANYCHIP_ENOMEM, "the host's memory is full");
  }
  ((header*)block)->nbytes = nbytes;
  *memory = (anychip_memory)(uintptr_t)((header*)block + 1);
  return ANYCHIP_OK;
}

static anychip_status mem_free(int32_t device, anychip_memory memory) {
  header* block = (header*)(uintptr_t)memory - 1;
  if (!is_device(device) || !memory) return fail(ANYCHIP_EINVAL, "no device, or no memory");
  pthread_mutex_lock(&lock);
  used[device] -= block->nbytes;
  pthread_mutex_unlock(&lock);
  free(block);
  return ANYCHIP_OK;
}

static anychip_status host_to_device(int32_t device, anychip_memory target, int64_t target_offset,
                                     const void* source, uint64_t nbytes, anychip_stream stream) {
  (void)stream; /* there is one queue, and it is always empty */
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  memcpy(address(target, target_offset), source, nbytes);
  return ANYCHIP_OK;
}

static anychip_status device_to_host(int32_t device, void* target, anychip_memory source,
                                     int64_t source_offset, uint64_t nbytes,
                                     anychip_stream stream) {
  (void)stream;
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  memcpy(target, address(source, source_offset), nbytes);
  return ANYCHIP_OK;
}

/* -------------------------------------------------------------------------- the one symbol */

static const anychip_library library = {
    .struct_size = sizeof(anychip_library),
    .abi_major = ANYCHIP_ABI_MAJOR,
    .abi_minor = ANYCHIP_ABI_MINOR,
    .name = "minichip",
    .version = "minichip 1.0",
    .last_error = last_error,
    .device_count = device_count,
    .device_properties = device_properties,
    .device_synchronize = device_synchronize,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .host_to_device = host_to_device,
    .device_to_host = device_to_host,
};

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* host,
                             const anychip_library** found) {
  (void)host; /* log and scratch are not needed */
  if (abi_major != ANYCHIP_ABI_MAJOR) return ANYCHIP_ENOTSUP;
  *found = &library;
  return ANYCHIP_OK;
}
