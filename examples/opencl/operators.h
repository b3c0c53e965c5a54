/* What the parts of the library share: the runtime of opencl.c, and the tables of operators. */
#ifndef OPENCL_OPERATORS_H
#define OPENCL_OPERATORS_H

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <anychip/abi.h>

/* Keeps a text for last_error(), and gives the status. */
anychip_status fail(anychip_status status, const char* format, ...);
/* The status for an error of OpenCL's in `what`; ANYCHIP_OK for CL_SUCCESS. */
anychip_status checked(cl_int error, const char* what);

/* Opens the platform, once; every function below may be called afterwards. */
anychip_status open_platform(void);
cl_context context(void);
/* The queue of a device's stream, for work that is queued now. NULL: no such device. */
cl_command_queue queue_for(int32_t device, anychip_stream stream);
/* Builds a program for all devices; NULL after a failure, which fail() has told. */
cl_program build(const char* source);

extern const char* const operator_names[];
anychip_operator find_operator(const char* name);

/* What kernels are told of how up to four tensors lie; the same struct stands in kernels.c. */
enum { OPERANDS = 4, DIMS = 8 };
typedef struct {
  cl_int ndim, count;
  cl_int size[DIMS];
  cl_int stride[OPERANDS][DIMS];
} layout;

/* Of a batch of matrix products: strides are those of batch, row and column. */
typedef struct {
  cl_int m, n, k;
  cl_int a[3], b[3], d[3], r[3];
  cl_float alpha, beta;
} product;

/* The program's text: kernels.c has the first and the last part, the tables of operators.c are
 * between. Each list ends in NULL. */
extern const char* const kernel_prelude;
extern const char* const kernel_tables[];
extern const char* const kernel_text[];

/* ---- launch.c */

typedef const anychip_tensor tensor;

int64_t item_size(int32_t dtype);
/* Queues a kernel. The letters of `kinds` say what follows: t a tensor or NULL, i an int, l a
 * long, f a float, y a layout, p a product. The first tensor that is there stands in for others. */
anychip_status launch(const anychip_call* call, const char* name, const size_t groups[3],
                      const size_t items[3], const char* kinds, ...);
int is_float(tensor* t);
int64_t numel(tensor* t);
int is_contiguous(tensor* t);
tensor* tensor_at(const anychip_call* call, uint32_t i);
int64_t int_at(const anychip_call* call, uint32_t i);
double number_at(const anychip_call* call, uint32_t i);
/* Whether kernels can read and write all tensors of a call. */
int are_known(const anychip_call* call);
/* Of a call whose tensors must all be float32 but for one argument. */
int are_float(const anychip_call* call, uint32_t but);
/* How tensors lie along the given dims of `shape`, with neighbours joined where all allow it; one
 * that is smaller is repeated. 0: it does not fit into the struct. */
int lay(layout* l, tensor* shape, const int* dims, int num_dims, tensor* const* of);
int lay_all(layout* l, tensor* a, tensor* b, tensor* c, tensor* r);
/* Along all dims but one; operands of b lie like r if b is NULL. */
int lay_but(layout* l, tensor* shape, int64_t but, tensor* a, tensor* b, tensor* r);
int64_t wrapped(int64_t dim, int ndim);
int64_t size_of(tensor* t, int64_t dim);
int64_t stride_of(tensor* t, int64_t dim);

extern const size_t items64[3];
/* A work item for each of n elements; and a group for each of n rows. */
#define ELEMENTS(n) ((const size_t[3]){((size_t)(n) + 63) / 64, 1, 1}), items64
#define ROWS(n) ((const size_t[3]){(size_t)(n), 1, 1}), items64

#endif
