/* asyncchip: a chip whose work is really asynchronous, in memory of this process. Each stream is a
 * thread that waits a little, at random, before some pieces of work, so that what is read too soon
 * is read before it is there. No address of the host's leads to device memory: a handle is one that
 * traps when it is touched, contents lie elsewhere, new ones are all ones (NaN), and there is an
 * unmapped page behind the last byte. Whoever frees what queued work still uses is told so. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <anychip/abi.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { NUM_DEVICES = 2, NUM_MEMORIES = 1 << 16, NUM_STREAMS = 256, NUM_EVENTS = 1 << 16 };
enum { PAGE = 4096, ALIGNMENT = 256, POISONED = 1 << 20 };
static const uint64_t TOTAL = (uint64_t)1 << 30; /* bytes of each device */

typedef struct stream stream;
typedef struct {
  stream* on; /* NULL: reached from the start */
  uint64_t position;
} point;

typedef struct {
  int32_t is_used;
  int32_t device;
  uint64_t nbytes; /* rounded up to ALIGNMENT */
  char* contents;
} memory;

typedef struct {
  int32_t is_used;
  point at;
  double milliseconds; /* when it was reached */
} event;

/* A piece of work. The result comes first, then arguments. */
typedef struct task {
  struct task* next;
  void (*run)(const struct task*);
  anychip_tensor tensor[3];
  char* data[3];
  char* scratch;
  void* host;
  uint64_t nbytes;
  double number;
  char pattern[16];
  char sign;
  point until;
  event* stamped;
  int32_t fails;
} task;

struct stream {
  int32_t is_used, is_ending, device;
  task *first, *last;    /* the first stays here while it runs */
  uint64_t queued, done; /* pieces of work; they only grow */
  uint32_t random;
  pthread_cond_t work, progress;
};

/* All state is under one lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static memory memories[NUM_MEMORIES];
static stream streams[NUM_STREAMS]; /* the first ones are the devices' default streams */
static event events[NUM_EVENTS];
static char* trap; /* one page per memory */
static uint64_t used[NUM_DEVICES];
static int has_failed[NUM_DEVICES];
static unsigned delay_us, seed;
static int is_held, next_status, num_calls, num_misuses;
static const anychip_host* host;
static _Thread_local char message[128];

static anychip_status fail(anychip_status status, const char* text) {
  snprintf(message, sizeof message, "%s", text);
  return status;
}

static const char* last_error(void) { return message; }

static int is_device(int32_t device) { return device >= 0 && device < NUM_DEVICES; }

/* Settings: the longest delay in microseconds, and what delays are drawn from. */
static void start(void) {
  const char *longest = getenv("ASYNCCHIP_DELAY_US"), *drawn = getenv("ASYNCCHIP_SEED");
  delay_us = longest ? (unsigned)strtoul(longest, NULL, 10) : 200;
  seed = drawn ? (unsigned)strtoul(drawn, NULL, 10) : 0;
  trap = mmap(NULL, (size_t)NUM_MEMORIES * PAGE, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* ---------------------------------------------------------------------------------- for tests */

/* While `on`, streams take no work, but for the default ones. */
void asyncchip_hold(int on) {
  pthread_mutex_lock(&lock);
  is_held = on;
  for (int i = 0; i < NUM_STREAMS; ++i)
    if (streams[i].is_used) pthread_cond_broadcast(&streams[i].work);
  pthread_mutex_unlock(&lock);
}

/* What the next operator gives; ANYCHIP_EDEVICE: when its work is done, and from then on. */
void asyncchip_fail(int status) {
  pthread_mutex_lock(&lock);
  next_status = status;
  pthread_mutex_unlock(&lock);
}

static int counted(const int* count) {
  pthread_mutex_lock(&lock);
  const int found = *count;
  pthread_mutex_unlock(&lock);
  return found;
}

/* How many operators were queued, and how often what was in use, or nobody's, was freed. */
int asyncchip_calls(void) { return counted(&num_calls); }
int asyncchip_misuses(void) { return counted(&num_misuses); }

/* ------------------------------------------------------------------------------------ streams */

static void wait_for(point until) { /* under the lock */
  while (until.on && until.on->done < until.position) pthread_cond_wait(&until.on->progress, &lock);
}

static void delay(stream* s) { /* before a quarter of the work */
  s->random = s->random * 1664525u + 1013904223u;
  if (!delay_us || s->random >> 30) return;
  const long microseconds = (long)((s->random >> 8) % delay_us);
  nanosleep(&(struct timespec){microseconds / 1000000, microseconds % 1000000 * 1000}, NULL);
}

static void* work(void* given) {
  stream* s = given;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (s->first ? is_held && s >= streams + NUM_DEVICES : !s->is_ending)
      pthread_cond_wait(&s->work, &lock);
    task* t = s->first;
    if (!t) break;
    wait_for(t->until);
    pthread_mutex_unlock(&lock);
    delay(s);
    if (t->run) t->run(t);
    pthread_mutex_lock(&lock);
    has_failed[s->device] |= t->fails;
    ++s->done;
    if (t->stamped && t->stamped->at.on == s && t->stamped->at.position == s->done) {
      struct timespec now;
      clock_gettime(CLOCK_MONOTONIC, &now);
      t->stamped->milliseconds = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    }
    s->first = t->next;
    free(t);
    pthread_cond_broadcast(&s->progress);
  }
  s->is_used = s->is_ending = 0;
  pthread_mutex_unlock(&lock);
  return NULL;
}

static int began(stream* s, int32_t device) { /* under the lock */
  pthread_t thread;
  pthread_cond_init(&s->work, NULL);
  if (!s->queued) pthread_cond_init(&s->progress, NULL); /* else somebody may still wait there */
  s->device = device;
  s->random = seed + 7919u * (unsigned)(s - streams);
  if (pthread_create(&thread, NULL, work, s)) return 0;
  pthread_detach(thread);
  return s->is_used = 1;
}

static stream* find_stream(int32_t device, anychip_stream handle) { /* under the lock */
  stream* s = handle ? streams + handle : streams + device;
  if (!is_device(device) || handle >= NUM_STREAMS) return NULL;
  if (!handle && !s->is_used && !began(s, device)) return NULL;
  return s->is_used && !s->is_ending && s->device == device ? s : NULL;
}

/* Takes the task over. */
static anychip_status queue(int32_t device, anychip_stream handle, task* t) {
  if (!t) return fail(ANYCHIP_ENOMEM, "the host's memory is full");
  pthread_mutex_lock(&lock);
  stream* s = find_stream(device, handle);
  if (s) {
    s->last = s->first ? (s->last->next = t) : (s->first = t);
    ++s->queued;
    if (t->stamped) t->stamped->at = (point){s, s->queued};
    pthread_cond_signal(&s->work);
  }
  pthread_mutex_unlock(&lock);
  if (s) return ANYCHIP_OK;
  free(t);
  return fail(ANYCHIP_EINVAL, "no such stream on the device");
}

static anychip_status health(int32_t device) { /* under the lock */
  return has_failed[device] ? fail(ANYCHIP_EDEVICE, "the kernel hit a wall") : ANYCHIP_OK;
}

static anychip_status stream_create(int32_t device, int32_t priority, anychip_stream* handle) {
  (void)priority;
  pthread_once(&once, start);
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  pthread_mutex_lock(&lock);
  int i = NUM_DEVICES;
  while (i < NUM_STREAMS && streams[i].is_used) ++i;
  const int is_there = i < NUM_STREAMS && began(streams + i, device);
  pthread_mutex_unlock(&lock);
  *handle = (anychip_stream)i;
  return is_there ? ANYCHIP_OK : fail(ANYCHIP_ENOMEM, "there are no more streams");
}

/* Ends the stream, asks it, or waits for it. */
static anychip_status with_stream(int32_t device, anychip_stream handle, int ends, int32_t* done) {
  anychip_status status = fail(ANYCHIP_EINVAL, "no such stream on the device");
  pthread_once(&once, start);
  pthread_mutex_lock(&lock);
  stream* s = find_stream(device, handle);
  if (s) {
    s->is_ending = ends;
    if (ends) pthread_cond_signal(&s->work);
    if (done) *done = s->done == s->queued;
    if (!ends && !done) wait_for((point){s, s->queued});
    status = ends ? ANYCHIP_OK : health(device);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static anychip_status stream_destroy(int32_t device, anychip_stream handle) {
  if (!handle) return fail(ANYCHIP_EINVAL, "the default stream is nobody's");
  return with_stream(device, handle, 1, NULL);
}

static anychip_status stream_synchronize(int32_t device, anychip_stream handle) {
  return with_stream(device, handle, 0, NULL);
}

static anychip_status stream_query(int32_t device, anychip_stream handle, int32_t* done) {
  return with_stream(device, handle, 0, done);
}

static anychip_status device_synchronize(int32_t device) {
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  pthread_mutex_lock(&lock);
  for (stream* s = streams; s < streams + NUM_STREAMS; ++s)
    if (s->is_used && s->device == device) wait_for((point){s, s->queued});
  const anychip_status status = health(device);
  pthread_mutex_unlock(&lock);
  return status;
}

/* ------------------------------------------------------------------------------------- events */

static anychip_status event_create(int32_t device, anychip_event* handle) {
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  static uint64_t latest; /* a number comes again as late as can be */
  pthread_once(&once, start);
  pthread_mutex_lock(&lock);
  int tries = 0;
  do latest = latest % (NUM_EVENTS - 1) + 1;
  while (events[latest].is_used && ++tries < NUM_EVENTS);
  events[latest] = (event){.is_used = 1};
  *handle = latest;
  pthread_mutex_unlock(&lock);
  return tries < NUM_EVENTS ? ANYCHIP_OK : fail(ANYCHIP_ENOMEM, "there are no more events");
}

/* The event, or NULL and what last_error has to say; under the lock. */
static event* find_event(anychip_event handle) {
  if (handle < NUM_EVENTS && events[handle].is_used) return events + handle;
  fail(ANYCHIP_EINVAL, "no such event");
  return NULL;
}

static anychip_status event_destroy(int32_t device, anychip_event handle) {
  (void)device;
  pthread_mutex_lock(&lock);
  event* e = find_event(handle);
  if (e) e->is_used = 0;
  pthread_mutex_unlock(&lock);
  return e ? ANYCHIP_OK : ANYCHIP_EINVAL;
}

static anychip_status event_record(int32_t device, anychip_event handle, anychip_stream on) {
  task* t = calloc(1, sizeof *t);
  pthread_mutex_lock(&lock);
  event* e = find_event(handle);
  pthread_mutex_unlock(&lock);
  if (!e || !t) return free(t), ANYCHIP_EINVAL;
  t->stamped = e;
  return queue(device, on, t);
}

static anychip_status event_wait(int32_t device, anychip_event handle, anychip_stream on) {
  task* t = calloc(1, sizeof *t);
  pthread_mutex_lock(&lock);
  event* e = find_event(handle);
  if (e && t) t->until = e->at;
  pthread_mutex_unlock(&lock);
  return e ? queue(device, on, t) : (free(t), ANYCHIP_EINVAL);
}

static anychip_status event_synchronize(int32_t device, anychip_event handle) {
  anychip_status status = ANYCHIP_EINVAL;
  pthread_mutex_lock(&lock);
  event* e = find_event(handle);
  if (e) wait_for(e->at), status = health(device);
  pthread_mutex_unlock(&lock);
  return status;
}

static anychip_status event_query(int32_t device, anychip_event handle, int32_t* done) {
  anychip_status status = ANYCHIP_EINVAL;
  pthread_mutex_lock(&lock);
  event* e = find_event(handle);
  if (e) *done = !e->at.on || e->at.on->done >= e->at.position, status = health(device);
  pthread_mutex_unlock(&lock);
  return status;
}

static anychip_status event_elapsed(int32_t device, anychip_event start, anychip_event end,
                                    double* milliseconds) {
  (void)device;
  pthread_mutex_lock(&lock);
  event *first = find_event(start), *second = find_event(end);
  if (first && second) *milliseconds = second->milliseconds - first->milliseconds;
  pthread_mutex_unlock(&lock);
  return first && second ? ANYCHIP_OK : ANYCHIP_EINVAL;
}

/* ------------------------------------------------------------------------------------- memory */

static anychip_status device_count(int32_t* count) {
  *count = NUM_DEVICES;
  return ANYCHIP_OK;
}

static anychip_status device_properties(int32_t device, anychip_device_properties* properties) {
  anychip_device_properties known = {.struct_size = properties->struct_size};
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  snprintf(known.name, sizeof known.name, "Asyncchip %d", (int)device);
  known.total_memory = TOTAL;
  known.dtypes = 1u << ANYCHIP_FLOAT32 | 1u << ANYCHIP_FLOAT16 | 1u << ANYCHIP_BFLOAT16;
  known.alignment = ALIGNMENT;
  if (known.struct_size > sizeof known) known.struct_size = sizeof known;
  memcpy(properties, &known, known.struct_size); /* a host that is older knows less */
  return ANYCHIP_OK;
}

static anychip_status mem_info(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes) {
  if (!is_device(device)) return fail(ANYCHIP_EINVAL, "no such device");
  pthread_mutex_lock(&lock);
  *free_bytes = TOTAL - used[device];
  *total_bytes = TOTAL;
  pthread_mutex_unlock(&lock);
  return ANYCHIP_OK;
}

static size_t pages(uint64_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

static char* mapped(size_t nbytes) {
  void* made = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return made == MAP_FAILED ? NULL : made;
}

static anychip_status mem_alloc(int32_t device, uint64_t nbytes, anychip_memory* handle) {
  static unsigned latest; /* a number comes again as late as can be */
  anychip_status status = fail(ANYCHIP_ENOMEM, "the device's memory is full");
  if (!is_device(device) || nbytes == 0) return fail(ANYCHIP_EINVAL, "no device, or no bytes");
  pthread_once(&once, start);
  if (nbytes > TOTAL) return status;
  nbytes = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  pthread_mutex_lock(&lock);
  unsigned tries = 0;
  do latest = (latest + 1) % NUM_MEMORIES;
  while (memories[latest].is_used && ++tries < NUM_MEMORIES);
  char* whole = NULL;
  if (tries < NUM_MEMORIES && nbytes <= TOTAL - used[device]) whole = mapped(pages(nbytes) + PAGE);
  if (whole) {
    mprotect(whole + pages(nbytes), PAGE, PROT_NONE);
    char* contents = whole + pages(nbytes) - nbytes;
    memset(contents, 0xff, nbytes < POISONED ? nbytes : POISONED);
    memories[latest] = (memory){1, device, nbytes, contents};
    used[device] += nbytes;
    *handle = (anychip_memory)(uintptr_t)(trap + (size_t)latest * PAGE);
    status = ANYCHIP_OK;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

/* The memory that a handle means, or NULL; under the lock. */
static memory* find_memory(int32_t device, anychip_memory handle) {
  const uint64_t offset = handle - (uint64_t)(uintptr_t)trap, number = offset / PAGE;
  if (!trap || number >= NUM_MEMORIES || offset % PAGE) return NULL;
  memory* found = memories + number;
  return found->is_used && found->device == device ? found : NULL;
}

/* Whether queued work uses what lies there; under the lock. */
static int is_in_use(const char* address, uint64_t nbytes) {
  for (stream* s = streams; s < streams + NUM_STREAMS; ++s)
    for (task* t = s->first; t; t = t->next) {
      const char* touched[] = {t->data[0], t->data[1], t->data[2], t->scratch, t->host};
      for (int i = 0; i < 5; ++i)
        if (touched[i] >= address && touched[i] < address + nbytes) return 1;
    }
  return 0;
}

static anychip_status mem_free(int32_t device, anychip_memory handle) {
  pthread_mutex_lock(&lock);
  memory* m = find_memory(device, handle);
  const int is_free = m && !is_in_use(m->contents, m->nbytes);
  if (is_free) {
    m->is_used = 0;
    used[device] -= m->nbytes;
    munmap(m->contents + m->nbytes - pages(m->nbytes), pages(m->nbytes) + PAGE);
  }
  num_misuses += !is_free;
  pthread_mutex_unlock(&lock);
  return is_free ? ANYCHIP_OK
                 : fail(ANYCHIP_EINVAL, "memory that is in use, or nobody's, was freed");
}

/* Page-locked memory would be asked of the driver; its size lies in the page before it. */
static anychip_status host_alloc(uint64_t nbytes, void** address) {
  char* made = mapped(PAGE + nbytes);
  if (!made) return fail(ANYCHIP_ENOMEM, "the host's memory is full");
  *(uint64_t*)made = nbytes;
  *address = made + PAGE;
  return ANYCHIP_OK;
}

static anychip_status host_free(void* address) {
  char* made = (char*)address - PAGE;
  pthread_mutex_lock(&lock);
  const int is_busy = is_in_use(address, *(uint64_t*)made);
  num_misuses += is_busy;
  pthread_mutex_unlock(&lock);
  if (is_busy) return fail(ANYCHIP_EINVAL, "host memory that queued copies use was freed");
  munmap(made, PAGE + *(uint64_t*)made);
  return ANYCHIP_OK;
}

/* Where nbytes from the offset on are, or NULL. */
static char* inside(int32_t device, anychip_memory handle, int64_t offset, uint64_t nbytes) {
  pthread_mutex_lock(&lock);
  memory* m = find_memory(device, handle);
  const int fits =
      m && offset >= 0 && (uint64_t)offset <= m->nbytes && nbytes <= m->nbytes - (uint64_t)offset;
  char* found = fits ? m->contents + offset : NULL;
  pthread_mutex_unlock(&lock);
  if (!found)
    fail(ANYCHIP_EINVAL, m ? "beyond the end of the memory" : "no such memory on the device");
  return found;
}

static void run_upload(const task* t) { memcpy(t->data[0], t->host, t->nbytes); }
static void run_download(const task* t) { memcpy(t->host, t->data[0], t->nbytes); }
static void run_move(const task* t) { memmove(t->data[0], t->data[1], t->nbytes); }

static anychip_status copy_bytes(int32_t device, void (*run)(const task*), char* to, char* from,
                                 void* outside, uint64_t nbytes, anychip_stream on) {
  if (!to) return ANYCHIP_EINVAL;
  task* t = calloc(1, sizeof *t);
  if (t) *t = (task){.run = run, .data = {to, from}, .host = outside, .nbytes = nbytes};
  return queue(device, on, t);
}

static anychip_status host_to_device(int32_t device, anychip_memory target, int64_t offset,
                                     const void* source, uint64_t nbytes, anychip_stream on) {
  return copy_bytes(device, run_upload, inside(device, target, offset, nbytes), NULL,
                    (void*)(uintptr_t)source, nbytes, on);
}

static anychip_status device_to_host(int32_t device, void* target, anychip_memory source,
                                     int64_t offset, uint64_t nbytes, anychip_stream on) {
  return copy_bytes(device, run_download, inside(device, source, offset, nbytes), NULL, target,
                    nbytes, on);
}

static anychip_status device_to_device(int32_t device, anychip_memory target, int64_t to,
                                       anychip_memory source, int64_t from, uint64_t nbytes,
                                       anychip_stream on) {
  char *into = inside(device, target, to, nbytes), *of = inside(device, source, from, nbytes);
  return copy_bytes(device, run_move, of ? into : NULL, of, NULL, nbytes, on);
}

/* ---------------------------------------------------------------------------------- operators */

static int itemsize(int32_t dtype) {
  static const signed char sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2};
  if (dtype == ANYCHIP_FLOAT8_E5M2 || dtype == ANYCHIP_FLOAT8_E4M3FN) return 1;
  return dtype >= 0 && dtype < (int32_t)sizeof sizes ? sizes[dtype] : 0;
}

/* Puts a tensor of a call into its task; 0: it is not inside memory of the device. */
static int put(task* t, int i, const anychip_tensor* tensor, int32_t device) {
  int64_t last = 0;
  for (int d = 0; d < tensor->ndim; ++d) {
    if (tensor->size[d] == 0) return t->tensor[i] = *tensor, 1;
    last += (tensor->size[d] - 1) * tensor->stride[d];
  }
  t->tensor[i] = *tensor;
  t->data[i] = inside(device, tensor->memory, tensor->byte_offset,
                      (uint64_t)(last + 1) * (uint64_t)itemsize(tensor->dtype));
  return t->data[i] != NULL;
}

typedef void (*row)(const task* t, char* const* at, const int64_t* step, int64_t n);

/* Visits the elements by rows: n of them, each `step` bytes behind the one before it. */
static void each_row(const task* t, row visit) {
  const anychip_tensor* shape = t->tensor;
  const int last = shape->ndim - 1;
  int64_t index[ANYCHIP_MAX_DIMS] = {0}, step[3];
  for (int d = 0; d <= last; ++d)
    if (shape->size[d] == 0) return;
  for (int i = 0; i < 3; ++i)
    step[i] = last < 0 ? 0 : t->tensor[i].stride[last] * itemsize(t->tensor[i].dtype);
  for (int d = 0; d >= 0;) {
    char* at[3];
    for (int i = 0; i < 3; ++i) {
      int64_t offset = 0;
      for (int k = 0; k < last; ++k) offset += index[k] * t->tensor[i].stride[k];
      at[i] = t->data[i] ? t->data[i] + offset * itemsize(t->tensor[i].dtype) : NULL;
    }
    visit(t, at, step, last < 0 ? 1 : shape->size[last]);
    for (d = last - 1; d >= 0 && ++index[d] == shape->size[d]; --d) index[d] = 0;
  }
}

static double loaded(int32_t dtype, const char* at) {
  float widened;
  uint32_t bits;
  if (dtype == ANYCHIP_FLOAT32) return *(const float*)at;
  if (dtype == ANYCHIP_FLOAT64) return *(const double*)at;
  if (dtype == ANYCHIP_BOOL) return *at;
  bits = (uint32_t)*(const uint16_t*)at << 16; /* bfloat16 */
  memcpy(&widened, &bits, sizeof bits);
  return widened;
}

static void stored(int32_t dtype, char* at, double value) {
  const float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  if (dtype == ANYCHIP_FLOAT32) *(float*)at = narrow;
  if (dtype == ANYCHIP_FLOAT64) *(double*)at = value;
  if (dtype == ANYCHIP_BOOL) *at = value != 0;
  if (dtype == ANYCHIP_BFLOAT16) /* to the nearest, ties to even */
    *(uint16_t*)at = isnan(narrow) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static int converts(int32_t dtype) {
  return dtype == ANYCHIP_FLOAT32 || dtype == ANYCHIP_FLOAT64 || dtype == ANYCHIP_BOOL ||
         dtype == ANYCHIP_BFLOAT16;
}

static void copy_row(const task* t, char* const* at, const int64_t* step, int64_t n) {
  const int32_t to = t->tensor[0].dtype, from = t->tensor[1].dtype;
  const size_t nbytes = (size_t)itemsize(to);
  if (to == from && step[0] == (int64_t)nbytes && step[1] == (int64_t)nbytes) {
    memcpy(at[0], at[1], (size_t)n * nbytes);
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    if (to == from)
      memcpy(at[0] + i * step[0], at[1] + i * step[1], nbytes);
    else
      stored(to, at[0] + i * step[0], loaded(from, at[1] + i * step[1]));
}

static void fill_row(const task* t, char* const* at, const int64_t* step, int64_t n) {
  const size_t nbytes = (size_t)itemsize(t->tensor[0].dtype);
  for (int64_t i = 0; i < n; ++i) memcpy(at[0] + i * step[0], t->pattern, nbytes);
}

static void binary_row(const task* t, char* const* at, const int64_t* step, int64_t n) {
  const float alpha = (float)t->number;
  for (int64_t i = 0; i < n; ++i) {
    const float a = *(float*)(at[1] + i * step[1]), b = *(float*)(at[2] + i * step[2]);
    *(float*)(at[0] + i * step[0]) = t->sign == '*' ? a * b : a + alpha * b;
  }
}

static void ge_row(const task* t, char* const* at, const int64_t* step, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    *(uint8_t*)(at[0] + i * step[0]) = *(float*)(at[1] + i * step[1]) >= t->number;
}

static void run_copy(const task* t) { each_row(t, copy_row); }
static void run_fill(const task* t) { each_row(t, fill_row); }
static void run_binary(const task* t) { each_row(t, binary_row); }
static void run_ge(const task* t) { each_row(t, ge_row); }

static void run_mm(const task* t) {
  const anychip_tensor *r = t->tensor, *a = r + 1, *b = r + 2;
  double* sums = (double*)t->scratch;
  for (int64_t i = 0; i < r->size[0]; ++i) {
    memset(sums, 0, (size_t)r->size[1] * sizeof *sums);
    for (int64_t k = 0; k < a->size[1]; ++k) {
      const double x = ((float*)t->data[1])[i * a->stride[0] + k * a->stride[1]];
      const float* y = (float*)t->data[2] + k * b->stride[0];
      for (int64_t j = 0; j < r->size[1]; ++j) sums[j] += x * y[j * b->stride[1]];
    }
    for (int64_t j = 0; j < r->size[1]; ++j)
      ((float*)t->data[0])[i * r->stride[0] + j * r->stride[1]] = (float)sums[j];
  }
}

/* Queues an operator of one result and tensors; all of it is known to be served. */
static anychip_status queue_call(const anychip_call* call, task like, const anychip_tensor* result,
                                 const anychip_tensor* a, const anychip_tensor* b) {
  pthread_mutex_lock(&lock);
  const int status = next_status;
  next_status = ANYCHIP_OK;
  ++num_calls;
  pthread_mutex_unlock(&lock);
  if (status && status != ANYCHIP_EDEVICE) return fail(status, "the kernel hit a wall");
  task* t = malloc(sizeof *t);
  if (!t) return fail(ANYCHIP_ENOMEM, "the host's memory is full");
  *t = like;
  t->fails = status == ANYCHIP_EDEVICE;
  if (!put(t, 0, result, call->device) || (a && !put(t, 1, a, call->device)) ||
      (b && !put(t, 2, b, call->device)))
    return free(t), ANYCHIP_EINVAL;
  return queue(call->device, call->stream, t);
}

static const anychip_tensor* argument(const anychip_call* call, uint32_t i) {
  return call->arguments[i]->v.tensor;
}

static int are_float32(const anychip_tensor* r, const anychip_tensor* a, const anychip_tensor* b) {
  return r->dtype == ANYCHIP_FLOAT32 && a->dtype == r->dtype && b->dtype == r->dtype;
}

static double number(const anychip_argument* given) {
  return given->kind == ANYCHIP_ARG_FLOAT ? given->v.f : (double)given->v.i;
}

static anychip_status copy(const anychip_call* call) {
  const anychip_tensor *r = call->results[0], *a = argument(call, 0);
  const int is_same = r->dtype == a->dtype && itemsize(r->dtype);
  if (!is_same && !(converts(a->dtype) && converts(r->dtype))) return ANYCHIP_ENOTSUP;
  return queue_call(call, (task){.run = run_copy}, r, a, NULL);
}

static anychip_status zero(const anychip_call* call) {
  if (!itemsize(call->results[0]->dtype)) return ANYCHIP_ENOTSUP;
  return queue_call(call, (task){.run = run_fill}, call->results[0], NULL, NULL);
}

static anychip_status fill(const anychip_call* call) {
  task t = {.run = run_fill};
  if (!converts(call->results[0]->dtype)) return ANYCHIP_ENOTSUP;
  stored(call->results[0]->dtype, t.pattern, number(call->arguments[1]));
  return queue_call(call, t, call->results[0], NULL, NULL);
}

static anychip_status binary(const anychip_call* call, char sign, double alpha) {
  const anychip_tensor *r = call->results[0], *a = argument(call, 0), *b = argument(call, 1);
  if (!are_float32(r, a, b)) return ANYCHIP_ENOTSUP;
  return queue_call(call, (task){.run = run_binary, .sign = sign, .number = alpha}, r, a, b);
}

static anychip_status add(const anychip_call* call) {
  return binary(call, '+', number(call->arguments[2]));
}

static anychip_status mul(const anychip_call* call) { return binary(call, '*', 1); }

static anychip_status ge(const anychip_call* call) {
  const anychip_tensor *r = call->results[0], *a = argument(call, 0);
  if (a->dtype != ANYCHIP_FLOAT32 || r->dtype != ANYCHIP_BOOL) return ANYCHIP_ENOTSUP;
  return queue_call(call, (task){.run = run_ge, .number = number(call->arguments[1])}, r, a, NULL);
}

static anychip_status mm(const anychip_call* call) {
  const anychip_tensor *r = call->results[0], *a = argument(call, 0), *b = argument(call, 1);
  const uint64_t nbytes = (uint64_t)r->size[1] * sizeof(double);
  anychip_memory sums;
  if (!are_float32(r, a, b)) return ANYCHIP_ENOTSUP;
  if (host->scratch(call->device, call->stream, nbytes, &sums))
    return fail(ANYCHIP_ENOMEM, "no scratch memory");
  char* scratch = inside(call->device, sums, 0, nbytes);
  if (!scratch) return ANYCHIP_EINVAL;
  return queue_call(call, (task){.run = run_mm, .scratch = scratch}, r, a, b);
}

/* One copy for each tensor of the list. */
static anychip_status cat(const anychip_call* call) {
  const anychip_argument* list = call->arguments[0];
  anychip_tensor part = *call->results[0];
  const int64_t given = call->arguments[1]->v.i, dim = given < 0 ? given + part.ndim : given;
  anychip_status status = ANYCHIP_OK;
  for (uint64_t i = 0; i < list->n; ++i)
    if (list->v.tensors[i]->dtype != part.dtype || list->v.tensors[i]->ndim != part.ndim)
      return ANYCHIP_ENOTSUP;
  for (uint64_t i = 0; i < list->n && !status; ++i) {
    part.size[dim] = list->v.tensors[i]->size[dim];
    status = queue_call(call, (task){.run = run_copy}, &part, list->v.tensors[i], NULL);
    part.byte_offset += part.size[dim] * part.stride[dim] * itemsize(part.dtype);
  }
  return status;
}

static const char* const names[] = {
    "copy", "fill.Scalar", "zero",      "add.Tensor",       "mul.Tensor",
    "mm",   "cat",         "ge.Scalar", "of_a_later_torch", NULL};

static anychip_operator find_operator(const char* name) {
  static const anychip_operator functions[] = {copy, fill, zero, add, mul, mm, cat, ge, NULL};
  for (int i = 0; names[i]; ++i)
    if (!strcmp(name, names[i])) return functions[i];
  return NULL;
}

/* -------------------------------------------------------------------------------- the library */

static const anychip_library library = {
    .struct_size = sizeof(anychip_library),
    .abi_major = ANYCHIP_ABI_MAJOR,
    .abi_minor = ANYCHIP_ABI_MINOR,
    .name = "asyncchip",
    .version = "asyncchip 1.0",
    .last_error = last_error,
    .device_count = device_count,
    .device_properties = device_properties,
    .device_synchronize = device_synchronize,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .host_to_device = host_to_device,
    .device_to_host = device_to_host,
    .device_to_device = device_to_device,
    .mem_info = mem_info,
    .host_alloc = host_alloc,
    .host_free = host_free,
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
    .operators = names,
    .find_operator = find_operator,
};

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  if (abi_major != ANYCHIP_ABI_MAJOR) return ANYCHIP_ENOTSUP;
  host = given;
  *found = &library;
  return ANYCHIP_OK;
}
