// New keys or values of a cache, written into its pages: a task is some rows, counted through all
// items.
#pragma once
#include <algorithm>

#include "../../abi.h"
#include "../../common/item_size.h"
#include "row_quantiser.h"

namespace fa {

// Writes n numbers to a row of pages, and its scale.
using WriteRow = void (*)(const void* x, int64_t n, uint8_t* to, float* scale);

template <class T>
WriteRow row_writer_of(int64_t dtype) {
  switch (dtype) {
    case FA_I8:
      return quantise_row<ToInt8, T>;
    case FA_E4M3:
      return quantise_row<ToE4m3, T>;
    case FA_E5M2:
      return quantise_row<ToE5m2, T>;
    case FA_I4:
      return quantise_int4_row<T>;
    default:
      return copy_row<T>;
  }
}

template <class T>
void subtract(const void* row, const void* subtracted, int64_t n, void* to) {
  using R = NumberOf<T>;
  const T* x = static_cast<const T*>(row);
  for (int64_t i = 0; i < n; ++i)
    static_cast<R*>(to)[i] = number(x[i]) - static_cast<const R*>(subtracted)[i];
}

// subtract: null, or makes the row that `write` gets.
struct RowWriter {
  WriteRow write;
  void (*subtract)(const void* row, const void* subtracted, int64_t n, void* to);
  int64_t number_size;
};
template <class T>
RowWriter row_writer_from(const FaAppend& p) {
  using R = NumberOf<T>;
  if (p.subtracted) return {row_writer_of<R>(p.dtype), subtract<T>, sizeof(R)};
  return {row_writer_of<T>(p.dtype), nullptr, 0};
}
inline RowWriter row_writer(const FaAppend& p) {
  switch (p.x.dtype) {
    case FA_F64:
      return row_writer_from<double>(p);
    case FA_BF16:
      return row_writer_from<RowBf16>(p);
    case FA_F16:
      return row_writer_from<RowF16>(p);
    default:
      return row_writer_from<float>(p);
  }
}

constexpr int64_t kRowsOfTask = 32;

inline int64_t new_rows(const FaAppend& p, int64_t b) {
  return p.offsets ? p.offsets[b + 1] - p.offsets[b] : p.n;
}
inline int64_t all_new_rows(const FaAppend& p) { return p.offsets ? p.offsets[p.B] : p.B * p.n; }
inline int64_t append_tasks(const FaAppend& p) {
  return (all_new_rows(p) + kRowsOfTask - 1) / kRowsOfTask;
}

// FA_BAD_PAGE if an item has no page for its new rows.
inline int64_t bad_append(const FaAppend& p) {
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t first = p.lengths[b] - new_rows(p, b);
    if (first < 0 || p.lengths[b] > p.blocks * p.page) return FA_BAD_PAGE;
    for (int64_t at = first / p.page; at * p.page < p.lengths[b]; ++at) {
      const int64_t page = p.table[b * p.blocks + at];
      if (page < 0 || page >= p.P) return FA_BAD_PAGE;
    }
  }
  return FA_OK;
}

// `room` is for D numbers, if the writer subtracts.
inline void append_rows(const FaAppend& p, const RowWriter& writer, int64_t task, void* room) {
  const int64_t end = std::min((task + 1) * kRowsOfTask, all_new_rows(p));
  const char* from = static_cast<const char*>(p.x.data);
  for (int64_t at = task * kRowsOfTask; at < end;) {
    const int64_t b =
        p.offsets ? std::upper_bound(p.offsets, p.offsets + p.B + 1, at) - p.offsets - 1 : at / p.n;
    const int64_t first = p.offsets ? p.offsets[b] : b * p.n, count = new_rows(p, b);
    const int64_t of_item = p.offsets ? first * p.x.stride[1] : b * p.x.stride[0];
    for (int64_t i = at - first; i < std::min(count, end - first); ++i, ++at) {
      const int64_t key = p.lengths[b] - count + i;
      const int64_t page = p.table[b * p.blocks + key / p.page], position = key % p.page;
      const auto place = [&](const int64_t* stride, int64_t h) {
        return page * stride[0] + position * stride[1] + h * stride[2];
      };
      for (int64_t h = 0; h < p.Hk; ++h) {
        const int64_t at_x = of_item + i * p.x.stride[1] + h * p.x.stride[2];
        const void* x = from + at_x * item_size(p.x.dtype);
        if (writer.subtract) {
          const char* of_head =
              static_cast<const char*>(p.subtracted) + h * p.D * writer.number_size;
          writer.subtract(x, of_head, p.D, room);
          x = room;
        }
        writer.write(x, p.D,
                     static_cast<uint8_t*>(p.pages) + place(p.stride, h) * item_size(p.dtype),
                     p.scales ? p.scales + place(p.scale_stride, h) : nullptr);
      }
    }
  }
}

}  // namespace fa
