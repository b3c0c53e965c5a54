// Door 2 without the interpreter: guard, key, row and count of one call of an operator.
//
// anychip/dispatch/operator.py has the same in Python, which is the reference: what is unusual
// (a mode, a transform, a tensor that is not plain, an argument by name) is left to it, before
// anything was counted. No libtorch: a tensor is asked by DLPack's C exchange API (version 1,
// https://dmlc.github.io/dlpack), which torch's Tensor has, and by what operator.py hands over.
//
// Threads: everything happens under the interpreter's lock. Whatever may release it (a row, a
// check, torch's getters) is called with counted references alone, and no state is kept over it
// but an Entry in use.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

enum { ABI = 1, ALIGNMENT = 64, MOST_ARGS = 24, MOST_FACTS = 64, MOST_ENTRIES = 32 };

// What connect() is given, by name.
// clang-format off
#define GIVEN(X)                                                                                 \
  X(Tensor) X(Parameter) X(exchange) X(dlpack_device) X(device) X(requires_grad) X(is_neg)       \
  X(guards) X(compiler) X(forward_ad) X(selection) X(deterministic) X(grad_enabled)              \
  X(examined) X(refuse_end) X(run_written) X(apply) X(forward)

// Names of attributes that are asked for.
#define NAMES(X)                                                                                 \
  X(__call__) X(_current_level) X(_is_compiling_flag) X(call) X(choices) X(current) X(find)      \
  X(num_outputs) X(outputs) X(parts) X(pick) X(places) X(to_save)
// clang-format on

#define AS_ENUM(name) GIVEN_##name,
enum { GIVEN(AS_ENUM) NUM_GIVEN };
#undef AS_ENUM
#define AS_ENUM(name) NAME_##name,
enum { NAMES(AS_ENUM) NUM_NAMES };
#define AS_TEXT(name) #name,
static const char* const given_names[] = {GIVEN(AS_TEXT)};
static const char* const name_texts[] = {NAMES(AS_TEXT)};
static PyObject* given[NUM_GIVEN];
static PyObject* names[NUM_NAMES];
static PyObject* python_call;  // Operator.__call__ as Python has it
static PyObject* strangers;    // devices that DLPack has no name for: meta, and some chips

#define GET(object, name) PyObject_GetAttr(object, names[NAME_##name])

// ---- DLPack 1: what this file reads of it

typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  uint32_t major, minor;
  void* previous;
  void (*unused[3])(void);
  int (*tensor_of)(void* object, DLTensor* tensor);  // borrowed, until Python code runs
  void (*stream)(void);
} DLExchange;

static const DLExchange* exchange;

// ---- what a call is told apart by

// A tensor; or dtype 0: layout 0 for None, 1 + n for a list of n different tensors, which follow.
typedef struct {
  uint32_t dtype, layout;  // code, bits and lanes; alignment in bytes, and CONTIGUOUS
  int32_t device_type, device_id;
} Fact;

enum { CONTIGUOUS = 2 * ALIGNMENT };

typedef struct {
  Fact facts[MOST_FACTS];
  int count;
  bool grad, deterministic, known;  // known: the device of the first tensor is no stranger
} Key;

// Choice.parts of resolution.py: a tuple in this order.
enum { FUNCTION, COUNTER, TURN, UNEXAMINED, CONDITIONAL, PAIRED, NUM_PARTS };

// A key and its plan; freed when nobody uses it and no operator has it.
typedef struct {
  Py_ssize_t uses;
  PyObject *plan, *choice, *parts;  // choice NULL: the plan must be asked on every call
  Key key;
} Entry;

// What an operator keeps; all but the last is given to prepare().
enum { KERNEL, CHECK, GRADIENT, SPEC, ATTRS, ATTR_TYPES, DEFAULTS, STATE, NUM_REFS };

typedef struct {
  PyObject ob_base;
  vectorcallfunc vectorcall;
  PyObject* refs[NUM_REFS];
  Py_ssize_t arity, num_attrs, num_outputs;
  int writes, num_entries;
  Entry* entries[MOST_ENTRIES];
} ShortCut;

static void release(Entry* entry) {
  if (--entry->uses) return;
  Py_XDECREF(entry->plan);
  Py_XDECREF(entry->choice);
  Py_XDECREF(entry->parts);
  PyMem_Free(entry);
}

// Freeing may run code that comes back here: what it finds must be consistent.
static void forget(ShortCut* self) {
  while (self->num_entries) release(self->entries[--self->num_entries]);
}

// 1 or 0 for what a function returned, which is given up; -1 for its error.
static int truth(PyObject* found) {
  if (found == NULL) return -1;
  int is_true = found == Py_True ? 1 : found == Py_False ? 0 : PyObject_IsTrue(found);
  Py_DECREF(found);
  return is_true;
}

static PyObject* tuple_of(PyObject* const* items, Py_ssize_t count) {
  PyObject* made = PyTuple_New(count);
  for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
    Py_INCREF(items[i]);
    PyTuple_SET_ITEM(made, i, items[i]);
  }
  return made;
}

// kernel.nothing_special() and torch.compiler.is_compiling(): 1 when the call is not for here.
static int is_special(void) {
  PyObject* flag = PyDict_GetItemWithError(given[GIVEN_compiler], names[NAME__is_compiling_flag]);
  if (flag != Py_False) return PyErr_Occurred() ? -1 : 1;
  PyObject* level = PyDict_GetItemWithError(given[GIVEN_forward_ad], names[NAME__current_level]);
  if (level == NULL) return PyErr_Occurred() ? -1 : 1;
  if (PyLong_AsLong(level) >= 0) return 1;
  if (PyErr_Occurred()) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[GIVEN_guards]); i++) {
    PyObject* guard = PyTuple_GET_ITEM(given[GIVEN_guards], i);
    PyObject* found = PyObject_Vectorcall(guard, NULL, 0, NULL);
    if (found == Py_None) {
      Py_DECREF(found);
      continue;
    }
    int special = truth(found);
    if (special) return special;
  }
  return 0;
}

static bool is_contiguous(const DLTensor* tensor) {
  int64_t step = 1;
  for (int i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->shape[i] == 1) continue;
    if (tensor->strides[i] != step) return false;
    step *= tensor->shape[i];
  }
  return true;
}

static PyObject* get(int descriptor, PyObject* tensor) {
  PyObject* getter = given[descriptor];
  return Py_TYPE(getter)->tp_descr_get(getter, tensor, (PyObject*)Py_TYPE(tensor));
}

// 1 when a tensor's device is among the strangers; with `look`, which is slow, after asking DLPack
// whether it belongs there: of a tensor without elements, as other layouts have no answer. An error
// of DLPack takes a millisecond: it is met once per device.
static int is_stranger(PyObject* tensor, bool look) {
  if (!look && PyList_GET_SIZE(strangers) == 0) return 0;
  PyObject* device = get(GIVEN_device, tensor);
  int found = device == NULL ? -1 : PySequence_Contains(strangers, device);
  if (found == 0 && look) {
    PyObject* name = PyObject_Vectorcall(given[GIVEN_dlpack_device], &tensor, 1, NULL);
    if (name == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
      PyErr_Clear();
      found = PyList_Append(strangers, device) < 0 ? -1 : 1;
    } else if (name == NULL) {
      found = -1;
    }
    Py_XDECREF(name);
  }
  Py_XDECREF(device);
  return found;
}

// 1: added. 0: not plain. -1: an error. A tensor of a list is added once: from is the list's.
static int add_tensor(Key* key, int from, PyObject* tensor) {
  PyObject* kind = (PyObject*)Py_TYPE(tensor);
  if (kind != given[GIVEN_Tensor] && kind != given[GIVEN_Parameter]) return 0;
  if (key->count == MOST_FACTS) return 0;
  int is_true = truth(PyObject_Vectorcall(given[GIVEN_is_neg], &tensor, 1, NULL));
  if (is_true) return is_true < 0 ? -1 : 0;
  is_true = truth(get(GIVEN_requires_grad, tensor));
  if (is_true < 0) return -1;
  key->grad |= is_true;
  if (!key->known) {
    is_true = is_stranger(tensor, false);
    if (is_true) return is_true < 0 ? -1 : 0;
    key->known = true;
  }
  DLTensor seen;
  if (exchange->tensor_of(tensor, &seen) != 0) {  // sparse, a batch of vmap, a strange dtype
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return is_stranger(tensor, true) < 0 ? -1 : 0;
  }
  if (seen.data == NULL) return 0;  // empty, meta or fake: Python looks closer
  uintptr_t address = ((uintptr_t)seen.data + seen.byte_offset) | ALIGNMENT;
  Fact fact = {.dtype = seen.code | (uint32_t)seen.bits << 8 | (uint32_t)seen.lanes << 16,
               .layout = (uint32_t)(address & (~address + 1)),
               .device_type = seen.device_type,
               .device_id = seen.device_id};
  if (is_contiguous(&seen)) fact.layout |= CONTIGUOUS;
  for (int i = from; from && i < key->count; i++)
    if (memcmp(&key->facts[i], &fact, sizeof fact) == 0) return 1;
  key->facts[key->count++] = fact;
  return 1;
}

// As add_tensor, for an argument: a tensor, None, or a list of tensors.
static int add_argument(Key* key, PyObject* arg) {
  if (!PyList_CheckExact(arg) && !PyTuple_CheckExact(arg) && arg != Py_None)
    return add_tensor(key, 0, arg);
  if (key->count == MOST_FACTS) return 0;
  int place = key->count++;
  key->facts[place] = (Fact){0};
  if (arg == Py_None) return 1;
  // The length is asked again each time: another thread may change the list.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arg); i++) {
    PyObject* entry = PySequence_Fast_GET_ITEM(arg, i);
    Py_INCREF(entry);
    int added = add_tensor(key, place + 1, entry);
    Py_DECREF(entry);
    if (added != 1) return added;
  }
  key->facts[place].layout = (uint32_t)(key->count - place);
  return 1;
}

static bool same_key(const Key* one, const Key* other) {
  return one->count == other->count && one->grad == other->grad &&
         one->deterministic == other->deterministic &&
         memcmp(one->facts, other->facts, (size_t)one->count * sizeof(Fact)) == 0;
}

// ---- from the key to the row

// Choice.parts, a new reference.
static PyObject* parts_of(PyObject* choice) {
  PyObject* parts = GET(choice, parts);
  if (parts != NULL && (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != NUM_PARTS)) {
    PyErr_SetString(PyExc_TypeError, "Choice.parts is not what this module was built for");
    Py_CLEAR(parts);
  }
  return parts;
}

// The next number of an itertools.count, which no other thread gets; -1 is an error.
static long next_number(PyObject* counter) {
  PyObject* number = Py_TYPE(counter)->tp_iternext(counter);
  if (number == NULL) return -1;
  long found = (long)(PyLong_AsUnsignedLongMask(number) & LONG_MAX);
  Py_DECREF(number);
  return found;
}

// promise.run().
static PyObject* run(PyObject* choice, PyObject* parts, PyObject* const* args, Py_ssize_t count,
                     PyObject* attrs) {
  long turn = next_number(PyTuple_GET_ITEM(parts, TURN));
  if (turn < 0) return NULL;
  PyObject *found, *kind, *error, *traceback;
  if (turn & PyLong_AsLong(PyTuple_GET_ITEM(parts, UNEXAMINED))) {
    found = PyObject_VectorcallDict(PyTuple_GET_ITEM(parts, FUNCTION), args, (size_t)count, attrs);
  } else {
    PyObject* bound = tuple_of(args, count);
    if (bound == NULL) return NULL;
    found = PyObject_CallFunctionObjArgs(given[GIVEN_examined], choice, bound, attrs, NULL);
    Py_DECREF(bound);
  }
  if (found != NULL || PyErr_ExceptionMatches(PyExc_Exception) ||
      PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
    return found;
  PyErr_Fetch(&kind, &error, &traceback);
  PyErr_NormalizeException(&kind, &error, &traceback);
  if (traceback != NULL) PyException_SetTraceback(error, traceback);
  found = PyObject_CallFunctionObjArgs(given[GIVEN_refuse_end], choice, error, NULL);
  Py_XDECREF(kind);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  return found;  // NULL: it raises
}

// The entry of a key that was not seen: Kernel.find() resolves it. NULL without an error: not plain
// after all. The entry is the caller's; the operator keeps it unless the selection has changed.
static Entry* resolve(ShortCut* self, const Key* key, PyObject* const* args) {
  PyObject *state = self->refs[STATE], *plan = NULL, *choices = NULL, *now;
  Entry* entry = NULL;
  PyObject* bound = tuple_of(args, self->arity);
  if (bound == NULL) return NULL;
  Py_XINCREF(state);
  plan = PyObject_CallMethodObjArgs(self->refs[KERNEL], names[NAME_find], bound, NULL);
  if (plan == NULL || plan == Py_None || (choices = GET(plan, choices)) == NULL) goto done;
  if ((entry = PyMem_Malloc(sizeof *entry)) == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  *entry = (Entry){.uses = 1, .plan = plan, .key = *key};
  Py_INCREF(plan);
  if (PyTuple_GET_SIZE(choices)) {
    entry->parts = parts_of(PyTuple_GET_ITEM(choices, 0));
    if (entry->parts != NULL && PyTuple_GET_ITEM(entry->parts, CONDITIONAL) == Py_False) {
      entry->choice = PyTuple_GET_ITEM(choices, 0);
      Py_INCREF(entry->choice);
    }
  }
  now = PyDict_GetItemWithError(given[GIVEN_selection], names[NAME_current]);
  if (PyErr_Occurred()) {
    release(entry);
    entry = NULL;
  } else if (state == now && state == self->refs[STATE]) {
    if (self->num_entries == MOST_ENTRIES) forget(self);
    if (self->num_entries < MOST_ENTRIES) {
      entry->uses++;
      self->entries[self->num_entries++] = entry;
    }
  }
done:
  Py_DECREF(bound);
  Py_XDECREF(choices);
  Py_XDECREF(plan);
  Py_XDECREF(state);
  return entry;
}

// The entry of a key, to be released; NULL as from resolve().
static Entry* find(ShortCut* self, const Key* key, PyObject* const* args) {
  PyObject* state = PyDict_GetItemWithError(given[GIVEN_selection], names[NAME_current]);
  if (state == NULL) return NULL;
  if (state != self->refs[STATE]) {
    Py_INCREF(state);
    Py_XSETREF(self->refs[STATE], state);
    forget(self);
  }
  for (int i = 0; i < self->num_entries; i++) {
    if (same_key(&self->entries[i]->key, key)) {
      self->entries[i]->uses++;
      return self->entries[i];
    }
  }
  return resolve(self, key, args);
}

// The choice of a call, counted, a new reference: the end of Kernel.choose().
static PyObject* choose(ShortCut* self, Entry* entry, PyObject* const* args, PyObject* attrs) {
  if (self->refs[CHECK] != Py_None) {
    PyObject* none = PyObject_VectorcallDict(self->refs[CHECK], args, (size_t)self->arity, attrs);
    if (none == NULL) return NULL;
    Py_DECREF(none);
  }
  PyObject *choice = entry->choice, *bound;
  if (choice != NULL) {
    if (next_number(PyTuple_GET_ITEM(entry->parts, COUNTER)) < 0) return NULL;
    Py_INCREF(choice);
    return choice;
  }
  if ((bound = tuple_of(args, self->arity)) == NULL) return NULL;
  choice = PyObject_CallMethodObjArgs(entry->plan, names[NAME_pick], self->refs[SPEC], bound, attrs,
                                      NULL);
  Py_DECREF(bound);
  return choice;
}

// Operator.outputs().
static PyObject* outputs(ShortCut* self, PyObject* results) {
  if (results == NULL || (PyObject*)Py_TYPE(results) == given[GIVEN_Tensor]) return results;
  PyObject* found;
  if (!PyTuple_CheckExact(results))
    found = PyObject_CallMethodObjArgs((PyObject*)self, names[NAME_outputs], results, NULL);
  else if (self->num_outputs == 1)
    found = PySequence_GetItem(results, 0);
  else
    found = PyTuple_GetSlice(results, 0, self->num_outputs);
  Py_DECREF(results);
  return found;
}

// Runs the row that an entry gives, recorded or not: the end of Operator.short_cut().
static PyObject* run_entry(ShortCut* self, Entry* entry, PyObject* const* args, PyObject* attrs) {
  PyObject *found = NULL, *detail = NULL, *choice = choose(self, entry, args, attrs);
  if (choice == NULL) return NULL;
  int records = entry->key.grad && self->refs[GRADIENT] != Py_None;
  if (records) records = truth(PyObject_Vectorcall(given[GIVEN_grad_enabled], NULL, 0, NULL));
  if (records == 1) {
    PyObject* all[1 + MOST_ARGS];
    all[0] = detail = PyTuple_Pack(3, self->refs[GRADIENT], choice, attrs);
    memcpy(all + 1, args, (size_t)self->arity * sizeof *args);
    if (detail != NULL)
      found = PyObject_Vectorcall(given[GIVEN_apply], all, (size_t)self->arity + 1, NULL);
  } else if (records == 0 && self->writes) {
    if ((detail = tuple_of(args, self->arity)) != NULL)
      found = PyObject_CallFunctionObjArgs(given[GIVEN_run_written], (PyObject*)self, choice,
                                           detail, attrs, NULL);
  } else if (records == 0 && (entry->choice != NULL || (detail = parts_of(choice)) != NULL)) {
    found = run(choice, detail == NULL ? entry->parts : detail, args, self->arity, attrs);
    if (self->refs[GRADIENT] != Py_None) found = outputs(self, found);
  }
  Py_XDECREF(detail);
  Py_DECREF(choice);
  return found;
}

// The attributes of a call, a new reference; NULL without an error: Python must look at them.
static PyObject* attributes(ShortCut* self, PyObject* const* values, PyObject* kwnames) {
  PyObject* attrs = self->refs[ATTRS];
  if (kwnames == NULL || PyTuple_GET_SIZE(kwnames) == 0) {
    if (PyDict_GET_SIZE(attrs) != self->num_attrs) return NULL;
    Py_INCREF(attrs);
    return attrs;
  }
  attrs = PyDict_Copy(attrs);
  for (Py_ssize_t i = 0; attrs != NULL && i < PyTuple_GET_SIZE(kwnames); i++) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, i);
    PyObject* kind = PyDict_GetItemWithError(self->refs[ATTR_TYPES], name);
    if (kind != (PyObject*)Py_TYPE(values[i]) || PyDict_SetItem(attrs, name, values[i]) < 0)
      Py_CLEAR(attrs);
  }
  if (attrs != NULL && PyDict_GET_SIZE(attrs) != self->num_attrs) Py_CLEAR(attrs);
  return attrs;
}

// What a call gives, or NotImplemented where door 1 has to be asked: Operator.short_cut().
static PyObject* short_cut(ShortCut* self, PyObject* const* args, Py_ssize_t count,
                           PyObject* kwnames) {
  PyObject *bound[MOST_ARGS], *found = NULL;
  if (self->arity < count) Py_RETURN_NOTIMPLEMENTED;
  Py_ssize_t missing = self->arity - count;
  PyObject* defaults = self->refs[DEFAULTS];
  if (missing > PyTuple_GET_SIZE(defaults)) Py_RETURN_NOTIMPLEMENTED;
  int special = is_special();
  if (special < 0) return NULL;
  if (special) Py_RETURN_NOTIMPLEMENTED;
  PyObject* attrs = attributes(self, args + count, kwnames);
  if (attrs == NULL) {
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NOTIMPLEMENTED;
  }
  Key key;
  key.count = 0;
  key.grad = key.known = false;
  int plain = truth(PyObject_Vectorcall(given[GIVEN_deterministic], NULL, 0, NULL));
  key.deterministic = plain == 1;
  if (plain >= 0) plain = 1;
  for (Py_ssize_t i = 0; i < self->arity && plain == 1; i++) {
    bound[i] = i < count ? args[i]
                         : PyTuple_GET_ITEM(defaults, PyTuple_GET_SIZE(defaults) - self->arity + i);
    plain = add_argument(&key, bound[i]);
  }
  Entry* entry = plain == 1 ? find(self, &key, bound) : NULL;
  if (entry != NULL) {
    found = run_entry(self, entry, bound, attrs);
    release(entry);
  } else if (!PyErr_Occurred()) {
    found = Py_NotImplemented;
    Py_INCREF(found);
  }
  Py_DECREF(attrs);
  return found;
}

static PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  PyObject* found = short_cut((ShortCut*)self, args, count, kwnames);
  if (found != Py_NotImplemented) return found;
  Py_DECREF(found);
  PyObject* method = PyMethod_New(python_call, self);
  if (method == NULL) return NULL;
  found = PyObject_Vectorcall(method, args, (size_t)count, kwnames);
  Py_DECREF(method);
  return found;
}

// ---- the type

static PyObject* new_short_cut(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  (void)args, (void)kwargs;
  ShortCut* self = (ShortCut*)type->tp_alloc(type, 0);
  if (self != NULL) {
    self->vectorcall = call;
    self->arity = -1;  // nothing is taken before prepare()
  }
  return (PyObject*)self;
}

static int traverse(ShortCut* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (int i = 0; i < NUM_REFS; i++) Py_VISIT(self->refs[i]);
  return 0;
}

static int clear(ShortCut* self) {
  self->arity = -1;
  forget(self);
  for (int i = 0; i < NUM_REFS; i++) Py_CLEAR(self->refs[i]);
  return 0;
}

static void dealloc(ShortCut* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject* prepare(ShortCut* self, PyObject* args) {
  PyObject* all[NUM_REFS] = {0};
  Py_ssize_t arity;
  if (!PyArg_ParseTuple(args, "OOOOO!O!O!nnnp", &all[KERNEL], &all[CHECK], &all[GRADIENT],
                        &all[SPEC], &PyDict_Type, &all[ATTRS], &PyDict_Type, &all[ATTR_TYPES],
                        &PyTuple_Type, &all[DEFAULTS], &arity, &self->num_attrs, &self->num_outputs,
                        &self->writes))
    return NULL;
  for (int i = 0; i < NUM_REFS; i++) {
    Py_XINCREF(all[i]);
    Py_XSETREF(self->refs[i], all[i]);
  }
  self->arity = arity <= MOST_ARGS ? arity : -1;
  Py_RETURN_NONE;
}

static PyObject* take(ShortCut* self, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  return short_cut(self, args, count, kwnames);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ShortCut, vectorcall), READONLY, NULL}, {0}};

static PyMethodDef methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_VARARGS, NULL},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL | METH_KEYWORDS, NULL},
    {0}};

static PyType_Slot slots[] = {{Py_tp_new, new_short_cut},      {Py_tp_dealloc, dealloc},
                              {Py_tp_traverse, traverse},      {Py_tp_clear, clear},
                              {Py_tp_members, members},        {Py_tp_methods, methods},
                              {Py_tp_call, PyVectorcall_Call}, {0, NULL}};

static PyType_Spec spec = {
    "anychip.dispatch._native.ShortCut", sizeof(ShortCut), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    slots};

// ---- the module

// Calls of a subclass's instances come here, though it defines __call__: a compiler still finds
// that one in the class and looks into it, and what is unusual ends there.
static PyObject* take_calls(PyObject* module, PyObject* type) {
  (void)module;
  PyTypeObject* subclass = (PyTypeObject*)type;
  if (!PyType_Check(type) || subclass->tp_vectorcall_offset != offsetof(ShortCut, vectorcall)) {
    PyErr_SetString(PyExc_TypeError, "a subclass of ShortCut expected");
    return NULL;
  }
  PyObject* found = GET(type, __call__);
  if (found == NULL) return NULL;
  Py_XSETREF(python_call, found);
  subclass->tp_call = PyVectorcall_Call;
  subclass->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  PyType_Modified(subclass);
  Py_INCREF(type);
  return type;
}

// forward(ctx, (gradient, choice, attrs), *args): autograd.Node.forward.
static PyObject* forward(PyObject* module, PyObject* const* all, Py_ssize_t count) {
  (void)module;
  if (count < 2 || !PyTuple_Check(all[1]) || PyTuple_GET_SIZE(all[1]) != 3)
    return PyErr_Format(PyExc_TypeError, "forward(ctx, (gradient, choice, attrs), *args)");
  PyObject *gradient = PyTuple_GET_ITEM(all[1], 0), *choice = PyTuple_GET_ITEM(all[1], 1);
  PyObject *parts = parts_of(choice), *places = NULL, *kept = NULL, *found = NULL, *number = NULL;
  if (parts == NULL) return NULL;
  if (PyTuple_GET_ITEM(parts, PAIRED) == Py_True) {
    Py_DECREF(parts);
    return PyObject_Vectorcall(given[GIVEN_forward], all, (size_t)count, NULL);
  }
  PyObject* results = run(choice, parts, all + 2, count - 2, PyTuple_GET_ITEM(all[1], 2));
  Py_DECREF(parts);
  if (results == NULL) return NULL;
  if ((PyObject*)Py_TYPE(results) == given[GIVEN_Tensor])
    Py_SETREF(results, PyTuple_Pack(1, results));
  if (results == NULL || PyObject_SetAttr(all[0], names[NAME_call], all[1]) < 0) goto done;
  if ((places = GET(gradient, places)) == NULL) goto done;
  if ((kept = PyTuple_New(PyTuple_GET_SIZE(places))) == NULL) goto done;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
    long place = PyLong_AsLong(PyTuple_GET_ITEM(places, i));  // an argument, or ~ a result
    PyObject* tensor = place < 0 ? PySequence_GetItem(results, ~place) : all[2 + place];
    if (tensor == NULL) goto done;
    if (place >= 0) Py_INCREF(tensor);
    PyTuple_SET_ITEM(kept, i, tensor);
  }
  if (PyTuple_GET_SIZE(kept) && PyObject_SetAttr(all[0], names[NAME_to_save], kept) < 0) goto done;
  if ((number = GET(gradient, num_outputs)) == NULL) goto done;
  Py_ssize_t num_outputs = PyLong_AsSsize_t(number);
  if (num_outputs == 1) {
    found = PySequence_GetItem(results, 0);
  } else {
    PyObject* some = PySequence_GetSlice(results, 0, num_outputs);
    found = some == NULL ? NULL : PySequence_Tuple(some);
    Py_XDECREF(some);
  }
done:
  Py_XDECREF(number);
  Py_XDECREF(kept);
  Py_XDECREF(places);
  Py_XDECREF(results);
  return found;
}

// Takes the objects that this file asks about tensors and modes, all of them by name.
static PyObject* connect(PyObject* module, PyObject* args, PyObject* kwargs) {
  (void)module, (void)args;
  for (int i = 0; i < NUM_GIVEN; i++) {
    PyObject* object = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, given_names[i]);
    if (object == NULL) return PyErr_Format(PyExc_TypeError, "%s is missing", given_names[i]);
    Py_INCREF(object);
    Py_XSETREF(given[i], object);
  }
  if (Py_TYPE(given[GIVEN_requires_grad])->tp_descr_get == NULL ||
      Py_TYPE(given[GIVEN_device])->tp_descr_get == NULL)
    return PyErr_Format(PyExc_TypeError, "requires_grad and device are no descriptors");
  exchange = PyCapsule_GetPointer(given[GIVEN_exchange], "dlpack_exchange_api");
  if (exchange == NULL) return NULL;
  if (exchange->major != 1 || exchange->tensor_of == NULL)
    return PyErr_Format(PyExc_TypeError, "torch has DLPack %u, and 1 is expected", exchange->major);
  Py_RETURN_NONE;
}

static int execute(PyObject* module) {
  // State is static: one interpreter has it.
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(PyExc_ImportError, "anychip.dispatch._native serves no sub-interpreter");
    return -1;
  }
  for (int i = 0; i < NUM_NAMES; i++)
    if ((names[i] = PyUnicode_InternFromString(name_texts[i])) == NULL) return -1;
  if ((strangers = PyList_New(0)) == NULL) return -1;
  PyObject* type = PyType_FromSpec(&spec);
  if (type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "ShortCut", type);
  Py_DECREF(type);
  return failed < 0 ? -1 : PyModule_AddIntMacro(module, ABI);
}

static PyMethodDef functions[] = {
    {"connect", (PyCFunction)(void (*)(void))connect, METH_VARARGS | METH_KEYWORDS, NULL},
    {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL},
    {"take_calls", take_calls, METH_O, NULL},
    {0}};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0,   functions,
                                        module_slots,          NULL,      NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
