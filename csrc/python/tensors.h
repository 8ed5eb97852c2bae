// Tensors as a Python extension reads them: memory with strides, by DLPack's exchange table; and how
// it writes them into an FaCall.
#pragma once
#define Py_LIMITED_API 0x030A0000  // Python 3.10
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../abi.h"

// A cross build has the headers of the Python that runs pip. What the stable ABI takes from its
// pyconfig.h are these sizes.
static_assert(SIZEOF_VOID_P == sizeof(void*) && SIZEOF_SIZE_T == sizeof(size_t) &&
              SIZEOF_LONG == sizeof(long) && SIZEOF_WCHAR_T == sizeof(wchar_t));

namespace {

// --- what is read of DLPack 1.x (github.com/dmlc/dlpack, dlpack.h) ------------------------------

struct DLTensor {
  void* data;
  int32_t device, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  void* older;
  void *allocate, *lend, *take;
  int (*view)(void* tensor, DLTensor* out);  // 0; or -1, with a Python exception
  void* stream;
};

int (*view)(void* tensor, DLTensor* out);
PyObject *tensor_type, *parameter_type, *is_neg;

// DLDataTypeCode
enum { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6, kE4m3 = 10, kE5m2 = 12 };

bool is_floating(const DLTensor& x) { return x.code != kInt && x.code != kUint && x.code != kBool; }

// FaDtype, or -1 for what kernels do not read.
int64_t dtype_of(const DLTensor& x) {
  if (x.lanes != 1) return -1;
  switch (x.code << 8 | x.bits) {
    case kFloat << 8 | 32:
      return FA_F32;
    case kFloat << 8 | 64:
      return FA_F64;
    case kFloat << 8 | 16:
      return FA_F16;
    case kBfloat << 8 | 16:
      return FA_BF16;
    case kBool << 8 | 8:
      return FA_BOOL;
    case kInt << 8 | 8:
      return FA_I8;
    case kUint << 8 | 8:
      return FA_I4;
    case kE4m3 << 8 | 8:
      return FA_E4M3;
    case kE5m2 << 8 | 8:
      return FA_E5M2;
    default:
      return -1;
  }
}

char* address(const DLTensor& x) { return static_cast<char*>(x.data) + x.byte_offset; }

// True if no subclass of torch.Tensor, other than Parameter, may act on calls with `x`.
bool is_of_torch(PyObject* x) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == tensor_type || type == parameter_type;
}

// True if `x` is memory with its strides, from which its numbers may still be read negated.
bool is_memory(PyObject* x, DLTensor& d) {
  if (!is_of_torch(x)) return false;
  if (view(x, &d)) {  // without storage, not strided, or of a dtype that DLPack lacks
    PyErr_Clear();
    return false;
  }
  if (!d.data) {  // an empty tensor, or zeros without memory
    int64_t size = 1;
    for (int32_t i = 0; i < d.ndim; ++i) size *= d.shape[i];
    return !size;
  }
  return true;
}

// 1 if the numbers of `x` are its memory's, 0 if they are read negated, -1 with an exception. Modes
// of __torch_function__ see this call.
int is_not_negated(PyObject* x) {
  PyObject* negative = PyObject_CallFunctionObjArgs(is_neg, x, nullptr);
  if (!negative) return -1;
  const int plain = negative == Py_False;
  Py_DECREF(negative);
  return plain;
}

// 1 if `x` is memory with its strides and nothing else, 0 if it is not, -1 with an exception.
int is_plain(PyObject* x, DLTensor& d) { return is_memory(x, d) ? is_not_negated(x) : 0; }

// --- tensors in an FaCall -------------------------------------------------------------------------

enum PassedAs { kStrided, kBroadcast, kColumn, kPair, kPointer };  // marshalling.PASSED_AS

struct Field {
  int32_t at;  // in bytes, in FaCall
  int32_t passed_as;
  int32_t size;  // offset of its sizes, or -1
};

// Writes `x` to its field; false if it does not fit there.
bool write(FaCall& call, Field field, const DLTensor& x) {
  const size_t bytes = field.passed_as == kPointer ? sizeof(void*) : sizeof(FaTensor);
  if (field.at < 0 || field.at + bytes > sizeof call) return false;
  char* to = reinterpret_cast<char*>(&call) + field.at;
  if (field.passed_as == kPointer) {
    char* data = address(x);
    std::memcpy(to, &data, sizeof data);
    return true;
  }
  FaTensor t = {address(x), {0, 0, 0, 0}, dtype_of(x)};
  int64_t size[4] = {1, 1, 1, 1};
  bool fits = t.dtype >= 0;
  const int32_t n = x.ndim;
  switch (field.passed_as) {
    case kStrided:
      fits = fits && n == 4;
      for (int32_t i = 0; fits && i < 4; ++i) t.stride[i] = x.strides[i], size[i] = x.shape[i];
      break;
    case kBroadcast:  // aligned to the right; what repeats has stride 0
      fits = fits && n <= 4;
      for (int32_t i = 0; fits && i < n; ++i) {
        t.stride[4 - n + i] = x.shape[i] == 1 ? 0 : x.strides[i];
        size[4 - n + i] = x.shape[i];
      }
      break;
    case kColumn:  // (H), (B,H) or (B,H,M)
      fits = fits && 1 <= n && n <= 4;
      for (int32_t i = 0; fits && i < n; ++i) {
        t.stride[(n == 1) + i] = x.strides[i];
        size[(n == 1) + i] = x.shape[i];
      }
      break;
    case kPair:  // (2,B,H,M) as (B,H,M,2)
      fits = fits && n == 4;
      for (int32_t i = 0; fits && i < 4; ++i) {
        t.stride[i] = x.strides[(i + 1) % 4];
        size[i] = x.shape[(i + 1) % 4];
      }
      break;
    default:
      fits = false;
  }
  std::memcpy(to, &t, sizeof t);
  if (field.size >= 0) {
    fits = fits && field.size + sizeof size <= sizeof call;
    if (fits) std::memcpy(reinterpret_cast<char*>(&call) + field.size, size, sizeof size);
  }
  return fits;
}

}  // namespace
