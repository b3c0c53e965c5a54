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
  ANYCHIP_ENOTSUP = -1,
  ANYCHIP_EINVAL = -2,
  ANYCHIP_ENOMEM = -3,
  ANYCHIP_EDEVICE = -4,
  ANYCHIP_EABORTED = -5
};
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
typedef uint64_t anychip_memory;
typedef uint64_t anychip_stream;
typedef uint64_t anychip_event;
typedef struct anychip_host {
  uint32_t struct_size;
  uint32_t abi_minor;
  void (*log)(int32_t level, const char* text);
  anychip_status (*scratch)(int32_t device, anychip_stream stream, uint64_t nbytes,
                            anychip_memory* memory);
} anychip_host;
enum {
  ANYCHIP_DEVICE_IS_HOST_MEMORY = 1
};
typedef struct anychip_device_properties {
  uint32_t struct_size;
  uint32_t flags;
  char name[64];
  uint64_t total_memory;
  uint64_t dtypes;
  double bandwidth;
  double link_bandwidth;
  double flops_float32;
  double flops_float16;
  double flops_bfloat16;
  uint32_t compute_units;
  uint32_t alignment;
} anychip_device_properties;
typedef struct anychip_tensor {
  uint32_t struct_size;
  int32_t dtype;
  int32_t device;
  int32_t ndim;
  anychip_memory memory;
  int64_t byte_offset;
  int64_t size[ANYCHIP_MAX_DIMS];
  int64_t stride[ANYCHIP_MAX_DIMS];
} anychip_tensor;
enum {
  ANYCHIP_ARG_NONE = 0,
  ANYCHIP_ARG_TENSOR = 1,
  ANYCHIP_ARG_TENSORS = 2,
  ANYCHIP_ARG_FLOAT = 3,
  ANYCHIP_ARG_INT = 4,
  ANYCHIP_ARG_BOOL = 5,
  ANYCHIP_ARG_INTS = 6,
  ANYCHIP_ARG_FLOATS = 7,
  ANYCHIP_ARG_STRING = 8
};
typedef struct anychip_argument {
  uint32_t struct_size;
  int32_t kind;
  uint64_t n;
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
typedef struct anychip_call {
  uint32_t struct_size;
  int32_t device;
  anychip_stream stream;
  uint32_t num_arguments;
  uint32_t num_results;
  const anychip_argument* const* arguments;
  const anychip_tensor* const* results;
} anychip_call;
typedef anychip_status (*anychip_operator)(const anychip_call* call);
enum { ANYCHIP_SUM = 0, ANYCHIP_AVG = 1, ANYCHIP_MAX = 2, ANYCHIP_MIN = 3 };
#define ANYCHIP_UNIQUE_ID_BYTES 128
typedef uint64_t anychip_comm;
typedef struct anychip_collectives {
  uint32_t struct_size;
  uint32_t reserved;
  anychip_status (*unique_id)(uint8_t id[ANYCHIP_UNIQUE_ID_BYTES]);
  anychip_status (*comm_init)(int32_t device, int32_t num_ranks, int32_t rank,
                              const uint8_t id[ANYCHIP_UNIQUE_ID_BYTES], anychip_comm* comm);
  anychip_status (*comm_destroy)(anychip_comm comm);
  anychip_status (*comm_abort)(anychip_comm comm);
  anychip_status (*async_error)(anychip_comm comm);
  anychip_status (*group_start)(void);
  anychip_status (*group_end)(void);
  anychip_status (*all_reduce)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                               anychip_memory output, int64_t output_offset, uint64_t count,
                               int32_t dtype, int32_t reduction, anychip_stream stream);
  anychip_status (*reduce_scatter)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                                   anychip_memory output, int64_t output_offset, uint64_t count,
                                   int32_t dtype, int32_t reduction, anychip_stream stream);
  anychip_status (*all_gather)(anychip_comm comm, anychip_memory input, int64_t input_offset,
                               anychip_memory output, int64_t output_offset, uint64_t count,
                               int32_t dtype, anychip_stream stream);
  anychip_status (*broadcast)(anychip_comm comm, anychip_memory memory, int64_t offset,
                              uint64_t count, int32_t dtype, int32_t root, anychip_stream stream);
  anychip_status (*all_to_all)(anychip_comm comm, anychip_memory input,
                               const int64_t* input_offsets, const uint64_t* input_counts,
                               anychip_memory output, const int64_t* output_offsets,
                               const uint64_t* output_counts, int32_t dtype, anychip_stream stream);
  anychip_status (*send)(anychip_comm comm, anychip_memory memory, int64_t offset, uint64_t count,
                         int32_t dtype, int32_t peer, anychip_stream stream);
  anychip_status (*recv)(anychip_comm comm, anychip_memory memory, int64_t offset, uint64_t count,
                         int32_t dtype, int32_t peer, anychip_stream stream);
} anychip_collectives;
typedef struct anychip_library {
  uint32_t struct_size;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t reserved;
  const char* name;
  const char* version;
  const char* (*last_error)(void);
  anychip_status (*device_count)(int32_t* count);
  anychip_status (*device_properties)(int32_t device, anychip_device_properties* properties);
  anychip_status (*device_synchronize)(int32_t device);
  anychip_status (*mem_alloc)(int32_t device, uint64_t nbytes, anychip_memory* memory);
  anychip_status (*mem_free)(int32_t device, anychip_memory memory);
  anychip_status (*host_to_device)(int32_t device, anychip_memory target, int64_t target_offset,
                                   const void* source, uint64_t nbytes, anychip_stream stream);
  anychip_status (*device_to_host)(int32_t device, void* target, anychip_memory source,
                                   int64_t source_offset, uint64_t nbytes, anychip_stream stream);
  anychip_status (*device_to_device)(int32_t device, anychip_memory target, int64_t target_offset,
                                     anychip_memory source, int64_t source_offset, uint64_t nbytes,
                                     anychip_stream stream);
  anychip_status (*mem_info)(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes);
  anychip_status (*host_alloc)(uint64_t nbytes, void** memory);
  anychip_status (*host_free)(void* memory);
  anychip_status (*stream_create)(int32_t device, int32_t priority, anychip_stream* stream);
  anychip_status (*stream_destroy)(int32_t device, anychip_stream stream);
  anychip_status (*stream_synchronize)(int32_t device, anychip_stream stream);
  anychip_status (*stream_query)(int32_t device, anychip_stream stream, int32_t* done);
  anychip_status (*event_create)(int32_t device, anychip_event* event);
  anychip_status (*event_destroy)(int32_t device, anychip_event event);
  anychip_status (*event_record)(int32_t device, anychip_event event, anychip_stream stream);
  anychip_status (*event_wait)(int32_t device, anychip_event event, anychip_stream stream);
  anychip_status (*event_synchronize)(int32_t device, anychip_event event);
  anychip_status (*event_query)(int32_t device, anychip_event event, int32_t* done);
  anychip_status (*event_elapsed)(int32_t device, anychip_event start, anychip_event end,
                                  double* milliseconds);
  const char* const* operators;
  anychip_operator (*find_operator)(const char* name);
  const anychip_collectives* collectives;
} anychip_library;
anychip_status anychip_entry(uint32_t abi_major, const anychip_host* host,
                             const anychip_library** library);
#ifdef __cplusplus
}
#endif
#endif
