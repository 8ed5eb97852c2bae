// The fast path: attention of tensors in plain memory, from the public function to the kernel in one
// call, and its gradients in another. fastattn/dispatch/fast_path.py says which calls take it.
//
//   attend(path, q, k, v, ..., named)   named: a dict of further arguments
//   gradients(plan, tensors, grads)     of a call that `attend` recorded: Function.backward's result
//   differentiate(path, *grads, *results, q, k, v, ..., named)
//                                       the gradients of q, k and v, of a call that nothing recorded
//   forget_plans()                      forgets all plans
//
// The first three return None for a call that the general path has to run or to refuse. `path` is a
// tuple: see `Path` below.
#pragma once
#include "tensors.h"

namespace {

// A reference that its scope owns.
class Ref {
 public:
  explicit Ref(PyObject* x) : x_(x) {}
  ~Ref() { Py_XDECREF(x_); }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  PyObject* get() const { return x_; }
  PyObject* release() {
    PyObject* x = x_;
    x_ = nullptr;
    return x;
  }
  explicit operator bool() const { return x_; }

 private:
  PyObject* x_;
};

enum Answer { kError = -1, kNo = 0, kYes = 1 };  // kError: with a Python exception

Answer not_(Answer x) { return x == kError ? kError : x == kYes ? kNo : kYes; }

bool has_members(PyObject* x, Py_ssize_t expected) {
  if (PyTuple_Check(x) && PyTuple_Size(x) == expected) return true;
  PyErr_Format(PyExc_TypeError, "expected a tuple of %zd", expected);
  return false;
}

// The members of a path, tuples among them.
struct Path {
  static constexpr Py_ssize_t kMembers = 7;
  PyObject* make_plan;     // (q, k, v, ..., named) -> what `read` reads, or None
  PyObject* states;        // function, what it returns where no subsystem of torch acts, ...
  PyObject* globals;       // dict of a module, name, its value then, a function or None, ...
  PyObject* grad_enabled;  // torch.is_grad_enabled
  PyObject* threads;       // torch.get_num_threads
  PyObject* numbers;       // dict: name of an argument -> its number
  PyObject* record;        // ((recorded, results, plan), *tensors) -> results, with autograd's node
  explicit Path(PyObject* path)
      : make_plan(PyTuple_GetItem(path, 0)),
        states(PyTuple_GetItem(path, 1)),
        globals(PyTuple_GetItem(path, 2)),
        grad_enabled(PyTuple_GetItem(path, 3)),
        threads(PyTuple_GetItem(path, 4)),
        numbers(PyTuple_GetItem(path, 5)),
        record(PyTuple_GetItem(path, 6)) {}
};

// kYes if a subsystem of torch acts on calls. A global may have a function: it is called for other
// values, and returns whether the subsystem acts.
Answer acts_on_calls(const Path& path) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(path.states); i < n; i += 2) {
    const Ref found(PyObject_CallNoArgs(PyTuple_GetItem(path.states, i)));
    if (!found) return kError;
    if (found.get() != PyTuple_GetItem(path.states, i + 1)) return kYes;
  }
  for (Py_ssize_t i = 0, n = PyTuple_Size(path.globals); i < n; i += 4) {
    PyObject* name = PyTuple_GetItem(path.globals, i + 1);
    PyObject* found = PyDict_GetItemWithError(PyTuple_GetItem(path.globals, i), name);  // borrowed
    if (!found && PyErr_Occurred()) return kError;
    if (found == PyTuple_GetItem(path.globals, i + 2)) continue;
    PyObject* acts = PyTuple_GetItem(path.globals, i + 3);
    if (acts == Py_None) return kYes;
    const Ref answer(PyObject_CallNoArgs(acts));
    if (!answer) return kError;
    if (answer.get() != Py_False) return kYes;
  }
  return kNo;
}

Answer is_true(PyObject* function) {
  const Ref answer(PyObject_CallNoArgs(function));
  if (!answer) return kError;
  return answer.get() == Py_False ? kNo : kYes;
}

PyObject *requires_grad_name, *new_empty_strided;

// --- the arguments ------------------------------------------------------------------------------

constexpr int kMostTensors = 12, kMostWords = 192;

// How a tensor lies in the CPU's memory.
struct Layout {
  int64_t kind, size[4], stride[4];

  // False for more dimensions, or other memory.
  bool set(const DLTensor& x) {
    constexpr int32_t kCpu = 1;  // DLDeviceType
    if (x.ndim > 4 || x.device != kCpu) return false;
    std::memset(this, 0, sizeof *this);
    kind = x.code | int64_t(x.bits) << 8 | int64_t(x.lanes) << 16 | int64_t(x.ndim) << 32;
    for (int32_t i = 0; i < x.ndim; ++i) size[i] = x.shape[i], stride[i] = x.strides[i];
    return true;
  }
  bool is(const DLTensor& x) const {
    Layout other;
    return other.set(x) && std::memcmp(this, &other, sizeof other) == 0;
  }
};

// All of a call's arguments but the numbers in its tensors. Calls with equal keys share a plan.
struct Key {
  int64_t words[kMostWords];
  int32_t used = 0;

  bool add(const void* x, size_t bytes) {
    const auto count = int32_t((bytes + 7) / 8);
    if (used + count > kMostWords) return false;
    if (count) words[used + count - 1] = 0;
    std::memcpy(words + used, x, bytes);
    used += count;
    return true;
  }
  bool add(int64_t x) { return add(&x, sizeof x); }
  uint64_t hash() const {
    uint64_t found = used;
    for (int32_t i = 0; i < used; ++i)
      found = (found ^ uint64_t(words[i])) * 0x9E3779B97F4A7C15u, found ^= found >> 32;
    // Once more: the high bits of the last word, of a double, have not reached the low bits yet.
    found *= 0x9E3779B97F4A7C15u;
    return found ^ found >> 32;
  }
  bool operator==(const Key& other) const {
    return used == other.used && std::memcmp(words, other.words, used * sizeof *words) == 0;
  }
};

struct Call {
  Key key;
  int count = 0;
  PyObject* tensors[kMostTensors];  // borrowed
  DLTensor views[kMostTensors];
  Layout layouts[kMostTensors];
  bool varies[kMostTensors];  // requires_grad
};

enum Tag { kNone, kFalse, kTrue, kReal, kWhole, kText, kTuple, kVariable, kConstant };

Answer yes_if(bool x) { return x ? kYes : kNo; }

Answer add_tensor(Call& call, PyObject* x) {
  if (call.count == kMostTensors) return kNo;
  const int at = call.count++;
  DLTensor& d = call.views[at];
  if (!is_memory(x, d) || !call.layouts[at].set(d)) return kNo;
  call.tensors[at] = x;
  call.varies[at] = false;
  if (is_floating(d)) {  // others have no gradient, and are not read negated
    const auto plain = static_cast<Answer>(is_not_negated(x));
    if (plain != kYes) return plain;
    const Ref requires_grad(PyObject_GetAttr(x, requires_grad_name));
    if (!requires_grad) return kError;
    call.varies[at] = requires_grad.get() != Py_False;
  }
  return yes_if(call.key.add(call.varies[at] ? kVariable : kConstant) &&
                call.key.add(&call.layouts[at], sizeof(Layout)));
}

// kNo for what the general path converts or refuses. Whole numbers stand in tuples, or by position:
// a seed, which is given by name, is another one in each call.
Answer add(Call& call, PyObject* x, bool takes_int, bool takes_tuple) {
  Key& key = call.key;
  if (x == Py_None) return yes_if(key.add(kNone));
  if (x == Py_False || x == Py_True) return yes_if(key.add(x == Py_True ? kTrue : kFalse));
  if (is_of_torch(x)) return add_tensor(call, x);
  if (PyFloat_CheckExact(x)) {
    const double value = PyFloat_AsDouble(x);
    return yes_if(key.add(kReal) && key.add(&value, sizeof value));
  }
  if (PyLong_CheckExact(x) && takes_int) {
    int overflow;
    const int64_t value = PyLong_AsLongLongAndOverflow(x, &overflow);
    return yes_if(!overflow && key.add(kWhole) && key.add(value));
  }
  if (PyUnicode_CheckExact(x)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(x, &size);
    if (!text) PyErr_Clear();
    return yes_if(text && key.add(kText) && key.add(size) && key.add(text, size));
  }
  if (!PyTuple_CheckExact(x) || !takes_tuple) return kNo;
  const Py_ssize_t size = PyTuple_Size(x);
  Answer answer = yes_if(key.add(kTuple) && key.add(size));
  for (Py_ssize_t i = 0; i < size && answer == kYes; ++i)
    answer = add(call, PyTuple_GetItem(x, i), true, false);
  return answer;
}

Answer add_named(Call& call, PyObject* named, PyObject* numbers) {
  if (PyDict_Size(named) < 0) return kError;  // no dict
  Py_ssize_t at = 0;
  PyObject *name, *value;  // borrowed
  Answer answer = kYes;
  while (answer == kYes && PyDict_Next(named, &at, &name, &value)) {
    PyObject* number = PyDict_GetItemWithError(numbers, name);
    if (!number) return PyErr_Occurred() ? kError : kNo;
    answer = yes_if(call.key.add(PyLong_AsLongLong(number)));
    if (answer == kYes) answer = add(call, value, false, true);
  }
  return answer;
}

// --- plans --------------------------------------------------------------------------------------

using Run = decltype(&fa_cpu_run);

// How calls with one key run. It has no addresses of tensors.
struct FastPlan {
  Key key;
  PyObject* path;     // owned, so that no other has its address
  PyObject* capsule;  // which owns the plan
  PyObject* owned;    // a tuple of what the plan uses; None: the general path runs these calls
  int count;          // of the call's tensors
  Layout layouts[kMostTensors];
  bool varies[kMostTensors];

  Run run;
  bool brief;  // too short to release the GIL for
  FaCall call;
  struct Place {
    int64_t at;      // in FaCall
    int64_t offset;  // of what the kernel reads, in bytes from the tensor's address
    int64_t widen;   // the kernel takes int64, the tensor is contiguous and of int32
  } places[kMostTensors];

  // What follows is borrowed of `owned`.
  PyObject *shape, *strides;                                           // of out
  Py_ssize_t normaliser;                                               // its bytes
  PyObject *normaliser_shape, *normaliser_strides, *normaliser_dtype;  // keywords, or None
  PyObject* finish;    // normaliser -> what is returned beside out; None: nothing is
  PyObject* weights;   // (shape, strides) of the weights, which are returned beside out, or None
  PyObject* recorded;  // for the Function's context; null: calls of this key have no gradient

  int inputs;                   // of the Function
  int32_t order[kMostTensors];  // of each, its place among the call's tensors, or -1
  FaCall backward, weights_call;
  PyObject* grads[3];  // (shape, strides) of the gradients of q, k and v
  Layout out, saved_normaliser;
};

constexpr const char* kCapsule = "fastattn.plan";

void free_plan(PyObject* capsule) {
  auto* plan = static_cast<FastPlan*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (!plan) return;
  Py_XDECREF(plan->path);
  Py_XDECREF(plan->owned);
  PyMem_Free(plan);
}

// Plans lie in sets, by the hash of their key. A set has room for a few, the newest first: another
// one replaces the oldest.
constexpr uint64_t kSets = 64;
constexpr int kWays = 8;
FastPlan* plans[kSets][kWays];

PyObject* forget_plans(PyObject*, PyObject*) {
  for (auto& set : plans)
    for (FastPlan*& place : set) {
      FastPlan* plan = place;
      place = nullptr;
      if (plan) Py_DECREF(plan->capsule);
    }
  Py_RETURN_NONE;
}

FastPlan* find(const Key& key) {
  for (FastPlan* plan : plans[key.hash() % kSets])
    if (plan && plan->key == key) return plan;
  return nullptr;
}

bool copy(PyObject* from, void* to, size_t size) {
  char* bytes;
  Py_ssize_t found;
  if (PyBytes_AsStringAndSize(from, &bytes, &found)) return false;
  if (size_t(found) != size) {
    PyErr_Format(PyExc_ValueError, "got %zd bytes, expected %zu", found, size);
    return false;
  }
  std::memcpy(to, bytes, size);
  return true;
}

bool copy(PyObject* tensor, Layout& to) {
  DLTensor d;
  if (is_memory(tensor, d) && to.set(d)) return true;
  PyErr_SetString(PyExc_ValueError, "expected a tensor of at most four dimensions");
  return false;
}

// Reads (FaCall of backward, order, layouts of the gradients, out, normaliser, recorded).
bool read_gradient(PyObject* made, FastPlan& plan) {
  PyObject *call, *order, *grads, *out, *normaliser, *recorded;
  if (!PyArg_ParseTuple(made, "SSO!OOO", &call, &order, &PyTuple_Type, &grads, &out, &normaliser,
                        &recorded))
    return false;
  const Py_ssize_t inputs = PyBytes_Size(order) / Py_ssize_t(sizeof *plan.order);
  if (inputs < 3 || inputs > kMostTensors || !has_members(grads, 3)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "inputs: got another number");
    return false;
  }
  plan.inputs = int(inputs);
  if (!copy(call, &plan.backward, sizeof plan.backward)) return false;
  if (!copy(order, plan.order, inputs * sizeof *plan.order)) return false;
  for (int i = 0; i < plan.inputs; ++i)
    if (plan.order[i] >= plan.count || (i < 3 && plan.order[i] != i)) {
      PyErr_SetString(PyExc_ValueError, "order: got another one than that of the tensors");
      return false;
    }
  if (!copy(out, plan.out) || !copy(normaliser, plan.saved_normaliser)) return false;
  for (int i = 0; i < 3; ++i) {
    plan.grads[i] = PyTuple_GetItem(grads, i);
    if (!has_members(plan.grads[i], 2)) return false;
  }
  plan.recorded = recorded;
  return true;
}

// Reads (FaCall, (shape, strides)), or None.
bool read_weights(PyObject* made, FastPlan& plan) {
  plan.weights = Py_None;
  if (made == Py_None) return true;
  if (!has_members(made, 2)) return false;
  plan.weights = PyTuple_GetItem(made, 1);
  return has_members(plan.weights, 2) &&
         copy(PyTuple_GetItem(made, 0), &plan.weights_call, sizeof plan.weights_call);
}

// Reads (FaCall, address of fa_cpu_run, brief, places, (shape of out, its strides), (bytes of the
// normaliser, shape, strides, dtype), finish, what `read_weights` reads, what `read_gradient` reads
// or None).
bool read(PyObject* made, FastPlan& plan) {
  if (!has_members(made, 9)) return false;
  PyObject *call, *places, *weights, *gradient;
  unsigned long long run;
  int brief;
  if (!PyArg_ParseTuple(made, "SKpS(OO)(nOOO)OOO", &call, &run, &brief, &places, &plan.shape,
                        &plan.strides, &plan.normaliser, &plan.normaliser_shape,
                        &plan.normaliser_strides, &plan.normaliser_dtype, &plan.finish, &weights,
                        &gradient) ||
      !read_weights(weights, plan))
    return false;
  plan.run = reinterpret_cast<Run>(static_cast<uintptr_t>(run));
  plan.brief = brief;
  if (!copy(call, &plan.call, sizeof plan.call)) return false;
  if (!copy(places, plan.places, plan.count * sizeof *plan.places)) return false;
  for (int i = 0; i < plan.count; ++i)
    if (plan.places[i].at > int64_t(sizeof(FaCall) - sizeof(void*))) {
      PyErr_SetString(PyExc_ValueError, "places: got one behind FaCall");
      return false;
    }
  if (gradient == Py_None) return true;
  return PyTuple_Check(gradient) ? read_gradient(gradient, plan) : has_members(gradient, 6);
}

// The plan's own references to what it borrows: `made` has tensors as large as results.
bool keep(FastPlan& plan) {
  PyObject* none = Py_None;
  const bool records = plan.recorded;
  PyObject* owned =
      PyTuple_Pack(11, plan.shape, plan.strides, plan.normaliser_shape, plan.normaliser_strides,
                   plan.normaliser_dtype, plan.finish, plan.weights, records ? plan.recorded : none,
                   records ? plan.grads[0] : none, records ? plan.grads[1] : none,
                   records ? plan.grads[2] : none);
  if (!owned) return false;
  Py_DECREF(plan.owned);
  plan.owned = owned;
  return true;
}

// Makes the plan of a key. Null without an exception if the arguments are wrong: then the general
// path raises the error.
FastPlan* make(PyObject* path, const Call& call, PyObject* arguments) {
  const Ref made(PyObject_CallObject(Path(path).make_plan, arguments));
  if (!made) {
    if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return nullptr;
  }
  auto* plan = static_cast<FastPlan*>(PyMem_Calloc(1, sizeof(FastPlan)));
  if (!plan) {
    PyErr_NoMemory();
    return nullptr;
  }
  plan->capsule = PyCapsule_New(plan, kCapsule, free_plan);
  if (!plan->capsule) {
    PyMem_Free(plan);
    return nullptr;
  }
  plan->key = call.key;
  plan->path = Py_NewRef(path);
  plan->owned = Py_NewRef(Py_None);
  plan->count = call.count;
  std::memcpy(plan->layouts, call.layouts, sizeof plan->layouts);
  std::memcpy(plan->varies, call.varies, sizeof plan->varies);
  if (made.get() != Py_None && !(read(made.get(), *plan) && keep(*plan))) {
    Py_DECREF(plan->capsule);
    return nullptr;
  }
  auto& set = plans[plan->key.hash() % kSets];
  FastPlan* oldest = set[kWays - 1];
  for (int at = kWays - 1; at > 0; --at) set[at] = set[at - 1];
  set[0] = plan;
  if (oldest) Py_DECREF(oldest->capsule);
  return plan;
}

// --- the kernel ---------------------------------------------------------------------------------

// Memory for the time of a call.
template <size_t kHere>
class Scratch {
 public:
  explicit Scratch(size_t bytes)
      : data_(bytes <= kHere ? here_ : static_cast<char*>(PyMem_Malloc(bytes))) {}
  ~Scratch() {
    if (data_ != here_) PyMem_Free(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  alignas(64) char here_[kHere];
  char* data_;
};

size_t elements(const DLTensor& x) {
  size_t found = 1;
  for (int32_t i = 0; i < x.ndim; ++i) found *= size_t(x.shape[i]);
  return found;
}

size_t widened_bytes(const FastPlan& plan, const DLTensor* views) {
  size_t found = 0;
  for (int i = 0; i < plan.count; ++i)
    if (plan.places[i].widen) found += elements(views[i]) * sizeof(int64_t);
  return found;
}

void put(FaCall& call, int64_t at, const void* address) {
  std::memcpy(reinterpret_cast<char*>(&call) + at, &address, sizeof address);
}

// Writes the addresses of the call's tensors into `call`. wide: room for `widened_bytes`.
void put(const FastPlan& plan, const DLTensor* views, FaCall& call, char* wide) {
  for (int i = 0; i < plan.count; ++i) {
    const auto [at, offset, widen] = plan.places[i];
    if (at < 0) continue;
    if (!widen) {
      put(call, at, address(views[i]) + offset);
      continue;
    }
    const auto* from = reinterpret_cast<const int32_t*>(address(views[i]));
    auto* to = reinterpret_cast<int64_t*>(wide);
    const size_t count = elements(views[i]);
    for (size_t n = 0; n < count; ++n) to[n] = from[n];
    put(call, at, to);
    wide += count * sizeof *to;
  }
}

PyObject* empty(PyObject* like, PyObject* shape, PyObject* strides, PyObject* dtype, DLTensor& d) {
  const Ref arguments(PyTuple_Pack(3, like, shape, strides));
  if (!arguments) return nullptr;
  Ref made(PyObject_Call(new_empty_strided, arguments.get(), dtype == Py_None ? nullptr : dtype));
  return made && view(made.get(), &d) == 0 ? made.release() : nullptr;
}

// kYes if the kernel has run.
Answer launch_plan(const FastPlan& plan, const Path& path, FaCall& call, FaPass which) {
  const Ref threads(PyObject_CallNoArgs(path.threads));
  if (!threads) return kError;
  call.params.threads = PyLong_AsLongLong(threads.get());
  if (PyErr_Occurred()) return kError;
  const int64_t status = plan.run(&call, which, plan.brief);
  if (status == FA_INTERRUPTED) return kError;  // a signal's handler has raised
  return status == FA_OK ? kYes : kNo;
}

constexpr size_t kNormaliser = 4096, kWidened = 1024;  // bytes that need no allocation

PyObject* none_if_no(Answer x) { return x == kError ? nullptr : Py_NewRef(Py_None); }

// The results as autograd's node returns them.
PyObject* record(const FastPlan& plan, const Path& path, const Call& given, PyObject* results) {
  const Ref recorded(PyTuple_Pack(3, plan.recorded, results, plan.capsule));
  const Ref arguments(PyTuple_New(1 + plan.inputs));
  if (!recorded || !arguments) return nullptr;
  PyTuple_SetItem(arguments.get(), 0, Py_NewRef(recorded.get()));
  for (int i = 0; i < plan.inputs; ++i) {
    PyObject* x = plan.order[i] < 0 ? Py_None : given.tensors[plan.order[i]];
    PyTuple_SetItem(arguments.get(), 1 + i, Py_NewRef(x));
  }
  return PyObject_CallObject(path.record, arguments.get());
}

// (out, the weights), by a second kernel. None if that refuses the call.
PyObject* with_weights(const FastPlan& plan, const Path& path, const Call& given, PyObject* out,
                       void* normaliser, char* wide) {
  FaCall call;
  std::memcpy(&call, &plan.weights_call, sizeof call);
  put(plan, given.views, call, wide);
  DLTensor d;
  const Ref weights(empty(given.tensors[0], PyTuple_GetItem(plan.weights, 0),
                          PyTuple_GetItem(plan.weights, 1), Py_None, d));
  if (!weights) return nullptr;
  call.params.v.data = nullptr;  // asks for no output
  call.params.lse.data = normaliser;
  call.params.weights.data = address(d);
  const Answer answer = launch_plan(plan, path, call, FA_WEIGHTS);
  return answer == kYes ? PyTuple_Pack(2, out, weights.get()) : none_if_no(answer);
}

// Allocates the results and runs the kernel. None if it refuses the call.
PyObject* run(const FastPlan& plan, const Path& path, const Call& given, bool records) {
  const Ref kept(Py_NewRef(plan.capsule));  // other threads, which torch lets run, may replace it
  FaCall call;
  std::memcpy(&call, &plan.call, sizeof call);
  const bool kept_normaliser = records || plan.finish != Py_None;
  const Scratch<kNormaliser> unseen(kept_normaliser ? 0 : plan.normaliser);
  const Scratch<kWidened> wide(widened_bytes(plan, given.views));
  if (!unseen.data() || !wide.data()) return PyErr_NoMemory();
  put(plan, given.views, call, wide.data());
  DLTensor d;
  Ref out(empty(given.tensors[0], plan.shape, plan.strides, Py_None, d));
  if (!out) return nullptr;
  call.params.out.data = address(d);
  call.params.lse.data = plan.normaliser ? unseen.data() : nullptr;
  const Ref normaliser(kept_normaliser ? empty(given.tensors[0], plan.normaliser_shape,
                                               plan.normaliser_strides, plan.normaliser_dtype, d)
                                       : Py_NewRef(Py_None));
  if (!normaliser) return nullptr;
  if (kept_normaliser) call.params.lse.data = address(d);
  if (const Answer answer = launch_plan(plan, path, call, FA_FORWARD); answer != kYes)
    return none_if_no(answer);
  if (plan.weights != Py_None)
    return with_weights(plan, path, given, out.get(), call.params.lse.data, wide.data());
  if (!kept_normaliser) return out.release();
  Ref results(PyTuple_Pack(2, out.get(), normaliser.get()));
  if (!results) return nullptr;
  const Ref recorded(records ? record(plan, path, given, results.get()) : Py_NewRef(results.get()));
  if (!recorded || !has_members(recorded.get(), 2)) return nullptr;
  PyObject* first = PyTuple_GetItem(recorded.get(), 0);
  if (plan.finish == Py_None) return Py_NewRef(first);
  const Ref second(
      PyObject_CallFunctionObjArgs(plan.finish, PyTuple_GetItem(recorded.get(), 1), nullptr));
  return second ? PyTuple_Pack(2, first, second.get()) : nullptr;
}

// --- the calls ----------------------------------------------------------------------------------

// How a call was found.
struct Found {
  Call call;
  const FastPlan* plan = nullptr;  // null: the general path runs this call
  bool records = false;            // autograd does
};

// Finds the plan of (q, k, v, ..., named), or makes one. n: 4 or more.
Answer find_plan(PyObject* path_of_call, PyObject* const* args, Py_ssize_t n, Found& found) {
  for (int i = 0; i < 3; ++i)
    if (!is_of_torch(args[i])) return kNo;
  if (!has_members(path_of_call, Path::kMembers)) return kError;
  const Path path(path_of_call);
  // First: a mode of torch would see what the others read of tensors.
  Answer answer = not_(acts_on_calls(path));
  const Answer enabled = answer == kYes ? is_true(path.grad_enabled) : kNo;
  if (enabled == kError) answer = kError;
  Call& call = found.call;
  if (answer == kYes)
    answer = yes_if(call.key.add(intptr_t(path_of_call)) && call.key.add(enabled));
  for (Py_ssize_t i = 0; i < n - 1 && answer == kYes; ++i) answer = add(call, args[i], true, true);
  if (answer == kYes) answer = add_named(call, args[n - 1], path.numbers);
  if (answer != kYes) return answer;
  FastPlan* plan = find(call.key);
  if (!plan) {
    const Ref arguments(PyTuple_New(n));
    if (!arguments) return kError;
    for (Py_ssize_t i = 0; i < n; ++i) PyTuple_SetItem(arguments.get(), i, Py_NewRef(args[i]));
    plan = make(path_of_call, call, arguments.get());
    if (!plan) return PyErr_Occurred() ? kError : kNo;
  }
  for (int i = 0; i < call.count; ++i) found.records |= enabled == kYes && call.varies[i];
  if (plan->owned == Py_None) return kNo;
  found.plan = plan;
  return kYes;
}

bool has_at_least(Py_ssize_t n, Py_ssize_t expected) {
  if (n >= expected) return true;
  PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd or more", n, expected);
  return false;
}

PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!has_at_least(n, 5)) return nullptr;
  Found found;
  const Answer answer = find_plan(args[0], args + 1, n - 1, found);
  if (answer != kYes) return none_if_no(answer);
  if (found.records && !found.plan->recorded) Py_RETURN_NONE;
  return run(*found.plan, Path(args[0]), found.call, found.records);
}

// kYes if `x` lies in plain memory as `expected`.
Answer lies(PyObject* x, const Layout& expected, DLTensor& d) {
  const auto plain = static_cast<Answer>(is_plain(x, d));
  return plain == kYes ? yes_if(expected.is(d)) : plain;
}

// The gradient of out, in any layout; that of the normaliser, None.
Answer is_gradient_of(const Layout& out, PyObject* const* grads, DLTensor& d) {
  if (grads[0] == Py_None || grads[1] != Py_None) return kNo;
  const auto plain = static_cast<Answer>(is_plain(grads[0], d));
  Layout found;
  if (plain != kYes || !found.set(d)) return plain == kError ? kError : kNo;
  return yes_if(found.kind == out.kind && std::memcmp(found.size, out.size, sizeof out.size) == 0);
}

// The gradients of q, k and v.
PyObject* run_backward(const FastPlan& plan, const Path& path, const DLTensor* views,
                       const DLTensor* results, const DLTensor& dout, PyObject* like) {
  FaCall call;
  std::memcpy(&call, &plan.backward, sizeof call);
  const Scratch<kWidened> wide(widened_bytes(plan, views));
  if (!wide.data()) return PyErr_NoMemory();
  put(plan, views, call, wide.data());
  call.params.out.data = address(results[0]);
  call.params.lse.data = address(results[1]);
  constexpr int32_t kDout = offsetof(FaCall, params.dout);
  if (!write(call, {kDout, kStrided, -1}, dout)) Py_RETURN_NONE;
  FaTensor* const fields[3] = {&call.params.dq, &call.params.dk, &call.params.dv};
  Ref made(PyTuple_New(3));
  if (!made) return nullptr;
  for (int i = 0; i < 3; ++i) {  // unwanted ones, too: kernels write all
    DLTensor d;
    PyObject* layout = plan.grads[i];
    PyObject* grad =
        empty(like, PyTuple_GetItem(layout, 0), PyTuple_GetItem(layout, 1), Py_None, d);
    if (!grad) return nullptr;
    PyTuple_SetItem(made.get(), i, grad);
    fields[i]->data = address(d);
  }
  const Answer answer = launch_plan(plan, path, call, FA_BACKWARD);
  return answer == kYes ? made.release() : none_if_no(answer);
}

// kYes if the plan has gradients, and these are its results and the gradients of them.
Answer has_gradients(const FastPlan& plan, PyObject* const* results, PyObject* const* grads,
                     DLTensor* views, DLTensor& dout) {
  const Layout* const expected[2] = {&plan.out, &plan.saved_normaliser};
  Answer answer = yes_if(plan.recorded);
  for (int i = 0; i < 2 && answer == kYes; ++i) answer = lies(results[i], *expected[i], views[i]);
  return answer == kYes ? is_gradient_of(plan.out, grads, dout) : answer;
}

// What Function.backward returns: None, then a gradient or None for each of its inputs.
PyObject* for_inputs(const FastPlan& plan, PyObject* gradients) {
  PyObject* made = PyTuple_New(1 + plan.inputs);
  if (!made) return nullptr;
  for (int i = -1; i < plan.inputs; ++i) {
    PyObject* x = 0 <= i && i < 3 && plan.varies[i] ? PyTuple_GetItem(gradients, i) : Py_None;
    PyTuple_SetItem(made, 1 + i, Py_NewRef(x));
  }
  return made;
}

// tensors: the inputs, out and the normaliser, as they were saved; grads: those of the results.
PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 3 || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "expected a plan, a tuple of tensors and one of gradients");
    return nullptr;
  }
  auto* found = static_cast<FastPlan*>(PyCapsule_GetPointer(args[0], kCapsule));
  if (!found || !has_members(args[2], 2)) return nullptr;
  const FastPlan& plan = *found;
  const Path path(plan.path);
  if (!plan.recorded || PyTuple_Size(args[1]) != plan.inputs + 2) Py_RETURN_NONE;
  Answer answer = not_(acts_on_calls(path));
  if (answer == kYes) answer = not_(is_true(path.grad_enabled));
  DLTensor views[kMostTensors], results[2], dout;
  for (int i = 0; i < plan.inputs && answer == kYes; ++i) {
    PyObject* x = PyTuple_GetItem(args[1], i);
    const int at = plan.order[i];
    answer = at < 0 ? yes_if(x == Py_None) : lies(x, plan.layouts[at], views[at]);
  }
  PyObject* saved[2];
  PyObject* grads[2];
  for (int i = 0; i < 2; ++i) {
    saved[i] = PyTuple_GetItem(args[1], plan.inputs + i);
    grads[i] = PyTuple_GetItem(args[2], i);
  }
  if (answer == kYes) answer = has_gradients(plan, saved, grads, results, dout);
  if (answer != kYes) return none_if_no(answer);
  const Ref made(run_backward(plan, path, views, results, dout, PyTuple_GetItem(args[1], 0)));
  if (!made || made.get() == Py_None) return made ? Py_NewRef(Py_None) : nullptr;
  return for_inputs(plan, made.get());
}

PyObject* differentiate(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!has_at_least(n, 9)) return nullptr;
  PyObject* const* const call = args + 5;
  Found found;
  DLTensor results[2], dout;
  Answer answer = find_plan(args[0], call, n - 5, found);
  if (answer == kYes) answer = not_(is_true(Path(args[0]).grad_enabled));
  if (answer == kYes) answer = has_gradients(*found.plan, args + 3, args + 1, results, dout);
  if (answer != kYes) return none_if_no(answer);
  const Ref kept(Py_NewRef(found.plan->capsule));
  return run_backward(*found.plan, Path(args[0]), found.call.views, results, dout, call[0]);
}

}  // namespace
