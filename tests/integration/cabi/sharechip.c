/* minichip with collectives, for tests: processes of one host share a segment that the unique id
 * names. Each call is a row of rounds, in which every rank publishes a piece and all read; sums are
 * in the order of the ranks. All streams are one queue, which a thread works off. */
#define _DEFAULT_SOURCE
#define anychip_entry minichip_entry
#include "../../../examples/minichip/minichip.c"
#undef anychip_entry
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 4, PIECE = 1 << 16, TASKS = 256, REDUCE = 1, GATHER, BROADCAST, P2P };
/* What rank 1 does wrong, set by the test: 1 refuses after it has written, 2 fails later, 3 hangs,
 * 4 makes another call than the others. */
int sharechip_wrong;
int sharechip_calls; /* collectives that were queued */

typedef struct {
  uint64_t left, call; /* bytes that the rank has still to publish, and what it calls */
  char bytes[PIECE];
} slot;
typedef struct {
  atomic_int joined, aborted, arrived[2];
  atomic_uint phase;
  slot slots[RANKS];
  struct {
    atomic_int full;
    uint64_t nbytes;
    char bytes[PIECE];
  } boxes[RANKS][RANKS]; /* from, to */
} segment;
typedef struct {
  segment* shared;
  int rank, size, error;
} group;
typedef struct {
  int kind, dtype, reduction, root;
  group* g;
  uint64_t count; /* elements of a part */
  char *input, *output;
  int grouped; /* messages that follow and belong together */
} task;

static task tasks[TASKS];
static uint64_t queued, done;
static int failed; /* what waits tell, until the group is destroyed */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_once_t started = PTHREAD_ONCE_INIT;
static _Thread_local task batch[TASKS];
static _Thread_local int in_group, num_batch;

static uint64_t itemsize(int dtype) {
  static const char sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 8, 16, 1};
  return dtype < 12 ? (uint64_t)sizes[dtype] : dtype == ANYCHIP_BFLOAT16 ? 2 : 1;
}

static int is_over(group* g) { return g->error || atomic_load(&g->shared->aborted); }

static void barrier(group* g) {
  unsigned phase = atomic_load(&g->shared->phase);
  if (atomic_fetch_add(&g->shared->arrived[phase % 2], 1) == g->size - 1) {
    atomic_store(&g->shared->arrived[phase % 2], 0);
    atomic_store(&g->shared->phase, phase + 1);
  }
  while (atomic_load(&g->shared->phase) == phase && !is_over(g)) usleep(50);
}

/* Everybody publishes up to a piece; returns whether anybody has more. Who reads calls next(). */
static int publish(group* g, uint64_t call, const char* mine, uint64_t left) {
  slot* own = &g->shared->slots[g->rank];
  int more = 0;
  own->left = left;
  own->call = call;
  if (left) memcpy(own->bytes, mine, left < PIECE ? left : PIECE);
  barrier(g);
  for (int r = 0; r < g->size && !is_over(g); ++r) {
    if (g->shared->slots[r].call != call) g->error = ANYCHIP_EINVAL;
    more |= g->shared->slots[r].left > PIECE;
  }
  return more;
}
#define WORD(nbytes) ((nbytes) < PIECE ? (nbytes) : PIECE)

#define JOIN(type)                                                               \
  for (uint64_t i = 0; i < n / sizeof(type); ++i) {                              \
    type sum = ((type*)g->shared->slots[0].bytes)[i];                            \
    for (int r = 1; r < g->size; ++r) {                                          \
      type x = ((type*)g->shared->slots[r].bytes)[i];                            \
      sum = how == ANYCHIP_MAX   ? (x > sum || x != x ? x : sum)                 \
            : how == ANYCHIP_MIN ? (x < sum || x != x ? x : sum)                 \
                                 : sum + x;                                      \
    }                                                                            \
    ((type*)output)[i] = how == ANYCHIP_AVG ? (type)(sum / (type)g->size) : sum; \
  }
static void join(group* g, int dtype, int how, char* output, uint64_t n) {
  if (dtype == ANYCHIP_FLOAT32)
    JOIN(float)
  else if (dtype == ANYCHIP_FLOAT64)
    JOIN(double)
  else if (dtype == ANYCHIP_INT32)
    JOIN(int32_t)
  else
    JOIN(int64_t)
}

/* One part of each rank, piece by piece; rank `target` (-1: all) gets the reduction. */
static void reduce(task* t, uint64_t call, const char* input, char* output, int target) {
  uint64_t nbytes = t->count * itemsize(t->dtype), at = 0;
  for (int more = 1; more && !is_over(t->g); at += PIECE) {
    more = publish(t->g, call, input + at, nbytes - at);
    if (!is_over(t->g) && (target < 0 || target == t->g->rank))
      join(t->g, t->dtype, t->reduction, output + at, WORD(nbytes - at));
    barrier(t->g);
  }
}

/* What each rank has, of sizes that every rank expects, to places of its own. */
static void collect(group* g, uint64_t call, const char* mine, char** to, const uint64_t* room) {
  for (uint64_t at = 0, more = 1, left = room[g->rank]; more && !is_over(g); at += PIECE) {
    more = (uint64_t)publish(g, call, mine + at, left > at ? left - at : 0);
    for (int r = 0; r < g->size && !is_over(g); ++r) {
      const slot* from = &g->shared->slots[r];
      if (from->left != (room[r] > at ? room[r] - at : 0))
        g->error = ANYCHIP_EINVAL;
      else if (from->left)
        memmove(to[r] + at, from->bytes, WORD(from->left));
    }
    barrier(g);
  }
}

/* Messages that belong together get on in turns. */
static void exchange(task* first, int n) {
  uint64_t at[TASKS] = {0};
  for (int left = n; left && !is_over(first->g);) {
    left = 0;
    for (int i = 0; i < n; ++i) {
      task* t = first + i;
      uint64_t nbytes = t->count * itemsize(t->dtype);
      int is_send = t->reduction, r = t->g->rank;
      __typeof__(t->g->shared->boxes[0][0])* box =
          is_send ? &t->g->shared->boxes[r][t->root] : &t->g->shared->boxes[t->root][r];
      if (at[i] >= nbytes) continue;
      ++left;
      if (atomic_load(&box->full) == is_send) continue;
      if (is_send) {
        box->nbytes = nbytes - at[i];
        memcpy(box->bytes, t->input + at[i], WORD(nbytes - at[i]));
      } else if (box->nbytes != nbytes - at[i]) {
        first->g->error = ANYCHIP_EINVAL;
        return;
      } else {
        memcpy(t->input + at[i], box->bytes, WORD(nbytes - at[i]));
      }
      atomic_store(&box->full, is_send);
      at[i] += PIECE;
    }
    if (left) usleep(50);
  }
}

static void run(task* t) {
  group* g = t->g;
  uint64_t nbytes = t->count * itemsize(t->dtype), rooms[RANKS];
  uint64_t call = (uint64_t)t->kind << 40 | (uint64_t)t->dtype << 32 | (uint64_t)t->reduction << 16;
  char* to[RANKS];
  if (g->rank == 1 && sharechip_wrong == 2) g->error = ANYCHIP_EDEVICE;
  if (g->rank == 1 && sharechip_wrong == 4) ++call;
  while (g->rank == 1 && sharechip_wrong == 3 && !is_over(g)) usleep(1000);
  for (int r = 0; r < g->size; ++r) {
    rooms[r] = t->kind == BROADCAST && r != t->root ? 0 : nbytes;
    to[r] = t->output + (t->kind == GATHER ? (uint64_t)r * nbytes : 0);
  }
  if (t->kind == REDUCE && !t->root) reduce(t, call, t->input, t->output, -1);
  for (int r = 0; t->kind == REDUCE && t->root && r < g->size; ++r)
    reduce(t, call, t->input + (uint64_t)r * nbytes, t->output, r);
  if (t->kind != REDUCE) collect(g, call, t->input, to, rooms);
}

static void* work(void* unused) {
  (void)unused;
  pthread_mutex_lock(&turn);
  for (;;) {
    while (done == queued) pthread_cond_wait(&changed, &turn);
    task* t = &tasks[done % TASKS];
    int n = t->kind == P2P ? t->grouped : 1;
    pthread_mutex_unlock(&turn);
    if (t->kind == P2P)
      exchange(t, n);
    else
      run(t);
    pthread_mutex_lock(&turn);
    if (is_over(t->g) && !failed) failed = t->g->error ? t->g->error : ANYCHIP_EABORTED;
    done += (uint64_t)n;
    pthread_cond_broadcast(&changed);
  }
  return NULL;
}

static void start(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, work, NULL);
  pthread_detach(thread);
}

static anychip_status wait_until(uint64_t position) {
  pthread_mutex_lock(&turn);
  while (done < position) pthread_cond_wait(&changed, &turn);
  anychip_status status = failed ? fail(failed, "a call has failed") : ANYCHIP_OK;
  pthread_mutex_unlock(&turn);
  return status;
}

/* The messages of a batch lie in one row of the ring. */
static anychip_status enqueue(const task* given, int n) {
  if (!n) return ANYCHIP_OK;
  pthread_once(&started, start);
  pthread_mutex_lock(&turn);
  while (queued % TASKS + (uint64_t)n > TASKS || queued + (uint64_t)n - done > TASKS) {
    if (queued != done)
      pthread_cond_wait(&changed, &turn);
    else
      queued = done = (queued / TASKS + 1) * TASKS;
  }
  memcpy(&tasks[queued % TASKS], given, (size_t)n * sizeof *given);
  tasks[queued % TASKS].grouped = n;
  queued += (uint64_t)n;
  ++sharechip_calls;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&turn);
  return ANYCHIP_OK;
}

static anychip_status add(task t, anychip_comm comm, int reduces) {
  t.g = (group*)(uintptr_t)comm;
  if (reduces && t.dtype != ANYCHIP_FLOAT32 && t.dtype != ANYCHIP_FLOAT64 &&
      (t.reduction == ANYCHIP_AVG || (t.dtype != ANYCHIP_INT32 && t.dtype != ANYCHIP_INT64)))
    return fail(ANYCHIP_ENOTSUP, "no reduction of this type");
  if (!t.count) return ANYCHIP_OK;
  if (t.g->rank == 1 && sharechip_wrong == 1) {
    memset(t.output, 0, itemsize(t.dtype));
    return fail(ANYCHIP_ENOTSUP, "now I do not want to");
  }
  if (is_over(t.g)) return fail(ANYCHIP_EABORTED, "the group was aborted");
  if (t.kind == P2P && in_group) return batch[num_batch++] = t, ANYCHIP_OK;
  return enqueue(&t, 1);
}

/* ---------------------------------------------------------------------------- the functions */

static anychip_status unique_id(uint8_t id[ANYCHIP_UNIQUE_ID_BYTES]) {
  static atomic_int number;
  memset(id, 0, ANYCHIP_UNIQUE_ID_BYTES);
  snprintf((char*)id, ANYCHIP_UNIQUE_ID_BYTES, "/sharechip-%d-%d", (int)getpid(), number++);
  return ANYCHIP_OK;
}
static anychip_status comm_init(int32_t device, int32_t size, int32_t rank,
                                const uint8_t id[ANYCHIP_UNIQUE_ID_BYTES], anychip_comm* comm) {
  int file = shm_open((const char*)id, O_RDWR | O_CREAT, 0600);
  group* g = calloc(1, sizeof *g);
  if (!is_device(device) || size > RANKS || file < 0 || ftruncate(file, sizeof(segment)))
    return fail(ANYCHIP_EINVAL, "no device, too many ranks, or no shared memory");
  g->shared = mmap(NULL, sizeof(segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  g->rank = rank;
  g->size = size;
  for (atomic_fetch_add(&g->shared->joined, 1); atomic_load(&g->shared->joined) < size;) usleep(50);
  if (rank == 0) shm_unlink((const char*)id);
  *comm = (anychip_comm)(uintptr_t)g;
  return ANYCHIP_OK;
}
static anychip_status comm_destroy(anychip_comm comm) {
  pthread_mutex_lock(&turn);
  while (done < queued) pthread_cond_wait(&changed, &turn);
  failed = 0;
  pthread_mutex_unlock(&turn);
  munmap(((group*)(uintptr_t)comm)->shared, sizeof(segment));
  free((group*)(uintptr_t)comm);
  return ANYCHIP_OK;
}
static anychip_status comm_abort(anychip_comm comm) {
  atomic_store(&((group*)(uintptr_t)comm)->shared->aborted, 1);
  return ANYCHIP_OK;
}
static anychip_status async_error(anychip_comm comm) {
  int error = ((group*)(uintptr_t)comm)->error;
  return error ? fail(error, "a call has failed") : ANYCHIP_OK;
}
static anychip_status group_start(void) { return in_group = 1, num_batch = 0, ANYCHIP_OK; }
static anychip_status group_end(void) { return in_group = 0, enqueue(batch, num_batch); }

static task task_of(int kind, int32_t dtype, uint64_t count, void* input, void* output) {
  return (task){.kind = kind, .dtype = dtype, .count = count, .input = input, .output = output};
}
#define CALL(name, ...)                                                                        \
  static anychip_status name(anychip_comm c, anychip_memory in, int64_t i, anychip_memory out, \
                             int64_t o, uint64_t n, int32_t dtype, __VA_ARGS__ anychip_stream s)
CALL(all_reduce, int32_t reduction, ) {
  task t = task_of(REDUCE, dtype, n, address(in, i), address(out, o));
  t.reduction = reduction;
  return (void)s, add(t, c, 1);
}
CALL(reduce_scatter, int32_t reduction, ) {
  task t = task_of(REDUCE, dtype, n, address(in, i), address(out, o));
  t.reduction = reduction;
  t.root = 1; /* to each its part */
  return (void)s, add(t, c, 1);
}
CALL(all_gather, ) {
  return (void)s, add(task_of(GATHER, dtype, n, address(in, i), address(out, o)), c, 0);
}
static anychip_status broadcast(anychip_comm c, anychip_memory m, int64_t o, uint64_t n,
                                int32_t dtype, int32_t root, anychip_stream s) {
  task t = task_of(BROADCAST, dtype, n, address(m, o), address(m, o));
  t.root = root;
  return (void)s, add(t, c, 0);
}
static anychip_status message_of(anychip_comm c, anychip_memory m, int64_t o, uint64_t n,
                                 int32_t dtype, int32_t peer, int is_send) {
  task t = task_of(P2P, dtype, n, address(m, o), address(m, o));
  t.root = peer;
  t.reduction = is_send;
  return add(t, c, 0);
}
static anychip_status all_to_all(anychip_comm c, anychip_memory in, const int64_t* in_offsets,
                                 const uint64_t* in_counts, anychip_memory out,
                                 const int64_t* out_offsets, const uint64_t* out_counts,
                                 int32_t dtype, anychip_stream s) {
  anychip_status status = group_start();
  /* A message each way for each rank, itself among them; of none, nothing. */
  for (int r = 0; !status && r < ((group*)(uintptr_t)c)->size; ++r) {
    status = message_of(c, in, in_offsets[r], in_counts[r], dtype, r, 1);
    if (!status) status = message_of(c, out, out_offsets[r], out_counts[r], dtype, r, 0);
  }
  (void)s;
  return status ? status : group_end();
}
static anychip_status send_(anychip_comm c, anychip_memory m, int64_t o, uint64_t n, int32_t dtype,
                            int32_t peer, anychip_stream s) {
  return (void)s, message_of(c, m, o, n, dtype, peer, 1);
}
static anychip_status recv_(anychip_comm c, anychip_memory m, int64_t o, uint64_t n, int32_t dtype,
                            int32_t peer, anychip_stream s) {
  return (void)s, message_of(c, m, o, n, dtype, peer, 0);
}
static const anychip_collectives collectives = {sizeof(anychip_collectives),
                                                0,
                                                unique_id,
                                                comm_init,
                                                comm_destroy,
                                                comm_abort,
                                                async_error,
                                                group_start,
                                                group_end,
                                                all_reduce,
                                                reduce_scatter,
                                                all_gather,
                                                broadcast,
                                                all_to_all,
                                                send_,
                                                recv_};

/* Streams are one queue, events are places in it. Copies wait for it. */
static uint64_t events[4096];
static anychip_status now(void) { return wait_until(queued); }
static anychip_status synchronize(int32_t d) { return (void)d, now(); }
static anychip_status stream_create(int32_t d, int32_t p, anychip_stream* s) {
  return (void)d, (void)p, *s = 1, ANYCHIP_OK;
}
static anychip_status stream_one(int32_t d, uint64_t s) { return (void)d, (void)s, ANYCHIP_OK; }
static anychip_status stream_wait(int32_t d, uint64_t s) { return (void)d, (void)s, now(); }
static anychip_status stream_query(int32_t d, uint64_t s, int32_t* is_done) {
  return (void)d, (void)s, *is_done = done >= queued, ANYCHIP_OK;
}
static anychip_status event_create(int32_t d, anychip_event* e) {
  static atomic_uint next;
  return (void)d, *e = next++ % 4095 + 1, ANYCHIP_OK;
}
static anychip_status event_record(int32_t d, anychip_event e, anychip_stream s) {
  return (void)d, (void)s, events[e] = queued, ANYCHIP_OK;
}
static anychip_status event_wait(int32_t d, anychip_event e, anychip_stream s) {
  return (void)d, (void)e, (void)s, ANYCHIP_OK;
}
static anychip_status event_synchronize(int32_t d, anychip_event e) {
  return (void)d, wait_until(events[e]);
}
static anychip_status event_query(int32_t d, anychip_event e, int32_t* is_done) {
  return (void)d, *is_done = done >= events[e], ANYCHIP_OK;
}
static anychip_status to_device(int32_t d, anychip_memory m, int64_t o, const void* source,
                                uint64_t nbytes, anychip_stream s) {
  anychip_status status = now();
  return status ? status : host_to_device(d, m, o, source, nbytes, s);
}
static anychip_status to_host(int32_t d, void* target, anychip_memory m, int64_t o, uint64_t nbytes,
                              anychip_stream s) {
  anychip_status status = now();
  return status ? status : device_to_host(d, target, m, o, nbytes, s);
}

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  static anychip_library whole;
  anychip_status status = minichip_entry(abi_major, given, found);
  if (status) return status;
  whole = **found;
  whole.name = "sharechip";
  whole.collectives = &collectives;
  whole.device_synchronize = synchronize;
  whole.host_to_device = to_device;
  whole.device_to_host = to_host;
  whole.stream_create = stream_create;
  whole.stream_destroy = whole.event_destroy = stream_one;
  whole.stream_synchronize = stream_wait;
  whole.stream_query = stream_query;
  whole.event_create = event_create;
  whole.event_record = event_record;
  whole.event_wait = event_wait;
  whole.event_synchronize = event_synchronize;
  whole.event_query = event_query;
  *found = &whole;
  return ANYCHIP_OK;
}
