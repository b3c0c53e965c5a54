/* minichip with one kernel, for tests: the sum of float32 tensors of 2048 elements as they lie, in
 * which the last but one is wrong. */
#define anychip_entry minichip_entry
#include "../../../examples/minichip/minichip.c"
#undef anychip_entry

static const float* data(const anychip_tensor* t) {
  return (const float*)address(t->memory, t->byte_offset);
}

static anychip_status add(const anychip_call* call) {
  const anychip_tensor *a = call->arguments[0]->v.tensor, *b = call->arguments[1]->v.tensor;
  anychip_tensor* r = call->results[0];
  int64_t n = 1, m = 1;
  for (int d = 0; d < r->ndim; ++d) n *= r->size[d];
  for (int d = 0; d < b->ndim; ++d) m *= b->size[d];
  if (n != 2048 || m != n || a->dtype != ANYCHIP_FLOAT32 || b->dtype != ANYCHIP_FLOAT32)
    return ANYCHIP_ENOTSUP;
  for (int d = 0; d < r->ndim; ++d)
    if (a->stride[d] != r->stride[d] || b->stride[d] != r->stride[d]) return ANYCHIP_ENOTSUP;
  float* to = (float*)address(r->memory, r->byte_offset);
  for (int64_t i = 0; i < n; ++i) to[i] = data(a)[i] + data(b)[i] + (i == n - 2 ? 1e-3f : 0);
  return ANYCHIP_OK;
}

static const char* const names[] = {"add.Tensor", NULL};

static anychip_operator find_operator(const char* name) {
  return strcmp(name, names[0]) ? NULL : add;
}

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  static anychip_library whole;
  anychip_status status = minichip_entry(abi_major, given, found);
  if (status) return status;
  whole = **found;
  whole.name = "wrongchip";
  whole.operators = names;
  whole.find_operator = find_operator;
  *found = &whole;
  return ANYCHIP_OK;
}
