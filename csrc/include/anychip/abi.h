/* What a chip's library provides so that PyTorch trains on it: the C interface, version 1.0.
 *
 * A library is one shared object, in any language, that exports anychip_entry() and links to
 * nothing of torch or Python. Seven functions make it a torch device; whatever else it lacks is
 * done for it on the host, and counted. This file is the specification; docs/c-abi.md is the way
 * there.
 *
 * VERSIONS. The major number must match. Within it nothing is ever removed or changes its meaning:
 * fields are appended to structs, values to enumerations, and a struct begins with the number of
 * bytes that its maker knew, struct_size. Who reads a struct takes a field that lies beyond
 * struct_size, and a function or pointer that is NULL, as absent. Who fills a struct that it was
 * given writes no further than the struct_size that it found there.
 *
 * ERRORS. A function returns ANYCHIP_OK or a negative status, and then says in last_error() what
 * happened, to the thread that called. No C++ exception, longjmp, exit or signal crosses the
 * border. Work that fails after a call has returned is reported by the next call that waits for its
 * stream or device, and by each such call after it: ANYCHIP_EDEVICE stays.
 *
 * THREADS. Every function may be called by any thread, and by several at once. There is no current
 * device: each call names its own. A library calls back only what `anychip_host` has, and from any
 * thread. It starts no thread and opens no device before the first call that is not anychip_entry,
 * device_count or device_properties, so that a process may ask these and then fork.
 *
 * STREAM ORDER. Work that is queued on one stream runs in the order of the calls; two streams are
 * not ordered but by events. Stream 0 is each device's default stream, always there, and ordered
 * like any other. A library without streams gets 0 everywhere and has one queue per device.
 *
 * LIFETIME. What a call is given through a pointer holds until it returns; what must hold longer is
 * said at the function. The library's own tables and texts hold until the process ends; it is never
 * unloaded.
 */
#ifndef ANYCHIP_ABI_H
#define ANYCHIP_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ANYCHIP_ABI_MAJOR 1
#define ANYCHIP_ABI_MINOR 0
#define ANYCHIP_MAX_DIMS 16

typedef int32_t anychip_status;

enum {
  ANYCHIP_OK = 0,
  ANYCHIP_ENOTSUP = -1, /* the library does not do this; nothing was written or queued */
  ANYCHIP_EINVAL = -2,  /* an argument that this interface does not allow */
  ANYCHIP_ENOMEM = -3,  /* no memory; nothing was written; asked again after caches were freed */
  ANYCHIP_EDEVICE = -4, /* the device or its driver failed; every later wait says so again */
  ANYCHIP_EABORTED = -5 /* a collective was ended by comm_abort, or by the loss of a rank */
};

/* Types of elements. The numbers are those of c10::ScalarType. */
enum {
  ANYCHIP_UINT8 = 0,
  ANYCHIP_INT8 = 1,
  ANYCHIP_INT16 = 2,
  ANYCHIP_INT32 = 3,
  ANYCHIP_INT64 = 4,
  ANYCHIP_FLOAT16 = 5,
  ANYCHIP_FLOAT32 = 6,
  ANYCHIP_FLOAT64 = 7,
  ANYCHIP_COMPLEX64 = 9,
  ANYCHIP_COMPLEX128 = 10,
  ANYCHIP_BOOL = 11,
  ANYCHIP_BFLOAT16 = 15,
  ANYCHIP_FLOAT8_E5M2 = 23,
  ANYCHIP_FLOAT8_E4M3FN = 24
};

/* Memory of a device: any number but 0 that the library can find its allocation by. Nobody adds to
 * it: a place inside is the handle and an offset in bytes, apart. */
typedef uint64_t anychip_memory;
typedef uint64_t anychip_stream; /* 0: the device's default stream */
typedef uint64_t anychip_event;

/* ------------------------------------------------------------------------- what the host provides
 */

/* What the library may call. Given to anychip_entry, and valid from then on. */
typedef struct anychip_host {
  uint32_t struct_size;
  uint32_t abi_minor; /* of the host; the major is that of the call */

  /* One line for the person in front of the screen; level 0 debug, 1 information, 2 warning. NULL:
   * nobody listens. The text is copied. */
  void (*log)(int32_t level, const char* text);

  /* Scratch memory on a device for work that is queued on a stream: at least nbytes, aligned as
   * mem_alloc aligns, from the same cache as tensors. It may be used by work queued on the stream
   * before the operator that asked for it returns, and is nobody's afterwards: there is nothing to
   * free. Only inside an operator, from the thread that was called. NULL: there is none. Returns
   * ANYCHIP_ENOMEM when there is no memory left, which the operator passes on. */
  anychip_status (*scratch)(int32_t device, anychip_stream stream, uint64_t nbytes,
                            anychip_memory* memory);
} anychip_host;

/* -------------------------------------------------------------------------------- what a device is
 */

enum {
  ANYCHIP_DEVICE_IS_HOST_MEMORY = 1 /* mem_alloc gives what malloc could have given; for reports */
};

/* Filled by device_properties. What nobody knows stays 0, never a guess: the planner then asks for
 * a measurement. */
typedef struct anychip_device_properties {
  uint32_t struct_size; /* set by the caller */
  uint32_t flags;
  char name[64];         /* of the part, ending in a 0 byte */
  uint64_t total_memory; /* bytes */
  uint64_t dtypes;       /* floating-point types that it computes in: bit n for type n */
  double bandwidth;      /* bytes/s of the device's memory */
  double link_bandwidth; /* bytes/s to another device of this kind, in one direction */
  double flops_float32;  /* peak dense matrix rates, flop/s */
  double flops_float16;
  double flops_bfloat16;
  uint32_t compute_units;
  uint32_t alignment; /* of mem_alloc, bytes; 0: 256 */
} anychip_device_properties;

/* ------------------------------------------------------------------------------------- operators
 */

/* A strided view of memory on one device. */
typedef struct anychip_tensor {
  uint32_t struct_size;
  int32_t dtype;
  int32_t device;
  int32_t ndim;          /* 0 to ANYCHIP_MAX_DIMS */
  anychip_memory memory; /* 0: the tensor has no elements */
  int64_t byte_offset;   /* of the element with all indices 0 */
  int64_t size[ANYCHIP_MAX_DIMS];
  int64_t stride[ANYCHIP_MAX_DIMS]; /* in elements; 0: the same element again; never negative */
} anychip_tensor;

enum {
  ANYCHIP_ARG_NONE = 0,    /* an optional argument that was left out, or a kind not listed here */
  ANYCHIP_ARG_TENSOR = 1,  /* v.tensor */
  ANYCHIP_ARG_TENSORS = 2, /* v.tensors, n of them; an element is NULL where an optional one is */
  ANYCHIP_ARG_FLOAT = 3,   /* v.f */
  ANYCHIP_ARG_INT = 4,     /* v.i: an integer, a size, a type of elements, an enumeration */
  ANYCHIP_ARG_BOOL = 5,    /* v.i, 0 or 1 */
  ANYCHIP_ARG_INTS = 6,    /* v.ints, n of them */
  ANYCHIP_ARG_FLOATS = 7,  /* v.floats, n of them */
  ANYCHIP_ARG_STRING = 8   /* v.string, ending in a 0 byte */
};

typedef struct anychip_argument {
  uint32_t struct_size;
  int32_t kind;
  uint64_t n; /* length of a list */
  union {
    const anychip_tensor* tensor;
    const anychip_tensor* const* tensors;
    double f;
    int64_t i;
    const int64_t* ints;
    const double* floats;
    const char* string;
  } v;
} anychip_argument;

/* One call of an operator. Arrays are of pointers, so that the structs can grow. */
typedef struct anychip_call {
  uint32_t struct_size;
  int32_t device;
  anychip_stream stream;
  uint32_t num_arguments;
  uint32_t num_results;
  const anychip_argument* const* arguments; /* in the order of the operator's schema */
  const anychip_tensor* const* results;     /* allocated, of the shapes and types to be written;
                                               NULL: not wanted, of a backward alone */
} anychip_call;

/* Computes one operator: reads the arguments, writes every element of the results, or queues that.
 *
 * Each argument has a type of its own, and so has each result; a number, or a scalar tensor of the
 * host, where the schema has a tensor, arrives as one of the device, in the call's common type. Of
 * an operator that computes element by element, all tensors have the shape of the result (strides 0
 * where they were expanded). A result may be the very same view as an argument, and overlaps none
 * otherwise. Quantized values are codes in an integer or float8 tensor, with their scales in a
 * tensor of their own, as the operator's schema has them.
 *
 * ANYCHIP_ENOTSUP, for these types, sizes, strides or anything else: allowed only before anything
 * is written or queued. The host computes it instead, and counts that. */
typedef anychip_status (*anychip_operator)(const anychip_call* call);

/* --------------------------------------------------------------------------------- collectives */

enum { ANYCHIP_SUM = 0, ANYCHIP_AVG = 1, ANYCHIP_MAX = 2, ANYCHIP_MIN = 3 };
#define ANYCHIP_UNIQUE_ID_BYTES 128
typedef uint64_t anychip_comm; /* a group of ranks, as one of them sees it */

/* Communication among ranks, each a process with one device. All or nothing: a library that has the
 * table has every function of it, and streams and events as well. Calls are queued on a stream,
 * wait for other ranks there and not on the host, and are ordered there; every rank of a group
 * makes the same calls in one order. A count is in elements of the type.
 *
 * A call with a count of 0 (of all_to_all: all counts) sends nothing and waits for nobody, but
 * still gives ANYCHIP_ENOTSUP where one with elements would, before anything is sent, and alike on
 * all ranks: the host asks so before the first call, and does the rest by itself. ANYCHIP_ENOTSUP
 * for elements in what was taken so ends the job.
 *
 * A call that fails, or was aborted, is told by async_error, and by what waits for its stream until
 * its group is destroyed; then the device goes on. */
typedef struct anychip_collectives {
  uint32_t struct_size;
  uint32_t reserved;
  /* A new name for a group, on one rank, which hands it to the others. */
  anychip_status (*unique_id)(uint8_t id[ANYCHIP_UNIQUE_ID_BYTES]);
  /* Joins; returns when all ranks have come. The handle is the caller's until comm_destroy. */
  anychip_status (*comm_init)(int32_t device, int32_t num_ranks, int32_t rank,
                              const uint8_t id[ANYCHIP_UNIQUE_ID_BYTES], anychip_comm* comm);
  anychip_status (*comm_destroy)(anychip_comm comm); /* when its calls are done, or aborted */
  /* Makes calls under way fail with ANYCHIP_EABORTED; the only one that may come at any time. */
  anychip_status (*comm_abort)(anychip_comm comm);
  /* Whether a call has failed since: ANYCHIP_OK or its status. Does not wait. */
  anychip_status (*async_error)(anychip_comm comm);
  /* Calls between the two may wait for each other's ranks and are queued together at the end. */
  anychip_status (*group_start)(void);
  anychip_status (*group_end)(void);
  /* input and output are the same place, or do not overlap. */
  anychip_status (*all_reduce)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                               anychip_memory output, int64_t output_offset, uint64_t count,
                               int32_t dtype, int32_t reduction, anychip_stream stream);
  /* count is each rank's part; the part of this rank may be its own place in the whole. */
  anychip_status (*reduce_scatter)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                                   anychip_memory output, int64_t output_offset, uint64_t count,
                                   int32_t dtype, int32_t reduction, anychip_stream stream);
  anychip_status (*all_gather)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                               anychip_memory output, int64_t output_offset, uint64_t count,
                               int32_t dtype, anychip_stream stream);
  anychip_status (*broadcast)(anychip_comm comm, anychip_memory memory, int64_t offset,
                              uint64_t count, int32_t dtype, int32_t root, anychip_stream stream);
  /* Counts and offsets have an entry per rank; offsets are in bytes. Two ranks that have nothing
   * for each other do not wait for each other: one whose counts are all 0 does not make the call.
   */
  anychip_status (*all_to_all)(anychip_comm comm, anychip_memory input,
                               const int64_t* input_offsets, const uint64_t* input_counts,
                               anychip_memory output, const int64_t* output_offsets,
                               const uint64_t* output_counts, int32_t dtype, anychip_stream stream);
  anychip_status (*send)(anychip_comm comm, anychip_memory memory, int64_t offset, uint64_t count,
                         int32_t dtype, int32_t peer, anychip_stream stream);
  anychip_status (*recv)(anychip_comm comm, anychip_memory memory, int64_t offset, uint64_t count,
                         int32_t dtype, int32_t peer, anychip_stream stream);
} anychip_collectives;

/* ----------------------------------------------------------------------------------- the library
 */

typedef struct anychip_library {
  uint32_t struct_size;
  uint32_t abi_major; /* ANYCHIP_ABI_MAJOR and ANYCHIP_ABI_MINOR of the header it was made with */
  uint32_t abi_minor;
  uint32_t reserved; /* 0 */

  /* Required. The name of the backend and of torch's device type: a lower-case letter, then
   * lower-case letters, digits and "_", as in torch.device("acme:0"). */
  const char* name;
  /* Of the library and its driver, one line, for reports. NULL: unknown. */
  const char* version;
  /* What the last function that failed in the calling thread has to say: one line. It holds until
   * the thread calls the library again. NULL: statuses say all. */
  const char* (*last_error)(void);

  /* ---- required: device */

  /* How many devices this process can use; 0 with ANYCHIP_OK when there is none. Their indices are
   * 0 to count - 1, and the number never changes. Cheap, and opens no device. */
  anychip_status (*device_count)(int32_t* count);
  /* Fills *properties up to its struct_size. Cheap; the same answer each time. */
  anychip_status (*device_properties)(int32_t device, anychip_device_properties* properties);
  /* Returns when all work queued on the device before, on any stream, is done. Tells its errors. */
  anychip_status (*device_synchronize)(int32_t device);

  /* ---- required: memory */

  /* nbytes > 0 bytes, contents undefined, owned by the caller until mem_free. May wait for the
   * device; the caller caches. ANYCHIP_ENOMEM when there are not as many. */
  anychip_status (*mem_alloc)(int32_t device, uint64_t nbytes, anychip_memory* memory);
  /* Gives back what mem_alloc gave. The caller knows that no queued work uses it any more. */
  anychip_status (*mem_free)(int32_t device, anychip_memory memory);
  /* Copies nbytes from the host, as work of the stream. Without stream_synchronize, the copy is
   * over when it returns. With it, `source` is left as it is until the stream has passed this
   * point. */
  anychip_status (*host_to_device)(int32_t device, anychip_memory target, int64_t target_offset,
                                   const void* source, uint64_t nbytes, anychip_stream stream);
  /* Copies nbytes to the host, as work of the stream; likewise `target`. */
  anychip_status (*device_to_host)(int32_t device, void* target, anychip_memory source,
                                   int64_t source_offset, uint64_t nbytes, anychip_stream stream);

  /* ---- optional: memory */

  /* Copies inside one device, as work of the stream; the ranges may overlap as with memmove. NULL:
   * by way of the host. */
  anychip_status (*device_to_device)(int32_t device, anychip_memory target, int64_t target_offset,
                                     anychip_memory source, int64_t source_offset, uint64_t nbytes,
                                     anychip_stream stream);
  /* Free and total bytes, other processes included. NULL: total_memory less what was allocated. */
  anychip_status (*mem_info)(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes);
  /* Host memory that copies to and from devices are fast with, page-locked for instance; owned by
   * the caller until host_free, which comes after all copies. NULL: ordinary memory. Both or none.
   */
  anychip_status (*host_alloc)(uint64_t nbytes, void** memory);
  anychip_status (*host_free)(void* memory);

  /* ---- optional: streams and events, all of them or none, but for event_elapsed */

  /* A new stream, the caller's until stream_destroy. A lower priority number goes first; 0 is the
   * usual. */
  anychip_status (*stream_create)(int32_t device, int32_t priority, anychip_stream* stream);
  /* Work that is queued there still runs. */
  anychip_status (*stream_destroy)(int32_t device, anychip_stream stream);
  /* Returns when what was queued on the stream before is done. Tells its errors. */
  anychip_status (*stream_synchronize)(int32_t device, anychip_stream stream);
  /* *done: 1 when stream_synchronize would not wait, else 0. */
  anychip_status (*stream_query)(int32_t device, anychip_stream stream, int32_t* done);
  /* A new event, done from the start, the caller's until event_destroy. */
  anychip_status (*event_create)(int32_t device, anychip_event* event);
  /* Also while a stream still waits for it, which it may. */
  anychip_status (*event_destroy)(int32_t device, anychip_event event);
  /* The event is done when what was queued on the stream before is. Again: it stands for the later
   * point; who waits already waits for the earlier one. */
  anychip_status (*event_record)(int32_t device, anychip_event event, anychip_stream stream);
  /* What is queued on the stream from now on starts when the event is done. The host does not wait.
   * The stream may be of another device of this library than the event: `device` is the stream's.
   */
  anychip_status (*event_wait)(int32_t device, anychip_event event, anychip_stream stream);
  /* Returns when the event is done. */
  anychip_status (*event_synchronize)(int32_t device, anychip_event event);
  /* *done: 1 or 0. */
  anychip_status (*event_query)(int32_t device, anychip_event event, int32_t* done);
  /* Milliseconds between two events that are done. */
  anychip_status (*event_elapsed)(int32_t device, anychip_event start, anychip_event end,
                                  double* milliseconds);

  /* ---- optional: operators and collectives */

  /* Names of the operators that the library has, ending in NULL: those of torch's functional ATen
   * operators with their overload, "add.Tensor", "mm", "sum.dim_IntList", "_softmax". Each also
   * serves the in-place and .out forms of the name. "copy" is a strided copy with a conversion of
   * types: one argument, one result of its shape.
   *
   * Also those of anychip's own operators, "anychip::rms_norm": its schema and its equation are
   * what `anychip operators rms_norm` prints. Arguments are those of the schema, tensors first;
   * results are its outputs and then what it leaves for its backward. Of one that writes its
   * arguments there are no results. "anychip::rms_norm.backward" is given a gradient of each
   * output, then what is saved for it, then the attributes; a result is the gradient of each
   * differentiable argument, and NULL where that is not wanted. ANYCHIP_ENOTSUP: the reference
   * computes it, and that is counted.
   *
   * A name that nobody has is no error: it is never called. */
  const char* const* operators;
  /* The function for one of these names. Asked once for each. NULL: it is not there after all. */
  anychip_operator (*find_operator)(const char* name);
  const anychip_collectives* collectives;
} anychip_library;

/* The one symbol that a library exports. Sets *library and returns ANYCHIP_OK, or returns
 * ANYCHIP_ENOTSUP when it was made for another major. Opens no device. It may be called again, and
 * gives the same table; the host table of the latest call is the one to use. */
anychip_status anychip_entry(uint32_t abi_major, const anychip_host* host,
                             const anychip_library** library);

#ifdef __cplusplus
}
#endif
#endif
