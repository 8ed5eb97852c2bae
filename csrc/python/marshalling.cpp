// A Python extension that passes tensors to the kernels: the functions of
// fastattn/backends/native/marshalling.py in C++, for CPython's stable ABI. It is optional: without
// it Python does the same, some microseconds slower. It uses torch through DLPack alone: the
// exchange table (a C ABI for exactly this) gives a tensor's address without a method call.
#include "append_rows.h"
#include "fast_path.h"
#include "tensors.h"

namespace {

// --- kind ---------------------------------------------------------------------------------------

PyObject* kind(PyObject*, PyObject* tensors) {
  constexpr Py_ssize_t kMost = 128;  // of words: dtype with ndim, device, shape
  int64_t words[kMost];
  Py_ssize_t used = 0;
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (count < 0) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = PyTuple_GetItem(tensors, i);  // borrowed
    if (x == Py_None) {
      if (used == kMost) Py_RETURN_NONE;
      words[used++] = -1;
      continue;
    }
    DLTensor d;
    const int plain = is_plain(x, d);
    if (plain < 0) return nullptr;
    if (!plain || used + 2 + d.ndim > kMost) Py_RETURN_NONE;
    words[used++] = d.code | int64_t(d.bits) << 8 | int64_t(d.lanes) << 16 | int64_t(d.ndim) << 32;
    words[used++] = d.device | int64_t(d.device_id) << 32;
    for (int32_t n = 0; n < d.ndim; ++n) words[used++] = d.shape[n];
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(words), used * 8);
}

// --- specialization_key -------------------------------------------------------------------------

// For a tuple of tensors, of tuples that begin with one, of whole numbers and None. Returns None if
// something else is among them, or a tensor that DLPack cannot describe.
PyObject* specialization_key(PyObject*, PyObject* args) {
  enum { kNone = -1, kNumber = -2 };
  constexpr Py_ssize_t kMost = 192;  // of words
  int64_t words[kMost];
  Py_ssize_t used = 0;
  const Py_ssize_t count = PyTuple_Size(args);
  if (count < 0) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = PyTuple_GetItem(args, i);  // borrowed
    if (PyTuple_Check(x) && !(x = PyTuple_GetItem(x, 0))) return nullptr;
    if (used + 2 > kMost) Py_RETURN_NONE;
    if (x == Py_None) {
      words[used++] = kNone;
      continue;
    }
    if (PyLong_Check(x)) {
      words[used++] = kNumber;
      words[used++] = PyLong_AsLongLong(x);
      if (PyErr_Occurred()) return nullptr;
      continue;
    }
    DLTensor d;
    if (!is_of_torch(x)) Py_RETURN_NONE;
    if (view(x, &d)) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    if (used + 1 + d.ndim > kMost) Py_RETURN_NONE;
    const auto off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address(d)) % 16);
    words[used++] = d.code | int64_t(d.bits) << 8 | off << 16 | int64_t(d.ndim) << 32;
    for (int32_t n = 0; n < d.ndim; ++n) words[used++] = d.strides[n];
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(words), used * 8);
}

// --- pack and launch ----------------------------------------------------------------------------

// Makes an FaCall of a template and of `tensors`, each in its field; None is skipped.
bool fill(FaCall& call, PyObject* form, PyObject* places, PyObject* tensors) {
  char *bytes, *at;
  Py_ssize_t size, places_size;
  if (PyBytes_AsStringAndSize(form, &bytes, &size)) return false;
  if (PyBytes_AsStringAndSize(places, &at, &places_size)) return false;
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (count < 0) return false;
  if (size != sizeof call || places_size != count * Py_ssize_t(sizeof(Field))) {
    PyErr_SetString(PyExc_ValueError, "FaCall, or the places in it, have another size");
    return false;
  }
  std::memcpy(&call, bytes, sizeof call);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = PyTuple_GetItem(tensors, i);
    if (x == Py_None) continue;
    Field field;
    std::memcpy(&field, at + i * sizeof field, sizeof field);
    DLTensor d;
    if (view(x, &d)) return false;
    if (!write(call, field, d)) {
      PyErr_Format(PyExc_ValueError, "tensor %zd does not fit its field", i);
      return false;
    }
  }
  return true;
}

bool fill(FaCall& call, PyObject* form, PyObject* places, PyObject* tensors, PyObject* threads) {
  if (!fill(call, form, places, tensors)) return false;
  call.params.threads = PyLong_AsLongLong(threads);
  return !PyErr_Occurred();
}

bool has(Py_ssize_t got, Py_ssize_t expected) {
  if (got == expected) return true;
  PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd", got, expected);
  return false;
}

PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t n) {
  FaCall call;
  if (!has(n, 4) || !fill(call, args[0], args[1], args[2], args[3])) return nullptr;
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(&call), sizeof call);
}

PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t n) {
  FaCall call;
  if (!has(n, 7) || !fill(call, args[3], args[4], args[5], args[6])) return nullptr;
  const Run run = reinterpret_cast<Run>(PyLong_AsVoidPtr(args[0]));
  const int64_t which = PyLong_AsLongLong(args[1]);
  const int brief = PyObject_IsTrue(args[2]);
  if (PyErr_Occurred()) return nullptr;
  const int64_t status = run(&call, which, brief);
  if (status == FA_INTERRUPTED) return nullptr;  // a signal's handler has raised
  return PyLong_FromLongLong(status);
}

// For the CUDA library: two entries, what allocates a workspace, then what csrc/abi.h asks for.
PyObject* launch_on(PyObject*, PyObject* const* args, Py_ssize_t n) {
  FaCall call;
  if (!has(n, 11) || !fill(call, args[8], args[9], args[10])) return nullptr;
  using Run = decltype(&fa_cuda_run);
  using Workspace = decltype(&fa_cuda_workspace);
  const Run run = reinterpret_cast<Run>(PyLong_AsVoidPtr(args[0]));
  const Workspace wanted = reinterpret_cast<Workspace>(PyLong_AsVoidPtr(args[1]));
  int64_t numbers[4];  // pass, device, multiprocessors, architecture
  for (int i = 0; i < 4; ++i) numbers[i] = PyLong_AsLongLong(args[3 + i]);
  const auto [pass, device, multiprocessors, architecture] = numbers;
  void* stream = PyLong_AsVoidPtr(args[7]);
  if (PyErr_Occurred()) return nullptr;
  PyObject* workspace = nullptr;
  const int64_t size = wanted(&call.params, pass, multiprocessors, architecture);
  if (size > 0) {
    constexpr uintptr_t kTo = 64;
    DLTensor d;
    workspace = PyObject_CallFunction(args[2], "L", static_cast<long long>(size + kTo - 1));
    if (!workspace || view(workspace, &d)) {
      Py_XDECREF(workspace);
      return nullptr;
    }
    const auto at = reinterpret_cast<uintptr_t>(address(d));
    call.params.workspace = reinterpret_cast<void*>((at + kTo - 1) / kTo * kTo);
  }
  int64_t code;
  Py_BEGIN_ALLOW_THREADS  // waits if the queue of launches is full
      code = run(&call, pass, device, multiprocessors, architecture, stream);
  Py_END_ALLOW_THREADS Py_XDECREF(workspace);  // memory is reused later on the same stream
  return PyLong_FromLongLong(code);
}

// --- the module ---------------------------------------------------------------------------------

// A new reference to the attribute at the end of this path.
PyObject* attribute(PyObject* of, const char* name) {
  PyObject* found = of ? PyObject_GetAttrString(of, name) : nullptr;
  Py_XDECREF(of);
  return found;
}

int begin(PyObject* module) {
  tensor_type = attribute(PyImport_ImportModule("torch"), "Tensor");
  parameter_type = attribute(PyImport_ImportModule("torch.nn"), "Parameter");
  if (!tensor_type || !parameter_type) return -1;
  is_neg = PyObject_GetAttrString(tensor_type, "is_neg");
  PyObject* capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
  if (!is_neg || !capsule) return -1;
  const void* table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);  // the table itself lives as long as the process
  if (!table) return -1;
  const auto& exchange = *static_cast<const DLExchange*>(table);
  if (exchange.major != 1 || !exchange.view) {
    PyErr_Format(PyExc_ImportError, "DLPack: got %u, expected 1 with views", exchange.major);
    return -1;
  }
  view = exchange.view;
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  new_empty_strided = PyObject_GetAttrString(tensor_type, "new_empty_strided");
  if (PyErr_Occurred()) return -1;
  return PyModule_AddStringConstant(module, "fields", FA_FIELDS);
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyCFunction fast(Fast f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }
PyMethodDef functions[] = {{"kind", kind, METH_O, nullptr},
                           {"specialization_key", specialization_key, METH_O, nullptr},
                           {"pack", fast(pack), METH_FASTCALL, nullptr},
                           {"launch", fast(launch), METH_FASTCALL, nullptr},
                           {"launch_on", fast(launch_on), METH_FASTCALL, nullptr},
                           {"attend", fast(attend), METH_FASTCALL, nullptr},
                           {"gradients", fast(gradients), METH_FASTCALL, nullptr},
                           {"differentiate", fast(differentiate), METH_FASTCALL, nullptr},
                           {"append_rows", fast(append_rows), METH_FASTCALL, nullptr},
                           {"forget_plans", forget_plans, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(begin)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "fastattn_marshalling",
                          nullptr,
                          0,
                          functions,
                          slots,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fastattn_marshalling() { return PyModuleDef_Init(&definition); }
