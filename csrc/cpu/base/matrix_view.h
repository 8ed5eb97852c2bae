// Addresses of the rows of one batch item and head. Rows of keys and values may be in pages, and in
// eight or four bits with scales. Reading a row converts it to a type that kernels compute with.
#pragma once
#include "plan.h"
#include "quantised.h"

namespace fa {
namespace FA_ISA {

// The (row, column) plane of one batch item and head.
struct Plane {
  const void* data;
  int64_t dtype, origin, row, step;
  FA_INLINE int64_t at(int64_t r, int64_t c = 0) const { return origin + r * row + c * step; }
  // dst[count][ld] = A[r.., c..]; bfloat16 is not converted if T has 16 bits.
  template <class T>
  FA_INLINE void read(int64_t r, int64_t count, int64_t c, int64_t columns, T* dst,
                      int64_t ld) const {
    for (int64_t x = 0; x < count; ++x)
      read_row(data, dtype, at(r + x, c), step, columns, dst + x * ld);
  }
  static constexpr bool scaled() { return false; }
  // True if these rows are at a constant distance of `row`.
  static constexpr bool one_block(int64_t, int64_t) { return true; }
};
// A plane of keys or values. It may be in pages, `apart` from each other, and may have scales: its
// numbers of eight or four bits then stand for numbers of the dtype `kept`.
struct KeyPlane : Plane {
  const int64_t* pages;
  int64_t page, apart, rows;
  Plane scale;
  int64_t scale_apart, kept;
  FA_INLINE bool scaled() const { return scale.data || dtype == FA_I4; }
  FA_INLINE int64_t at(int64_t r, int64_t c = 0) const { return in_pages(*this, apart, r, c); }
  // Where that is in a plane with these pages.
  FA_INLINE int64_t in_pages(const Plane& a, int64_t apart_by, int64_t r, int64_t c) const {
    if (!pages) return a.Plane::at(r, c);
    const uint32_t n = uint32_t(r) / uint32_t(page);
    return a.Plane::at(r - n * page, c) + pages[n] * apart_by;
  }
  FA_INLINE bool one_block(int64_t r, int64_t count) const {
    return !pages || count == 0 || r / page == (r + count - 1) / page;
  }
  FA_INLINE const float* scale_of(int64_t r) const {
    return static_cast<const float*>(scale.data) + in_pages(scale, scale_apart, r, 0);
  }
  template <class T>
  FA_INLINE void read(int64_t r, int64_t count, int64_t c, int64_t columns, T* dst,
                      int64_t ld) const {
    if (scaled()) return read_scaled(r, count, c, columns, dst, ld);
    for (int64_t x = 0; x < count; ++x)
      read_row(data, dtype, at(r + x, c), step, columns, dst + x * ld);
  }
  template <class T>
  [[gnu::noinline]] void read_scaled(int64_t r, int64_t count, int64_t c, int64_t columns, T* dst,
                                     int64_t ld) const {
    const int64_t as = kept;
    if (dtype == FA_I4) return read_int4(r, count, c, columns, dst, ld);
    if (step != 1) return read_apart(r, count, c, columns, dst, ld);
    with_storage(dtype, [&](auto storage) {
      each_scaled(r, count, c, [&](const uint8_t* src, const uint8_t* later, float by) {
        for (int64_t at = 0; at < columns; at += 64) __builtin_prefetch(later + at);
        dequantise<decltype(storage)::value>(src, columns, by, as, dst);
        dst += ld;
      });
    });
  }
  template <class T>
  [[gnu::noinline]] void read_int4(int64_t r, int64_t count, int64_t c, int64_t columns, T* dst,
                                   int64_t ld) const {
    uint8_t bytes[Int4Block::bytes_of(FA_CPU_MAX_HEAD_DIM)];
    for (int64_t x = 0; x < count; ++x, dst += ld) {
      const uint8_t* row = static_cast<const uint8_t*>(data) + at(r + x);
      if (step != 1) {
        for (int64_t i = 0; i < Int4Block::bytes_of(c + columns + 31); ++i)
          bytes[i] = row[i * step];
        row = bytes;
      }
      dequantise_int4(row, c, columns, kept, dst);
    }
  }
  template <class T>
  [[gnu::noinline]] void read_apart(int64_t r, int64_t count, int64_t c, int64_t columns, T* dst,
                                    int64_t ld) const {
    uint8_t row[FA_CPU_MAX_HEAD_DIM];
    with_storage(dtype, [&](auto storage) {
      each_scaled(r, count, c, [&](const uint8_t* src, const uint8_t*, float by) {
        for (int64_t i = 0; i < columns; ++i) row[i] = src[i * step];
        dequantise<decltype(storage)::value>(row, columns, by, kept, dst);
        dst += ld;
      });
    });
  }
  // Calls f(row, a later one, its scale) for each row. Rows of a head may be far apart, where hardware
  // does not prefetch them: the reader does.
  template <class F>
  FA_INLINE void each_scaled(int64_t r, int64_t count, int64_t c, F f) const {
    constexpr int64_t kAhead = 16;
    const int64_t row_by = row, scale_by = scale.row;
    const auto bytes = [&](int64_t block, int64_t at) {
      return static_cast<const uint8_t*>(data) + Plane::at(at, c) + block * apart;
    };
    int64_t n = pages ? uint32_t(r) / uint32_t(page) : 0, at = r - n * page;
    while (count > 0) {  // as long as rows, and the later ones, are at one distance
      const int64_t block = pages ? pages[n] : 0, end = pages ? page : at + count + kAhead;
      const bool here = at + kAhead < end, last = r + end - at >= rows;
      const int64_t some = std::min(count, here ? end - kAhead - at : end - at);
      const uint8_t* src = bytes(block, at);
      const uint8_t* later =
          here || last ? bytes(block, at + kAhead) : bytes(pages[n + 1], at + kAhead - page);
      const float* by = static_cast<const float*>(scale.data) + scale.at(at) + block * scale_apart;
      for (int64_t x = 0; x < some; ++x, src += row_by, later += row_by, by += scale_by)
        f(src, later, *by);
      r += some, at += some, count -= some;
      if (at == end) ++n, at = 0;
    }
  }
};
#if defined(FA_HOME)  // see unit.cpp
#define FA_READS(home, R)                                                                          \
  home template void KeyPlane::read_scaled(int64_t, int64_t, int64_t, int64_t, R*, int64_t) const; \
  home template void KeyPlane::read_int4(int64_t, int64_t, int64_t, int64_t, R*, int64_t) const;   \
  home template void KeyPlane::read_apart(int64_t, int64_t, int64_t, int64_t, R*, int64_t) const;
FA_READS(FA_HOME, float)
FA_READS(FA_HOME_F64, double)
#undef FA_READS
#endif

FA_INLINE Plane plane(const FaTensor& t, int64_t b, int64_t h) {
  return {t.data, t.dtype, b * t.stride[0] + h * t.stride[1], t.stride[2], t.stride[3]};
}
// For k or v. A call with pages has one item: packed_batch.h.
FA_INLINE KeyPlane key_plane(const Params& p, const FaTensor& t, const FaTensor& scale, int64_t b,
                             int64_t hk) {
  return {plane(t, b, hk),     p.pages,         p.page,   t.stride[0], p.N,
          plane(scale, b, hk), scale.stride[0], p.q.dtype};
}
FA_INLINE KeyPlane keys_of(const Params& p, int64_t b, int64_t hk) {
  return key_plane(p, p.k, p.k_scale, b, hk);
}
FA_INLINE KeyPlane values_of(const Params& p, int64_t b, int64_t hk) {
  return key_plane(p, p.v, p.v_scale, b, hk);
}

// Prefetches rows [r, r + rows) of A, while something else is computed: their readers take a few
// columns of several rows at a time, which hardware does not prefetch. Inlined everywhere: GCC
// drops calls of a function that only prefetches.
FA_INLINE void prefetch(const Plane& a, int64_t r, int64_t rows, int64_t columns) {
  const int64_t size = item_size(a.dtype);
  if (a.step != 1) return;
  for (int64_t x = 0; x < rows; ++x) {
    const char* row = static_cast<const char*>(a.data) + a.at(r + x) * size;
    for (int64_t at = 0; at < columns * size; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

FA_INLINE void prefetch_rows(const KeyPlane& a, int64_t r, int64_t rows, int64_t columns) {
  Plane row = a;
  if (!a.pages) return prefetch(row, r, rows, columns);
  for (const int64_t end = std::min(r + rows, a.rows); r < end;) {  // there the table ends
    const int64_t here = std::min(end - r, a.page - uint32_t(r) % uint32_t(a.page));
    row.origin = a.at(r);
    prefetch(row, 0, here, columns);
    r += here;
  }
}

FA_INLINE void prefetch(const KeyPlane& a, int64_t r, int64_t rows, int64_t columns) {
  if (!a.scaled()) prefetch_rows(a, r, rows, columns);  // its reader prefetches
}

// Rows to be read later, prefetched a vector at a time along with those that are read now: all at
// once they would fill the queue of pending lines, and what is read now would wait.
struct Later {
  static constexpr char kNothing[64] = {};  // a null address would be looked up each time
  const char* data = kNothing;
  int64_t row = 0, size = 0;  // in bytes
  FA_INLINE const char* at(int64_t r, int64_t c) const { return data + r * row + c * size; }
  FA_INLINE void ask(int64_t r, int64_t c) const { __builtin_prefetch(at(r, c), 0, 2); }
  // Rows [r, r + rows) of A, of `columns` items; if they are not at one distance, prefetches them
  // at once.
  static FA_INLINE Later of(const KeyPlane& a, int64_t r, int64_t rows, int64_t columns) {
    const int64_t size = item_size(a.dtype);
    if (a.step == 1 && r + rows <= a.rows && a.one_block(r, rows))
      return {static_cast<const char*>(a.data) + a.at(r) * size, a.row * size, size};
    prefetch_rows(a, r, std::min(rows, a.rows - r), columns);
    return {};
  }
};

}  // namespace FA_ISA
}  // namespace fa
