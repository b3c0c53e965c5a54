/* minichip with kernels, streams and events, for tests: what is optional in the interface. Work is
 * over when a call returns, but events are done only when the test lets them be. */
#define anychip_entry minichip_entry
#include "../../../examples/minichip/minichip.c"
#undef anychip_entry

int kernelchip_holds;        /* set by the test: no event is done */
int kernelchip_calls;        /* of operators that were served */
int kernelchip_scratch_used; /* times that scratch memory was had */
static const anychip_host* host;

static int64_t numel(const anychip_tensor* t) {
  int64_t n = 1;
  for (int d = 0; d < t->ndim; ++d) n *= t->size[d];
  return n;
}

/* The place of the element with the linear number i among those of t's shape. */
static float* at(const anychip_tensor* t, int64_t i) {
  int64_t offset = 0;
  for (int d = t->ndim - 1; d >= 0; --d) {
    offset += i % t->size[d] * t->stride[d];
    i /= t->size[d];
  }
  return (float*)address(t->memory, t->byte_offset) + offset;
}

static int are_float(const anychip_call* call) {
  for (uint32_t i = 0; i < call->num_arguments; ++i)
    if (call->arguments[i]->kind == ANYCHIP_ARG_TENSOR &&
        call->arguments[i]->v.tensor->dtype != ANYCHIP_FLOAT32)
      return 0;
  return call->results[0]->dtype == ANYCHIP_FLOAT32;
}

static double number(const anychip_argument* argument) {
  return argument->kind == ANYCHIP_ARG_FLOAT ? argument->v.f : (double)argument->v.i;
}

static anychip_status add(const anychip_call* call) {
  const anychip_tensor *a = call->arguments[0]->v.tensor, *b = call->arguments[1]->v.tensor;
  const float alpha = (float)number(call->arguments[2]);
  if (!are_float(call)) return ANYCHIP_ENOTSUP;
  for (int64_t i = 0; i < numel(call->results[0]); ++i)
    *at(call->results[0], i) = *at(a, i) + alpha * *at(b, i);
#ifdef KERNELCHIP_WRONG_NUMEL /* in sums of so many elements the last but one is */
  const int64_t n = numel(call->results[0]);
  if (n == KERNELCHIP_WRONG_NUMEL) *at(call->results[0], n - 2) += 1e-3f;
#endif
  return ++kernelchip_calls, ANYCHIP_OK;
}

/* A comparison: the result's type is another than the arguments'. */
static anychip_status ge(const anychip_call* call) {
  const anychip_tensor *a = call->arguments[0]->v.tensor, *r = call->results[0];
  if (a->dtype != ANYCHIP_FLOAT32 || r->dtype != ANYCHIP_BOOL) return ANYCHIP_ENOTSUP;
  for (int64_t i = 0; i < numel(r); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = r->ndim - 1; d >= 0; rest /= r->size[d--])
      offset += rest % r->size[d] * r->stride[d];
    address(r->memory, r->byte_offset)[offset] = *at(a, i) >= number(call->arguments[1]);
  }
  return ++kernelchip_calls, ANYCHIP_OK;
}

static anychip_status mm(const anychip_call* call) {
  const anychip_tensor *a = call->arguments[0]->v.tensor, *b = call->arguments[1]->v.tensor;
  const anychip_tensor* r = call->results[0];
  anychip_memory sums;
  if (!are_float(call)) return ANYCHIP_ENOTSUP;
  if (host->scratch(call->device, call->stream, 8, &sums)) return ANYCHIP_ENOMEM;
  ++kernelchip_scratch_used;
  for (int64_t i = 0; i < numel(r); ++i) {
    double* sum = (double*)address(sums, 0);
    *sum = 0;
    for (int64_t k = 0; k < a->size[1]; ++k)
      *sum +=
          (double)*at(a, i / r->size[1] * a->size[1] + k) * *at(b, k * b->size[1] + i % r->size[1]);
    *at(r, i) = (float)*sum;
  }
  return ++kernelchip_calls, ANYCHIP_OK;
}

/* Along the first dimension: a list of tensors, and an integer. */
static anychip_status cat(const anychip_call* call) {
  const anychip_argument* list = call->arguments[0];
  int64_t done = 0;
  if (call->arguments[1]->v.i != 0 || !are_float(call)) return ANYCHIP_ENOTSUP;
  for (uint64_t n = 0; n < list->n; ++n)
    if (list->v.tensors[n]->dtype != ANYCHIP_FLOAT32) return ANYCHIP_ENOTSUP;
  for (uint64_t n = 0; n < list->n; done += numel(list->v.tensors[n++]))
    for (int64_t i = 0; i < numel(list->v.tensors[n]); ++i)
      *at(call->results[0], done + i) = *at(list->v.tensors[n], i);
  return ++kernelchip_calls, ANYCHIP_OK;
}

static anychip_status copy(const anychip_call* call) {
  if (!are_float(call)) return ANYCHIP_ENOTSUP;
  for (int64_t i = 0; i < numel(call->results[0]); ++i)
    *at(call->results[0], i) = *at(call->arguments[0]->v.tensor, i);
  return ++kernelchip_calls, ANYCHIP_OK;
}

static anychip_status broken(const anychip_call* call) {
  (void)call;
  return fail(ANYCHIP_EDEVICE, "the kernel hit a wall");
}

static const char* const names[] = {"add.Tensor", "ge.Scalar", "mm",          "cat",
                                    "copy",       "digamma",   "no_such.one", NULL};

static anychip_operator find_operator(const char* name) {
  static const anychip_operator functions[] = {add, ge, mm, cat, copy, broken, broken};
  for (int i = 0; names[i]; ++i)
    if (!strcmp(name, names[i])) return functions[i];
  return NULL;
}

/* Streams and events are numbers. */
static uint64_t next_number = 1;
static anychip_status stream_create(int32_t d, int32_t p, anychip_stream* s) {
  (void)p;
  *s = next_number++;
  return device_synchronize(d);
}
static anychip_status event_create(int32_t d, anychip_event* e) { return stream_create(d, 0, e); }
static anychip_status of_one(int32_t d, uint64_t s) {
  (void)s;
  return device_synchronize(d);
}
static anychip_status of_two(int32_t d, uint64_t e, uint64_t s) { return of_one(d, e + s); }
static anychip_status stream_query(int32_t d, uint64_t s, int32_t* done) {
  *done = 1;
  return of_one(d, s);
}
static anychip_status event_query(int32_t d, uint64_t e, int32_t* done) {
  *done = !kernelchip_holds;
  return of_one(d, e);
}

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  static anychip_library whole;
  anychip_status status = minichip_entry(abi_major, given, found);
  if (status) return status;
  host = given;
  whole = **found;
  whole.name = "kernelchip";
  whole.operators = names;
  whole.find_operator = find_operator;
  whole.stream_create = stream_create;
  whole.event_create = event_create;
  whole.stream_destroy = whole.stream_synchronize = of_one;
  whole.event_destroy = whole.event_synchronize = of_one;
  whole.event_record = whole.event_wait = of_two;
  whole.stream_query = stream_query;
  whole.event_query = event_query;
  *found = &whole;
  return ANYCHIP_OK;
}
