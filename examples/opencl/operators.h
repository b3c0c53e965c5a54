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

/* The program's text, in parts. The kernels of the tables in operators.c come between. */
extern const char* const kernel_prelude;
extern const char* const kernel_text[];

#endif
