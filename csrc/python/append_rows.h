// New keys and values into the pages of a cache, and its lengths, in one call.
// fastattn/kv_cache/new_rows.py says which.
//
//   append_rows(step, k, v, room)   the number of rows that each item got; None, if the general path
//                                   has to write them or to refuse them. `step` is a tuple: see
//                                   `Step` below. room: the most rows
#pragma once
#include "fast_path.h"

namespace {

// The members of a step.
struct Step {
  static constexpr Py_ssize_t kMembers = 6;
  PyObject* path;     // as in fast_path.h; what it says of subsystems, gradients and threads
  PyObject* entry;    // the address of fa_cpu_append
  PyObject* forms;    // FaAppend of k, and of v if the cache has values, without addresses and n
  PyObject* tensors;  // the table, what keys are stored less or None; then for each form its pages
                      // and their scales or None
  PyObject* lengths;  // (B) int64, which the call raises
  PyObject* increment;  // raises the versions of the tensors that change
  explicit Step(PyObject* step)
      : path(PyTuple_GetItem(step, 0)),
        entry(PyTuple_GetItem(step, 1)),
        forms(PyTuple_GetItem(step, 2)),
        tensors(PyTuple_GetItem(step, 3)),
        lengths(PyTuple_GetItem(step, 4)),
        increment(PyTuple_GetItem(step, 5)) {}
};

// Where tensors lie now: their memory may have moved.
struct Memory {
  int64_t begin, end;
};

bool set(PyObject* x, const void*& to, Memory* memory) {
  to = nullptr;
  if (x == Py_None) return true;
  DLTensor d;
  if (!is_memory(x, d)) {
    PyErr_SetString(PyExc_ValueError, "step: expected tensors in memory");
    return false;
  }
  to = address(d);
  if (memory) {
    memory->begin = static_cast<int64_t>(reinterpret_cast<intptr_t>(to));
    memory->end = memory->begin + int64_t(elements(d) * d.bits / 8);
  }
  return true;
}

// Writes the addresses of a step's tensors into its forms. memory: gets where pages are, two ranges
// for each form.
bool set_addresses(PyObject* tensors, FaAppend* forms, Py_ssize_t count, Memory* memory) {
  if (!has_members(tensors, 2 + 2 * count)) return false;
  const void *table, *subtracted;
  if (!set(PyTuple_GetItem(tensors, 0), table, nullptr)) return false;
  if (!set(PyTuple_GetItem(tensors, 1), subtracted, nullptr)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const void *pages, *scales;
    if (!set(PyTuple_GetItem(tensors, 2 + 2 * i), pages, memory + 2 * i)) return false;
    memory[2 * i + 1] = {0, 0};
    if (!set(PyTuple_GetItem(tensors, 3 + 2 * i), scales, memory + 2 * i + 1)) return false;
    forms[i].pages = const_cast<void*>(pages);
    forms[i].scales = static_cast<float*>(const_cast<void*>(scales));
    forms[i].table = static_cast<const int64_t*>(table);
    forms[i].subtracted = i == 0 ? subtracted : nullptr;
  }
  return true;
}

// kYes if x has n rows for each item, which the library may read while it writes the pages.
Answer rows_of(PyObject* x, FaAppend& form, const Memory* pages, Py_ssize_t ranges, bool graded) {
  DLTensor d;
  if (!is_memory(x, d) || d.ndim != 4 || dtype_of(d) != form.x.dtype) return kNo;
  const bool fits = d.shape[0] == form.B && d.shape[1] == form.Hk && d.shape[3] == form.D;
  if (!fits || !elements(d) || (d.strides[3] != 1 && d.shape[3] != 1)) return kNo;
  const auto at = static_cast<int64_t>(reinterpret_cast<intptr_t>(address(d)));
  for (Py_ssize_t i = 0; i < ranges; ++i)
    if (pages[i].begin <= at && at < pages[i].end) return kNo;
  if (graded) {
    const Ref requires_grad(PyObject_GetAttr(x, requires_grad_name));
    if (!requires_grad) return kError;
    if (requires_grad.get() != Py_False) return kNo;
  }
  form.x.data = address(d);
  constexpr int kOrder[4] = {0, 2, 1, 3};  // x is (B,Hk,n,D), and (B,n,Hk,D) in FaAppend
  for (int i = 0; i < 4; ++i) form.x.stride[i] = d.strides[kOrder[i]];
  form.n = d.shape[2];
  return static_cast<Answer>(is_not_negated(x));
}

PyObject* append_rows(PyObject*, PyObject* const* args, Py_ssize_t n) {
  constexpr Py_ssize_t kMostRanges = 4;  // of k, v and their scales
  if (n != 4 || !has_members(args[0], Step::kMembers)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected a step, k, v and room");
    return nullptr;
  }
  const Step step(args[0]);
  if (!has_members(step.path, Path::kMembers)) return nullptr;
  const Path path(step.path);
  FaAppend forms[2];
  const Py_ssize_t count = PyBytes_Size(step.forms) / Py_ssize_t(sizeof *forms);
  Memory pages[kMostRanges];
  const int64_t room = PyLong_AsLongLong(args[3]);
  const auto entry = reinterpret_cast<decltype(&fa_cpu_append)>(PyLong_AsVoidPtr(step.entry));
  if (PyErr_Occurred()) return nullptr;
  if (count < 1 || count > 2 || !entry) {
    PyErr_SetString(PyExc_ValueError, "step: got another number of tensors");
    return nullptr;
  }
  if (!copy(step.forms, forms, count * sizeof *forms)) return nullptr;
  if (!set_addresses(step.tensors, forms, count, pages)) return nullptr;
  if (!is_of_torch(args[1]) || (count == 1 ? args[2] != Py_None : !is_of_torch(args[2])))
    Py_RETURN_NONE;
  // First: a mode of torch would see what the others read of tensors.
  Answer answer = not_(acts_on_calls(path));
  const Answer graded = answer == kYes ? is_true(path.grad_enabled) : kNo;
  if (graded == kError) answer = kError;
  for (Py_ssize_t i = 0; i < count && answer == kYes; ++i)
    answer = rows_of(args[1 + i], forms[i], pages, 2 * count, graded == kYes);
  const int64_t rows = forms[0].n;
  if (answer == kYes) answer = yes_if(rows == forms[count - 1].n && rows <= room);
  DLTensor lengths;
  if (answer == kYes && view(step.lengths, &lengths)) answer = kError;
  const Ref threads(answer == kYes ? PyObject_CallNoArgs(path.threads) : nullptr);
  if (answer == kYes && !threads) answer = kError;
  if (answer != kYes) return none_if_no(answer);
  if (lengths.ndim != 1 || lengths.shape[0] != forms[0].B || lengths.bits != 64) {
    PyErr_SetString(PyExc_ValueError, "lengths: got another shape or dtype");
    return nullptr;
  }
  auto* const now = reinterpret_cast<int64_t*>(address(lengths));
  const size_t bytes = size_t(forms[0].B) * sizeof *now;
  const Scratch<1024> longer(bytes);
  if (!longer.data()) return PyErr_NoMemory();
  auto* const then = reinterpret_cast<int64_t*>(longer.data());
  for (int64_t b = 0; b < forms[0].B; ++b) then[b] = now[b] + rows;
  int64_t status = FA_OK;
  for (Py_ssize_t i = 0; i < count && status == FA_OK; ++i) {
    forms[i].lengths = then;
    forms[i].threads = PyLong_AsLongLong(threads.get());
    Py_BEGIN_ALLOW_THREADS status = entry(&forms[i]);
    Py_END_ALLOW_THREADS
  }
  if (status != FA_OK) Py_RETURN_NONE;
  const Ref done(PyObject_CallNoArgs(step.increment));
  if (!done) return nullptr;
  std::memcpy(now, then, bytes);
  return PyLong_FromLongLong(rows);
}

}  // namespace
