/* opencl: the devices of an OpenCL platform as a chip. A real third-party runtime: memory is a
 * cl_mem and an offset, streams are command queues, and kernels are compiled at run time.
 *
 * OPENCL_PLATFORM and OPENCL_DEVICE choose: each a part of a name or a number. Left out: the first
 * platform that has a device, and all its devices. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "operators.h"

enum { MAX_DEVICES = 16 };

/* A command queue. What was queued is counted: a marker behind all of it need not be over at once
 * even if there is nothing to wait for. */
typedef struct stream {
  cl_command_queue queue;
  uint64_t queued, marked, finished;
  cl_event marker;      /* behind the first `marked` pieces of work, or NULL */
  struct stream* other; /* of the same device, or NULL */
} stream;

typedef struct {
  cl_device_id id;
  stream first; /* the default stream */
  uint64_t total, used;
} device;

/* Of the last record; NULL: done from the start. */
typedef struct {
  cl_event recorded;
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static device devices[MAX_DEVICES];
static int num_devices = -1; /* not opened */
static cl_context shared;
static const anychip_host* host;
static _Thread_local char message[512];

anychip_status fail(anychip_status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return status;
}

static const char* last_error(void) { return message; }

anychip_status checked(cl_int error, const char* what) {
  switch (error) {
    case CL_SUCCESS:
      return ANYCHIP_OK;
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
    case CL_OUT_OF_RESOURCES:
    case CL_OUT_OF_HOST_MEMORY:
    case CL_INVALID_BUFFER_SIZE:
      return fail(ANYCHIP_ENOMEM, "%s: no memory (OpenCL error %d)", what, (int)error);
    default:
      return fail(ANYCHIP_EDEVICE, "%s: OpenCL error %d", what, (int)error);
  }
}

cl_context context(void) { return shared; }

/* ------------------------------------------------------------------- which devices there are */

/* Whether a setting, a number or a part of the name, means this one. */
static int is_meant(const char* setting, cl_uint number, const char* name) {
  char* end;
  unsigned long wanted;
  if (!setting || !*setting) return 1;
  wanted = strtoul(setting, &end, 10);
  return *end ? strstr(name, setting) != NULL : wanted == number;
}

/* The devices that are meant, of the first platform that has one. */
static int find_devices(cl_device_id found[MAX_DEVICES]) {
  cl_platform_id platforms[MAX_DEVICES];
  cl_device_id all[MAX_DEVICES];
  cl_uint num_platforms = 0, num_all;
  char name[256];
  int count = 0;
  if (clGetPlatformIDs(MAX_DEVICES, platforms, &num_platforms)) return 0;
  for (cl_uint p = 0; p < num_platforms && p < MAX_DEVICES && !count; ++p) {
    clGetPlatformInfo(platforms[p], CL_PLATFORM_NAME, sizeof name, name, NULL);
    if (!is_meant(getenv("OPENCL_PLATFORM"), p, name)) continue;
    if (clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ALL, MAX_DEVICES, all, &num_all)) continue;
    for (cl_uint d = 0; d < num_all && d < MAX_DEVICES; ++d) {
      clGetDeviceInfo(all[d], CL_DEVICE_NAME, sizeof name, name, NULL);
      if (is_meant(getenv("OPENCL_DEVICE"), d, name)) found[count++] = all[d];
    }
  }
  return count;
}

typedef struct {
  int count;
  anychip_device_properties of[MAX_DEVICES];
} survey;

static void look(survey* seen) {
  cl_device_id ids[MAX_DEVICES];
  seen->count = find_devices(ids);
  for (int d = 0; d < seen->count; ++d) {
    anychip_device_properties* known = &seen->of[d];
    char name[256] = "";
    cl_ulong total = 0;
    cl_uint units = 0, bits = 0;
    clGetDeviceInfo(ids[d], CL_DEVICE_NAME, sizeof name, name, NULL);
    clGetDeviceInfo(ids[d], CL_DEVICE_GLOBAL_MEM_SIZE, sizeof total, &total, NULL);
    clGetDeviceInfo(ids[d], CL_DEVICE_MAX_COMPUTE_UNITS, sizeof units, &units, NULL);
    clGetDeviceInfo(ids[d], CL_DEVICE_MEM_BASE_ADDR_ALIGN, sizeof bits, &bits, NULL);
    snprintf(known->name, sizeof known->name, "%.63s", name);
    known->total_memory = total;
    known->dtypes = 1u << ANYCHIP_FLOAT32;
    known->compute_units = units;
    known->alignment = bits / 8;
  }
}

/* A driver may start threads when it is asked for its devices, and PoCL does: a process that forks
 * afterwards would be without them in the child. So a child asks. */
static int look_in_child(survey* seen) {
  int ends[2];
  ssize_t got = 0, n = 1;
  pid_t child;
  if (pipe(ends)) return 0;
  child = fork();
  if (child == 0) {
    look(seen);
    n = write(ends[1], seen, sizeof *seen);
    _exit(n != (ssize_t)sizeof *seen);
  }
  close(ends[1]);
  while (n > 0 && got < (ssize_t)sizeof *seen)
    if ((n = read(ends[0], (char*)seen + got, sizeof *seen - (size_t)got)) > 0) got += n;
  close(ends[0]);
  if (child > 0) waitpid(child, NULL, 0);
  return got == (ssize_t)sizeof *seen;
}

static const survey* surveyed(void) {
  static survey seen;
  static int is_known;
  pthread_mutex_lock(&lock);
  if (!is_known && !look_in_child(&seen)) seen.count = 0;
  is_known = 1;
  pthread_mutex_unlock(&lock);
  return &seen;
}

static anychip_status device_count(int32_t* count) {
  *count = surveyed()->count;
  return ANYCHIP_OK;
}

static anychip_status device_properties(int32_t index, anychip_device_properties* properties) {
  anychip_device_properties known;
  const survey* seen = surveyed();
  uint32_t size = properties->struct_size;
  if (index < 0 || index >= seen->count) return fail(ANYCHIP_EINVAL, "no device %d", (int)index);
  known = seen->of[index];
  known.struct_size = size < sizeof known ? size : (uint32_t)sizeof known;
  memcpy(properties, &known, known.struct_size);
  return ANYCHIP_OK;
}

/* ------------------------------------------------------------------------------------ opening */

static cl_int open_queue(int d, stream* made) {
  cl_int error;
  memset(made, 0, sizeof *made);
  made->queue = clCreateCommandQueue(shared, devices[d].id, CL_QUEUE_PROFILING_ENABLE, &error);
  return error;
}

static anychip_status open_locked(void) {
  cl_device_id ids[MAX_DEVICES];
  cl_int error;
  int count = find_devices(ids);
  if (!count) return fail(ANYCHIP_EDEVICE, "OpenCL finds no device");
  shared = clCreateContext(NULL, (cl_uint)count, ids, NULL, NULL, &error);
  for (int d = 0; d < count && !error; ++d) {
    cl_ulong total = 0;
    devices[d].id = ids[d];
    clGetDeviceInfo(ids[d], CL_DEVICE_GLOBAL_MEM_SIZE, sizeof total, &total, NULL);
    devices[d].total = total;
    error = open_queue(d, &devices[d].first);
  }
  if (!error) num_devices = count;
  return checked(error, "opening the platform");
}

anychip_status open_platform(void) {
  anychip_status status = ANYCHIP_OK;
  pthread_mutex_lock(&lock);
  if (num_devices < 0) status = open_locked();
  pthread_mutex_unlock(&lock);
  return status;
}

/* NULL after fail(): the platform does not open, or has no such device. */
static device* opened(int32_t index) {
  if (open_platform()) return NULL;
  if (index >= 0 && index < num_devices) return &devices[index];
  fail(ANYCHIP_EINVAL, "no device %d", (int)index);
  return NULL;
}

static stream* stream_of(int32_t index, anychip_stream handle) {
  device* of = opened(index);
  if (!of) return NULL;
  return handle ? (stream*)(uintptr_t)handle : &of->first;
}

cl_command_queue queue_for(int32_t index, anychip_stream handle) {
  stream* on = stream_of(index, handle);
  if (on) __atomic_fetch_add(&on->queued, 1, __ATOMIC_RELAXED);
  return on ? on->queue : NULL;
}

cl_program build(const char* source) {
  cl_int error;
  char text[400] = "";
  cl_program made = clCreateProgramWithSource(shared, 1, &source, NULL, &error);
  if (error) return checked(error, "clCreateProgramWithSource"), NULL;
  error = clBuildProgram(made, 0, NULL, "-cl-std=CL1.2", NULL, NULL);
  if (!error) return made;
  clGetProgramBuildInfo(made, devices[0].id, CL_PROGRAM_BUILD_LOG, sizeof text - 1, text, NULL);
  if (!*text) checked(error, "clBuildProgram");
  if (*text) fail(ANYCHIP_EDEVICE, "the kernels do not compile: %s", text);
  if (host->log) host->log(2, message);
  return NULL;
}

/* ------------------------------------------------------------------------------------- memory */

static cl_mem buffer(anychip_memory memory) { return (cl_mem)(uintptr_t)memory; }

static anychip_status mem_alloc(int32_t index, uint64_t nbytes, anychip_memory* memory) {
  device* of = opened(index);
  cl_int error = CL_INVALID_BUFFER_SIZE;
  int fits;
  if (!of) return ANYCHIP_EDEVICE;
  pthread_mutex_lock(&lock);
  fits = nbytes <= of->total - of->used;
  if (fits) of->used += nbytes;
  pthread_mutex_unlock(&lock);
  if (fits) {
    *memory = (uintptr_t)clCreateBuffer(shared, CL_MEM_READ_WRITE, nbytes, NULL, &error);
    if (!error) return ANYCHIP_OK;
    pthread_mutex_lock(&lock);
    of->used -= nbytes;
    pthread_mutex_unlock(&lock);
  }
  return checked(error, "mem_alloc");
}

static anychip_status mem_free(int32_t index, anychip_memory memory) {
  device* of = opened(index);
  size_t nbytes = 0;
  if (!of) return ANYCHIP_EDEVICE;
  clGetMemObjectInfo(buffer(memory), CL_MEM_SIZE, sizeof nbytes, &nbytes, NULL);
  pthread_mutex_lock(&lock);
  of->used -= nbytes;
  pthread_mutex_unlock(&lock);
  return checked(clReleaseMemObject(buffer(memory)), "mem_free");
}

static anychip_status host_to_device(int32_t index, anychip_memory target, int64_t offset,
                                     const void* source, uint64_t nbytes, anychip_stream on) {
  cl_command_queue queue = queue_for(index, on);
  if (!queue) return ANYCHIP_EDEVICE;
  return checked(clEnqueueWriteBuffer(queue, buffer(target), CL_FALSE, (size_t)offset, nbytes,
                                      source, 0, NULL, NULL),
                 "clEnqueueWriteBuffer");
}

static anychip_status device_to_host(int32_t index, void* target, anychip_memory source,
                                     int64_t offset, uint64_t nbytes, anychip_stream on) {
  cl_command_queue queue = queue_for(index, on);
  if (!queue) return ANYCHIP_EDEVICE;
  return checked(clEnqueueReadBuffer(queue, buffer(source), CL_FALSE, (size_t)offset, nbytes,
                                     target, 0, NULL, NULL),
                 "clEnqueueReadBuffer");
}

/* OpenCL refuses ranges that overlap: those go by way of a buffer of their own. */
static anychip_status device_to_device(int32_t index, anychip_memory target, int64_t to,
                                       anychip_memory source, int64_t from, uint64_t nbytes,
                                       anychip_stream on) {
  cl_command_queue queue = queue_for(index, on);
  int64_t apart = to < from ? from - to : to - from;
  cl_mem between;
  cl_int error;
  if (!queue) return ANYCHIP_EDEVICE;
  if (target != source || (uint64_t)apart >= nbytes)
    return checked(clEnqueueCopyBuffer(queue, buffer(source), buffer(target), (size_t)from,
                                       (size_t)to, nbytes, 0, NULL, NULL),
                   "clEnqueueCopyBuffer");
  between = clCreateBuffer(shared, CL_MEM_READ_WRITE, nbytes, NULL, &error);
  if (error) return checked(error, "device_to_device");
  error =
      clEnqueueCopyBuffer(queue, buffer(source), between, (size_t)from, 0, nbytes, 0, NULL, NULL);
  if (!error)
    error =
        clEnqueueCopyBuffer(queue, between, buffer(target), 0, (size_t)to, nbytes, 0, NULL, NULL);
  clReleaseMemObject(between); /* freed when the copies are over */
  return checked(error, "clEnqueueCopyBuffer");
}

/* -------------------------------------------------------------------------- streams and events */

/* OpenCL has no priorities before version 2: all queues are alike. */
static anychip_status stream_create(int32_t index, int32_t priority, anychip_stream* made) {
  device* of = opened(index);
  stream* own = of ? malloc(sizeof *own) : NULL;
  cl_int error;
  (void)priority;
  if (!own) return of ? fail(ANYCHIP_ENOMEM, "no memory on the host") : ANYCHIP_EDEVICE;
  error = open_queue(index, own);
  if (error) return free(own), checked(error, "clCreateCommandQueue");
  pthread_mutex_lock(&lock);
  own->other = of->first.other;
  of->first.other = own;
  pthread_mutex_unlock(&lock);
  *made = (uintptr_t)own;
  return ANYCHIP_OK;
}

static anychip_status stream_destroy(int32_t index, anychip_stream handle) {
  stream* own = stream_of(index, handle);
  cl_int error;
  if (!own || !handle) return fail(ANYCHIP_EINVAL, "no stream that could be destroyed");
  pthread_mutex_lock(&lock);
  for (stream* s = &devices[index].first; s; s = s->other)
    if (s->other == own) s->other = own->other;
  pthread_mutex_unlock(&lock);
  clFlush(own->queue);
  if (own->marker) clReleaseEvent(own->marker);
  error = clReleaseCommandQueue(own->queue);
  free(own);
  return checked(error, "clReleaseCommandQueue");
}

static anychip_status stream_synchronize(int32_t index, anychip_stream handle) {
  stream* on = stream_of(index, handle);
  uint64_t queued;
  cl_int error;
  if (!on) return ANYCHIP_EDEVICE;
  queued = __atomic_load_n(&on->queued, __ATOMIC_RELAXED);
  error = clFinish(on->queue);
  pthread_mutex_lock(&lock);
  if (!error && on->finished < queued) on->finished = queued;
  pthread_mutex_unlock(&lock);
  return checked(error, "clFinish");
}

/* Whether an event is over; the status of work that failed. */
static anychip_status is_over(cl_event of, int32_t* done) {
  cl_int state = CL_QUEUED;
  cl_int error = clGetEventInfo(of, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL);
  *done = state == CL_COMPLETE;
  return checked(error ? error : state < 0 ? state : CL_SUCCESS, "work on a queue");
}

static anychip_status stream_query(int32_t index, anychip_stream handle, int32_t* done) {
  stream* on = stream_of(index, handle);
  anychip_status status = ANYCHIP_OK;
  if (!on) return ANYCHIP_EDEVICE;
  pthread_mutex_lock(&lock);
  uint64_t queued = __atomic_load_n(&on->queued, __ATOMIC_RELAXED);
  cl_int error = CL_SUCCESS;
  *done = on->finished == queued;
  if (!*done && (!on->marker || on->marked != queued)) {
    if (on->marker) clReleaseEvent(on->marker);
    on->marker = NULL;
    on->marked = queued;
    error = clEnqueueMarkerWithWaitList(on->queue, 0, NULL, &on->marker);
    if (!error) error = clFlush(on->queue);
  }
  if (!*done) status = error ? checked(error, "stream_query") : is_over(on->marker, done);
  pthread_mutex_unlock(&lock);
  return status;
}

static anychip_status event_create(int32_t index, anychip_event* made) {
  event* own = opened(index) ? calloc(1, sizeof *own) : NULL;
  if (!own) return fail(ANYCHIP_ENOMEM, "no event");
  *made = (uintptr_t)own;
  return ANYCHIP_OK;
}

static event* event_of(anychip_event handle) { return (event*)(uintptr_t)handle; }

/* What was recorded last, held for the caller, who releases it. NULL: nothing was. */
static cl_event recorded(anychip_event handle) {
  cl_event found;
  pthread_mutex_lock(&lock);
  found = event_of(handle)->recorded;
  if (found) clRetainEvent(found);
  pthread_mutex_unlock(&lock);
  return found;
}

static anychip_status event_destroy(int32_t index, anychip_event handle) {
  (void)index;
  if (event_of(handle)->recorded) clReleaseEvent(event_of(handle)->recorded);
  free(event_of(handle));
  return ANYCHIP_OK;
}

static anychip_status event_record(int32_t index, anychip_event handle, anychip_stream on) {
  cl_command_queue queue = queue_for(index, on);
  cl_event marker = NULL, before;
  cl_int error;
  if (!queue) return ANYCHIP_EDEVICE;
  error = clEnqueueMarkerWithWaitList(queue, 0, NULL, &marker);
  /* Another queue that waits for it would wait forever for what was never handed over. */
  if (!error) error = clFlush(queue);
  if (error) return checked(error, "event_record");
  pthread_mutex_lock(&lock);
  before = event_of(handle)->recorded;
  event_of(handle)->recorded = marker;
  pthread_mutex_unlock(&lock);
  if (before) clReleaseEvent(before);
  return ANYCHIP_OK;
}

static anychip_status event_wait(int32_t index, anychip_event handle, anychip_stream on) {
  cl_command_queue queue = queue_for(index, on);
  cl_event marker = recorded(handle);
  cl_int error = CL_SUCCESS;
  if (marker && queue) error = clEnqueueBarrierWithWaitList(queue, 1, &marker, NULL);
  if (marker) clReleaseEvent(marker);
  return queue ? checked(error, "event_wait") : ANYCHIP_EDEVICE;
}

static anychip_status event_synchronize(int32_t index, anychip_event handle) {
  cl_event marker = recorded(handle);
  cl_int error = marker ? clWaitForEvents(1, &marker) : CL_SUCCESS;
  (void)index;
  if (marker) clReleaseEvent(marker);
  return checked(error, "clWaitForEvents");
}

static anychip_status event_query(int32_t index, anychip_event handle, int32_t* done) {
  cl_event marker = recorded(handle);
  anychip_status status = ANYCHIP_OK;
  (void)index;
  *done = 1;
  if (!marker) return ANYCHIP_OK;
  status = is_over(marker, done);
  clReleaseEvent(marker);
  return status;
}

static anychip_status event_elapsed(int32_t index, anychip_event start, anychip_event end,
                                    double* milliseconds) {
  cl_event events[2] = {recorded(start), recorded(end)};
  cl_ulong times[2] = {0, 0};
  cl_int error = events[0] && events[1] ? CL_SUCCESS : CL_INVALID_EVENT;
  (void)index;
  for (int i = 0; i < 2; ++i) {
    if (!error)
      error = clGetEventProfilingInfo(events[i], CL_PROFILING_COMMAND_END, sizeof times[i],
                                      &times[i], NULL);
    if (events[i]) clReleaseEvent(events[i]);
  }
  *milliseconds = ((double)times[1] - (double)times[0]) * 1e-6;
  return checked(error, "event_elapsed");
}

/* Waits for every queue; outside the lock, since that takes long. */
static anychip_status device_synchronize(int32_t index) {
  cl_command_queue queues[256];
  device* of = opened(index);
  int count = 0;
  cl_int error = CL_SUCCESS;
  if (!of) return ANYCHIP_EDEVICE;
  pthread_mutex_lock(&lock);
  for (stream* s = &of->first; s && count < 256; s = s->other) {
    clRetainCommandQueue(s->queue);
    queues[count++] = s->queue;
  }
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < count; ++i) {
    cl_int found = clFinish(queues[i]);
    if (!error) error = found;
    clReleaseCommandQueue(queues[i]);
  }
  return checked(error, "clFinish");
}

/* ----------------------------------------------------------------------------- the one symbol */

static const anychip_library library = {
    .struct_size = sizeof(anychip_library),
    .abi_major = ANYCHIP_ABI_MAJOR,
    .abi_minor = ANYCHIP_ABI_MINOR,
    .name = "opencl",
    .version = "opencl 1.0",
    .last_error = last_error,
    .device_count = device_count,
    .device_properties = device_properties,
    .device_synchronize = device_synchronize,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .host_to_device = host_to_device,
    .device_to_host = device_to_host,
    .device_to_device = device_to_device,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_synchronize = stream_synchronize,
    .stream_query = stream_query,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_synchronize = event_synchronize,
    .event_query = event_query,
    .event_elapsed = event_elapsed,
    .operators = operator_names,
    .find_operator = find_operator,
};

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  if (abi_major != ANYCHIP_ABI_MAJOR) return ANYCHIP_ENOTSUP;
  host = given;
  *found = &library;
  return ANYCHIP_OK;
}
