// The fast path: attention of plain tensors without a gradient, from the public function to the
// kernel in one call. fastattn/dispatch/fast_path.py says which calls take it.
//
//   attend(path, q, k, v, arguments)         arguments: the dict of `fastattn.attention`
//   attend(path, q, k, v, is_causal, scale)
//   forget_plans()                           forgets all plans
//
// `attend` returns out, or None for a call that the general path has to run or to refuse. `path` is
// a tuple: see `Path` below.
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
  PyObject* make_plan;     // (q, k, v, causal, scale) -> a plan, or None
  PyObject* states;        // function, what it returns where no subsystem of torch acts, ...
  PyObject* globals;       // dict of a module, name, its value then, a function or None, ...
  PyObject* grad_enabled;  // torch.is_grad_enabled
  PyObject* threads;       // torch.get_num_threads
  PyObject* defaults;      // of the arguments that `attend` gets as a dict
  explicit Path(PyObject* path)
      : make_plan(PyTuple_GetItem(path, 0)),
        states(PyTuple_GetItem(path, 1)),
        globals(PyTuple_GetItem(path, 2)),
        grad_enabled(PyTuple_GetItem(path, 3)),
        threads(PyTuple_GetItem(path, 4)),
        defaults(PyTuple_GetItem(path, 5)) {}
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

PyObject *requires_grad_name, *new_empty_strided;

Answer needs_gradient(const Path& path, PyObject* const* tensors) {
  const Ref enabled(PyObject_CallNoArgs(path.grad_enabled));
  if (!enabled) return kError;
  if (enabled.get() == Py_False) return kNo;
  for (int i = 0; i < 3; ++i) {
    const Ref requires_grad(PyObject_GetAttr(tensors[i], requires_grad_name));
    if (!requires_grad) return kError;
    if (requires_grad.get() != Py_False) return kYes;
  }
  return kNo;
}

struct Scalars {
  PyObject *causal = Py_False, *scale = Py_None;  // borrowed
};

bool is_default(PyObject* x, PyObject* value) {
  if (x == value) return true;
  if (!PyFloat_CheckExact(x) || !PyFloat_CheckExact(value)) return false;
  return PyFloat_AsDouble(x) == PyFloat_AsDouble(value);
}

// Reads `causal` and `scale` of the public arguments; kNo if others differ from their defaults.
Answer scalars_of(PyObject* arguments, PyObject* defaults, Scalars& found) {
  if (PyDict_Size(arguments) < 0) return kError;  // no dict
  Py_ssize_t at = 0;
  PyObject *name, *value;  // borrowed
  while (PyDict_Next(arguments, &at, &name, &value)) {
    if (PyUnicode_CompareWithASCIIString(name, "causal") == 0) {
      found.causal = value;
    } else if (PyUnicode_CompareWithASCIIString(name, "scale") == 0) {
      found.scale = value;
    } else {
      PyObject* usual = PyDict_GetItemWithError(defaults, name);
      if (!usual && PyErr_Occurred()) return kError;
      if (!usual || !is_default(usual, value)) return kNo;
    }
  }
  return kYes;
}

// What calls have in common that share a plan. Only tensors of four dimensions in the CPU's memory
// have a key.
struct Key {
  int64_t path, causal, scaled;
  double scale;
  struct {
    int64_t dtype, device, size[4], stride[4];
  } tensors[3];

  // kNo if a scalar has a type or a value that the general path converts or refuses.
  Answer set(PyObject* of, const Scalars& given) {
    path = reinterpret_cast<intptr_t>(of);
    if (given.causal == Py_False || given.causal == Py_True) {
      causal = given.causal == Py_True;
    } else if (PyUnicode_Check(given.causal)) {
      if (PyUnicode_CompareWithASCIIString(given.causal, "bottom_right")) return kNo;
      causal = 2;
    } else {
      return kNo;
    }
    scaled = given.scale != Py_None;
    if (scaled && !PyFloat_CheckExact(given.scale)) return kNo;
    scale = scaled ? PyFloat_AsDouble(given.scale) : 0;
    return kYes;
  }
  Answer set(int i, const DLTensor& x) {
    constexpr int32_t kCpu = 1;  // DLDeviceType
    if (x.ndim != 4 || x.device != kCpu) return kNo;
    auto& to = tensors[i];
    to.dtype = x.code | int64_t(x.bits) << 8 | int64_t(x.lanes) << 16;
    to.device = x.device | int64_t(x.device_id) << 32;
    std::memcpy(to.size, x.shape, sizeof to.size);
    std::memcpy(to.stride, x.strides, sizeof to.stride);
    return kYes;
  }
  uint64_t hash() const {
    uint64_t words[sizeof(Key) / 8], found = 0;
    std::memcpy(words, this, sizeof words);
    for (uint64_t word : words) found = (found ^ word) * 0x9E3779B97F4A7C15u, found ^= found >> 32;
    return found;
  }
};
static_assert(sizeof(Key) == (4 + 3 * 10) * 8);  // memcmp compares it: no padding

// --- plans --------------------------------------------------------------------------------------

using Run = decltype(&fa_cpu_run);

struct FastPlan {
  Key key;
  PyObject* path;   // owned, so that no other has its address
  PyObject* shape;  // of out; owned. Null: the general path runs these calls
  PyObject* strides;
  int64_t normaliser;  // its bytes
  bool brief;          // too short to release the GIL for
  Run run;
  FaCall call;  // without addresses
};

// Plans lie in sets, by the hash of their key. A set has room for a few, the newest first: another
// one replaces the oldest.
constexpr uint64_t kSets = 128;
constexpr int kWays = 4;
FastPlan* plans[kSets][kWays];

void free_plan(FastPlan* plan) {
  if (!plan) return;
  Py_XDECREF(plan->path);
  Py_XDECREF(plan->shape);
  Py_XDECREF(plan->strides);
  PyMem_Free(plan);
}

PyObject* forget_plans(PyObject*, PyObject*) {
  for (auto& set : plans)
    for (FastPlan*& place : set) {
      FastPlan* plan = place;
      place = nullptr;
      free_plan(plan);
    }
  Py_RETURN_NONE;
}

FastPlan* find(const Key& key) {
  for (FastPlan* plan : plans[key.hash() % kSets])
    if (plan && std::memcmp(&plan->key, &key, sizeof key) == 0) return plan;
  return nullptr;
}

// Reads (FaCall, shape of out, its strides, bytes of the normaliser, brief, address of fa_cpu_run).
bool read(PyObject* made, FastPlan& plan) {
  if (!has_members(made, 6)) return false;
  char* call;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(PyTuple_GetItem(made, 0), &call, &size)) return false;
  if (size != sizeof plan.call) {
    PyErr_SetString(PyExc_ValueError, "FaCall has another size");
    return false;
  }
  std::memcpy(&plan.call, call, sizeof plan.call);
  plan.normaliser = PyLong_AsLongLong(PyTuple_GetItem(made, 3));
  plan.brief = PyObject_IsTrue(PyTuple_GetItem(made, 4)) == 1;
  plan.run = reinterpret_cast<Run>(PyLong_AsVoidPtr(PyTuple_GetItem(made, 5)));
  if (PyErr_Occurred()) return false;
  plan.shape = PyTuple_GetItem(made, 1);
  plan.strides = PyTuple_GetItem(made, 2);
  Py_INCREF(plan.shape);
  Py_INCREF(plan.strides);
  return true;
}

// Makes the plan of a key. Null without an exception if the arguments are wrong: then the general
// path raises the error.
FastPlan* make(PyObject* path, const Key& key, PyObject* const* tensors, const Scalars& given) {
  const Ref made(PyObject_CallFunctionObjArgs(Path(path).make_plan, tensors[0], tensors[1],
                                              tensors[2], given.causal, given.scale, nullptr));
  if (!made) {
    if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return nullptr;
  }
  auto* plan = static_cast<FastPlan*>(PyMem_Calloc(1, sizeof(FastPlan)));
  if (!plan) {
    PyErr_NoMemory();
    return nullptr;
  }
  if (made.get() != Py_None && !read(made.get(), *plan)) {
    free_plan(plan);
    return nullptr;
  }
  plan->key = key;
  plan->path = path;
  Py_INCREF(path);
  auto& set = plans[key.hash() % kSets];
  FastPlan* oldest = set[kWays - 1];
  for (int at = kWays - 1; at > 0; --at) set[at] = set[at - 1];
  set[0] = plan;
  free_plan(oldest);
  return plan;
}

// --- the call -----------------------------------------------------------------------------------

// The memory of a normaliser, which this path does not return.
class Normaliser {
 public:
  explicit Normaliser(int64_t bytes)
      : data_(bytes <= int64_t(sizeof here_) ? here_ : static_cast<char*>(PyMem_Malloc(bytes))) {}
  ~Normaliser() {
    if (data_ != here_) PyMem_Free(data_);
  }
  Normaliser(const Normaliser&) = delete;
  Normaliser& operator=(const Normaliser&) = delete;
  char* data() const { return data_; }

 private:
  alignas(64) char here_[4096];
  char* data_;
};

// Allocates out and runs the kernel. None if it refuses the call.
PyObject* run(const FastPlan& plan, const Path& path, PyObject* const* tensors, const DLTensor* d) {
  FaCall call;  // and the rest of the plan: other threads, which torch lets run, may replace it
  std::memcpy(&call, &plan.call, sizeof call);
  const Run run = plan.run;
  const bool brief = plan.brief;
  const Ref shape(Py_NewRef(plan.shape)), strides(Py_NewRef(plan.strides));
  const Normaliser normaliser(plan.normaliser);
  if (!normaliser.data()) return PyErr_NoMemory();
  call.params.lse.data = plan.normaliser ? normaliser.data() : nullptr;
  const Ref threads(PyObject_CallNoArgs(path.threads));
  if (!threads) return nullptr;
  call.params.threads = PyLong_AsLongLong(threads.get());
  if (PyErr_Occurred()) return nullptr;
  Ref out(PyObject_CallFunctionObjArgs(new_empty_strided, tensors[0], shape.get(), strides.get(),
                                       nullptr));
  DLTensor to;
  if (!out || view(out.get(), &to)) return nullptr;
  call.params.q.data = address(d[0]);
  call.params.k.data = address(d[1]);
  call.params.v.data = address(d[2]);
  call.params.out.data = address(to);
  const int64_t status = run(&call, FA_FORWARD, brief);
  if (status == FA_INTERRUPTED) return nullptr;  // a signal's handler has raised
  if (status == FA_OK) return out.release();
  Py_RETURN_NONE;
}

PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 5 && n != 6) {
    PyErr_Format(PyExc_TypeError, "got %zd arguments, expected 5 or 6", n);
    return nullptr;
  }
  PyObject* const* tensors = args + 1;
  for (int i = 0; i < 3; ++i)
    if (!is_of_torch(tensors[i])) Py_RETURN_NONE;
  if (!has_members(args[0], 6)) return nullptr;
  const Path path(args[0]);
  Scalars given;
  if (n == 6) given.causal = args[4], given.scale = args[5];
  Answer answer = n == 6 ? kYes : scalars_of(args[4], path.defaults, given);
  Key key;
  DLTensor d[3];
  if (answer == kYes) answer = key.set(args[0], given);
  // First: a mode of torch would see what the others read of tensors.
  if (answer == kYes) answer = not_(acts_on_calls(path));
  if (answer == kYes) answer = not_(needs_gradient(path, tensors));
  for (int i = 0; i < 3 && answer == kYes; ++i)
    answer = is_memory(tensors[i], d[i]) ? key.set(i, d[i]) : kNo;
  for (int i = 0; i < 3 && answer == kYes; ++i)
    answer = static_cast<Answer>(is_not_negated(tensors[i]));
  if (answer == kError) return nullptr;
  if (answer == kNo) Py_RETURN_NONE;
  FastPlan* plan = find(key);
  if (!plan) plan = make(args[0], key, tensors, given);
  if (!plan && PyErr_Occurred()) return nullptr;
  if (!plan || !plan->shape) Py_RETURN_NONE;
  return run(*plan, path, tensors, d);
}

}  // namespace
