/* asyncchip with one mistake, which WRONG_CHIP names: such as no check of the table can refuse. */
#define anychip_entry asyncchip_entry
#include "../../../examples/asyncchip/asyncchip.c"
#undef anychip_entry

static anychip_status done_at_once(int32_t device, uint64_t handle) {
  (void)handle;
  return is_device(device) ? ANYCHIP_OK : ANYCHIP_EINVAL;
}
static anychip_status says_done(int32_t device, uint64_t handle, int32_t* done) {
  *done = 1;
  return done_at_once(device, handle);
}
static anychip_status never_waits(int32_t device, uint64_t handle, uint64_t on) {
  return done_at_once(device, handle + on);
}
static anychip_status more_free_than_there_is(int32_t device, uint64_t* free, uint64_t* total) {
  const anychip_status status = mem_info(device, free, total);
  *free = 2 * *total;
  return status;
}
static anychip_status drops_tail(int32_t device, anychip_memory target, int64_t offset,
                                 const void* source, uint64_t nbytes, anychip_stream on) {
  return host_to_device(device, target, offset, source, nbytes > 64 ? nbytes - 4 : nbytes, on);
}
static anychip_status one_too_many(int32_t* count) {
  *count = NUM_DEVICES + 1;
  return ANYCHIP_OK;
}

/* An operator with the same call but for one thing. */
static anychip_operator right;
static int is_spoiled, is_flat, is_on_default;
static anychip_status bent(const anychip_call* call) {
  anychip_tensor source = *argument(call, 0);
  anychip_argument first = *call->arguments[0];
  const anychip_argument* given[] = {&first, NULL, NULL};
  anychip_call other = *call;
  for (uint32_t i = 1; i < call->num_arguments && i < 3; ++i) given[i] = call->arguments[i];
  if (is_on_default) other.stream = 0;
  int64_t n = 1;
  for (int d = source.ndim - 1; is_flat && d >= 0; n *= source.size[d--]) source.stride[d] = n;
  first.v.tensor = &source;
  other.arguments = given;
  if (is_spoiled && call->results[0]->dtype == ANYCHIP_FLOAT32) {
    zero(call);
    return ANYCHIP_ENOTSUP;
  }
  return right(&other);
}
static anychip_operator find_bent(const char* name) {
  const anychip_operator found = find_operator(name);
  if (strcmp(name, is_flat ? "copy" : "mul.Tensor")) return found;
  right = found;
  return bent;
}

anychip_status anychip_entry(uint32_t abi_major, const anychip_host* given,
                             const anychip_library** found) {
  static anychip_library table;
  const char* wrong = getenv("WRONG_CHIP");
  const anychip_status status = asyncchip_entry(abi_major, given, found);
  if (status || !wrong) return status;
  table = **found;
  *found = &table;
  table.find_operator = find_bent;
  is_spoiled = !strcmp(wrong, "writes-before-enotsup");
  is_flat = !strcmp(wrong, "ignores-strides");
  is_on_default = !strcmp(wrong, "operator-on-default-stream");
  if (!strcmp(wrong, "event-done-early")) table.event_query = says_done;
  if (!strcmp(wrong, "event-never-waits")) table.event_wait = never_waits;
  if (!strcmp(wrong, "stream-always-idle")) table.stream_query = says_done;
  if (!strcmp(wrong, "copy-returns-early")) table.stream_synchronize = done_at_once;
  if (!strcmp(wrong, "free-above-total")) table.mem_info = more_free_than_there_is;
  if (!strcmp(wrong, "copy-drops-tail")) table.host_to_device = drops_tail;
  if (!strcmp(wrong, "one-device-too-many")) table.device_count = one_too_many;
  return ANYCHIP_OK;
}
