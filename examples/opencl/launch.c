/* From a call to the launch of a kernel: its arguments, and how its tensors lie. */
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "operators.h"

/* --------------------------------------------------------------------------------- launching */

const size_t items64[3] = {64, 1, 1};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a kernel's arguments, until it starts */
static cl_program program;

static anychip_status build_program(void) {
  size_t length = strlen(kernel_prelude) + 1;
  char* source;
  for (int i = 0; kernel_tables[i]; ++i) length += strlen(kernel_tables[i]);
  for (int i = 0; kernel_text[i]; ++i) length += strlen(kernel_text[i]) + 1;
  source = malloc(length);
  if (!source) return fail(ANYCHIP_ENOMEM, "no memory on the host");
  strcpy(source, kernel_prelude);
  for (int i = 0; kernel_tables[i]; ++i) strcat(source, kernel_tables[i]);
  for (int i = 0; kernel_text[i]; ++i) strcat(strcat(source, kernel_text[i]), "\n");
  program = build(source);
  free(source);
  return program ? ANYCHIP_OK : ANYCHIP_EDEVICE;
}

/* Kernels that were made, by name: a program compiles one for a device when it first runs. */
static cl_kernel kernel_named(const char* name, cl_int* error) {
  static struct {
    char name[64];
    cl_kernel kernel;
  } made[256];
  static int count;
  for (int i = 0; i < count; ++i)
    if (!strcmp(made[i].name, name)) return made[i].kernel;
  made[count].kernel = clCreateKernel(program, name, error);
  if (*error || count == 255) return made[count].kernel;
  strncpy(made[count].name, name, sizeof made[count].name - 1);
  return made[count++].kernel;
}

int64_t item_size(int32_t dtype) {
  static const char sizes[] = {1, 1, 2, 4, 8, 2, 4, 0, 0, 0, 0, 1, 0, 0, 0, 2};
  return dtype >= 0 && dtype < (int32_t)sizeof sizes ? sizes[dtype] : 0;
}

/* Sets a tensor's three arguments; of an absent one `stand_in`'s memory, with type -1. */
static cl_int set_tensor(cl_kernel kernel, cl_uint* next, tensor* t, tensor* stand_in) {
  cl_mem memory = (cl_mem)(uintptr_t)(t ? t : stand_in)->memory;
  cl_long offset = t ? t->byte_offset / item_size(t->dtype) : 0;
  cl_int type = t ? t->dtype : -1;
  cl_int error = clSetKernelArg(kernel, (*next)++, sizeof memory, &memory);
  if (!error) error = clSetKernelArg(kernel, (*next)++, sizeof offset, &offset);
  return error ? error : clSetKernelArg(kernel, (*next)++, sizeof type, &type);
}

anychip_status launch(const anychip_call* call, const char* name, const size_t groups[3],
                      const size_t items[3], const char* kinds, ...) {
  cl_command_queue queue = queue_for(call->device, call->stream);
  cl_int error = CL_SUCCESS;
  cl_uint next = 0;
  size_t global[3];
  va_list values, ahead;
  tensor* stand_in = NULL;
  cl_kernel kernel;
  if (!queue) return ANYCHIP_EDEVICE;
  if (!groups[0] || !groups[1] || !groups[2]) return ANYCHIP_OK;
  pthread_mutex_lock(&lock);
  if (!program && build_program()) return pthread_mutex_unlock(&lock), ANYCHIP_EDEVICE;
  kernel = kernel_named(name, &error);
  va_start(ahead, kinds);
  for (const char* k = kinds; *k == 't' && !stand_in; ++k) stand_in = va_arg(ahead, tensor*);
  va_end(ahead);
  va_start(values, kinds);
  for (const char* k = kinds; *k && !error; ++k) {
    cl_int i;
    cl_long l;
    cl_float f;
    switch (*k) {
      case 't':
        error = set_tensor(kernel, &next, va_arg(values, tensor*), stand_in);
        break;
      case 'i':
        i = va_arg(values, int);
        error = clSetKernelArg(kernel, next++, sizeof i, &i);
        break;
      case 'l':
        l = va_arg(values, int64_t);
        error = clSetKernelArg(kernel, next++, sizeof l, &l);
        break;
      case 'f':
        f = (cl_float)va_arg(values, double);
        error = clSetKernelArg(kernel, next++, sizeof f, &f);
        break;
      case 'y':
        error = clSetKernelArg(kernel, next++, sizeof(layout), va_arg(values, layout*));
        break;
      case 'p':
        error = clSetKernelArg(kernel, next++, sizeof(product), va_arg(values, product*));
        break;
    }
  }
  va_end(values);
  for (int d = 0; d < 3; ++d) global[d] = groups[d] * items[d];
  if (!error) error = clEnqueueNDRangeKernel(queue, kernel, 3, NULL, global, items, 0, NULL, NULL);
  pthread_mutex_unlock(&lock);
  return checked(error, name);
}

/* ------------------------------------------------------------------------------- arguments */

int is_float(tensor* t) {
  return t->dtype == ANYCHIP_FLOAT32 || t->dtype == ANYCHIP_FLOAT16 || t->dtype == ANYCHIP_BFLOAT16;
}

int64_t numel(tensor* t) {
  int64_t n = 1;
  for (int d = 0; d < t->ndim; ++d) n *= t->size[d];
  return n;
}

int is_contiguous(tensor* t) {
  int64_t n = 1;
  for (int d = t->ndim - 1; d >= 0; n *= t->size[d--])
    if (t->size[d] > 1 && t->stride[d] != n) return 0;
  return 1;
}

tensor* tensor_at(const anychip_call* call, uint32_t i) {
  const anychip_argument* argument = call->arguments[i];
  return argument->kind == ANYCHIP_ARG_TENSOR ? argument->v.tensor : NULL;
}

int64_t int_at(const anychip_call* call, uint32_t i) { return call->arguments[i]->v.i; }

double number_at(const anychip_call* call, uint32_t i) {
  const anychip_argument* argument = call->arguments[i];
  return argument->kind == ANYCHIP_ARG_FLOAT ? argument->v.f : (double)argument->v.i;
}

int are_known(const anychip_call* call) {
  for (uint32_t i = 0; i < call->num_results; ++i)
    if (call->results[i] && !item_size(call->results[i]->dtype)) return 0;
  for (uint32_t i = 0; i < call->num_arguments; ++i) {
    const anychip_argument* argument = call->arguments[i];
    if (argument->kind == ANYCHIP_ARG_TENSOR && !item_size(argument->v.tensor->dtype)) return 0;
    for (uint64_t n = 0; argument->kind == ANYCHIP_ARG_TENSORS && n < argument->n; ++n)
      if (argument->v.tensors[n] && !item_size(argument->v.tensors[n]->dtype)) return 0;
  }
  return 1;
}

int are_float(const anychip_call* call, uint32_t but) {
  for (uint32_t i = 0; i < call->num_results; ++i)
    if (call->results[i] && call->results[i]->dtype != ANYCHIP_FLOAT32) return 0;
  for (uint32_t i = 0; i < call->num_arguments; ++i)
    if (i != but && tensor_at(call, i) && tensor_at(call, i)->dtype != ANYCHIP_FLOAT32) return 0;
  return are_known(call);
}

int lay(layout* l, tensor* shape, const int* dims, int num_dims, tensor* const* of) {
  int64_t count = 1;
  memset(l, 0, sizeof *l);
  for (int n = 0; n < num_dims; ++n) {
    int d = dims[n], is_joined = l->ndim > 0;
    int64_t strides[OPERANDS] = {0}, size = shape->size[d];
    count *= size;
    if (size == 1) continue;
    for (int i = 0; i < OPERANDS; ++i) {
      int own = of[i] ? d - (shape->ndim - of[i]->ndim) : -1;
      strides[i] = own >= 0 && of[i]->size[own] != 1 ? of[i]->stride[own] : 0;
      if (strides[i] > INT_MAX || size > INT_MAX || count > INT_MAX) return 0;
      is_joined = is_joined && l->stride[i][l->ndim - 1] == strides[i] * size;
    }
    if (!is_joined && l->ndim++ == DIMS) return 0;
    l->size[l->ndim - 1] = (is_joined ? l->size[l->ndim - 1] : 1) * (cl_int)size;
    for (int i = 0; i < OPERANDS; ++i) l->stride[i][l->ndim - 1] = (cl_int)strides[i];
  }
  l->count = (cl_int)count;
  return 1;
}

int lay_all(layout* l, tensor* a, tensor* b, tensor* c, tensor* r) {
  static const int dims[ANYCHIP_MAX_DIMS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lay(l, r, dims, r->ndim, (tensor* const[]){a, b, c, r});
}

int lay_but(layout* l, tensor* shape, int64_t but, tensor* a, tensor* b, tensor* r) {
  int dims[ANYCHIP_MAX_DIMS], count = 0;
  for (int d = 0; d < shape->ndim; ++d)
    if (d != but) dims[count++] = d;
  return lay(l, shape, dims, count, (tensor* const[]){a, b, NULL, r});
}

int64_t wrapped(int64_t dim, int ndim) { return dim < 0 ? dim + (ndim ? ndim : 1) : dim; }
int64_t size_of(tensor* t, int64_t dim) { return t->ndim ? t->size[dim] : 1; }
int64_t stride_of(tensor* t, int64_t dim) { return t->ndim ? t->stride[dim] : 0; }
