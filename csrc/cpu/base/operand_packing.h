// Brings tensors into the layouts that products read. A tensor is copied only if its own layout
// will not do. There are three layouts (A is a slice of rows x columns):
//
//   along      A[r][c]      broadcast operand, summed along the columns   (K, V)
//   across     A[r][c]      summed along the rows                         (V, Q, dO, K)
//   transposed A[c][lane r] vector operand, summed along the columns      (Q, dO)
//
// For a Mul of pairs the summed direction holds two bfloat16 per element.
#pragma once
#include "matrix_view.h"
#include "product.h"

namespace fa {
namespace FA_ISA {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class R>
FA_INLINE bool readable_in_place(const Plane& a) {
  return a.dtype == dtype_of<R> && a.step == 1;
}
template <class R, class A>
FA_INLINE const R* in_place(const A& a, int64_t r, int64_t c = 0) {
  return static_cast<const R*>(a.data) + a.at(r, c);
}

// buf[rows][ld] = A[r0.., c0..], zero past `columns`.
template <class R, class A>
void copy_rows(const A& a, int64_t r0, int64_t rows, int64_t c0, int64_t columns, R* buf,
               int64_t ld) {
  a.read(r0, rows, c0, columns, buf, ld);
  for (int64_t r = 0; r < rows; ++r) std::fill(buf + r * ld + columns, buf + (r + 1) * ld, R(0));
}

// Calls out(c, column c of src[rows][ld] as a vector), lanes past `rows` zero.
template <class E, class Out>
FA_INLINE void each_column(const E* src, int64_t ld, int64_t rows, int64_t columns, Out out) {
  constexpr int W = kLanes<E>;
  Vec<E> block[W];
  int64_t c = 0;
  if (rows >= W)  // whole blocks stay in registers
    for (; c + W <= columns; c += W) {
      load_transposed(src + c, ld, block);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) out(c + i, block[i]);
    }
  for (; c < columns; c += W) {
    const int64_t width = std::min<int64_t>(W, columns - c);
    for (int r = 0; r < W; ++r) block[r] = r < rows ? load_some(src + r * ld + c, width) : Vec<E>{};
    transpose_registers<E>(block);
    for (int64_t i = 0; i < width; ++i) out(c + i, block[i]);
  }
}
template <class E>
void transpose(const E* src, int64_t ld, int64_t rows, int64_t columns, E* dst, int64_t ldd) {
  each_column(src, ld, rows, columns, [&](int64_t c, Vec<E> x) { store(dst + c * ldd, x); });
}

// What a row is longer by so that rows do not collide: a line of a cache.
template <class E>
constexpr int64_t kSpare = kSmallCache ? 64 / sizeof(E) : 0;

template <class Mul>
struct Operand;

template <class R>
struct Operand<Plain<R>> {
  template <class A>
  static Broadcast<R> along(const A& a, int64_t r0, int64_t rows, int64_t columns, R* buf) {
    if (readable_in_place<R>(a) && a.one_block(r0, rows)) return {in_place<R>(a, r0), a.row};
    copy_rows(a, r0, rows, 0, columns, buf, columns);
    return {buf, columns};
  }
  // With `padded`, the columns are filled with zeros up to whole vectors. Rows that are read `often`
  // are copied if they collide: `buf` has room for kSpare more numbers a row.
  template <class A>
  static Broadcast<R> across(const A& a, int64_t r0, int64_t rows, int64_t columns, bool padded,
                             R* buf, bool often = false) {
    int64_t ld = padded ? round_up(columns, kLanes<R>) : columns;
    const bool here = readable_in_place<R>(a) && ld == columns && a.one_block(r0, rows);
    if (here && !(often && collide<R>(a.row))) return {in_place<R>(a, r0), a.row};
    if (often && collide<R>(ld)) ld += kSpare<R>;
    copy_rows(a, r0, rows, 0, columns, buf, ld);
    return {buf, ld};
  }
  // dst[columns][lanes] from rows r0.. and columns c0..; `rows_buf` holds kLanes rows.
  static void transposed(const Plane& a, int64_t r0, int64_t rows, int64_t c0, int64_t columns,
                         int64_t lanes, R* dst, R* rows_buf) {
    each_lanes(a, r0, rows, c0, columns, lanes, rows_buf,
               [&](int64_t c, int64_t l, Vec<R> x) { store(dst + c * lanes + l, x); });
  }
  // Calls out(c, l, lanes [l, l + kLanes) of column c).
  template <class Out>
  static FA_INLINE void each_lanes(const Plane& a, int64_t r0, int64_t rows, int64_t c0,
                                   int64_t columns, int64_t lanes, R* rows_buf, Out out) {
    for (int64_t l = 0; l < lanes; l += kLanes<R>) {
      const int64_t n = std::clamp<int64_t>(rows - l, 0, kLanes<R>);
      const bool here = readable_in_place<R>(a);
      if (!here) copy_rows(a, r0 + l, n, c0, columns, rows_buf, columns);
      each_column(here ? in_place<R>(a, r0 + l, c0) : rows_buf, here ? a.row : columns, n, columns,
                  [&](int64_t c, Vec<R> x) { out(c, l, x); });
    }
  }
  // A tile [keys][lanes] as an operand summed along its lanes, or along its keys.
  static const R* tile_along(const R* tile, int64_t, int64_t, R*) { return tile; }
  static const R* tile_across(const R* tile, int64_t, int64_t, R*) { return tile; }
};

#if defined(FA_BF16_PRODUCTS)
template <>
struct Operand<PairedBf16> {
  static constexpr int64_t W = kLanes<int32_t>;
  template <class A>
  static Broadcast<int32_t> along(const A& a, int64_t r0, int64_t rows, int64_t columns,
                                  int32_t* buf) {
    const bool whole = a.dtype == FA_BF16 && a.step == 1 && columns % 2 == 0 && a.row % 2 == 0;
    if (whole && a.one_block(r0, rows)) {
      const uint16_t* first = static_cast<const uint16_t*>(a.data) + a.at(r0);
      return {reinterpret_cast<const int32_t*>(first), a.row / 2};
    }
    const int64_t ld = (columns + 1) / 2;
    copy_rows(a, r0, rows, 0, columns, reinterpret_cast<uint16_t*>(buf), 2 * ld);
    return {buf, ld};
  }
  template <class A>
  static Broadcast<int32_t> across(const A& a, int64_t r0, int64_t rows, int64_t columns, bool,
                                   int32_t* buf, bool = false) {
    const int64_t ld = round_up(columns, W);
    uint16_t row[2][FA_CPU_MAX_HEAD_DIM + W];
    for (int64_t r = 0; r < rows; r += 2) {
      copy_rows(a, r0 + r, 1, 0, columns, row[0], ld);
      if (r + 1 < rows)
        copy_rows(a, r0 + r + 1, 1, 0, columns, row[1], ld);
      else
        std::fill(row[1], row[1] + ld, uint16_t(0));
      for (int64_t c = 0; c < ld; c += W)
        store(buf + r / 2 * ld + c, zip_halves(two_rows(row[0] + c, row[1] + c)));
    }
    return {buf, ld};
  }
  static void transposed(const Plane& a, int64_t r0, int64_t rows, int64_t, int64_t columns,
                         int64_t lanes, int32_t* dst, int32_t* rows_buf) {
    for (int64_t l = 0; l < lanes; l += W) {
      const int64_t n = std::clamp<int64_t>(rows - l, 0, W);
      const Broadcast<int32_t> src = along(a, r0 + l, n, columns, rows_buf);
      transpose(src.data, src.stride, n, (columns + 1) / 2, dst + l, lanes);
    }
  }
  static const int32_t* tile_along(const float* tile, int64_t keys, int64_t lanes, int32_t* buf) {
    // Whole rows of `lanes`; an odd number of vectors leaves half a pair vector at the end.
    for (int64_t at = 0; at < keys * lanes; at += 2 * W) {
      const bool whole = at + 2 * W <= keys * lanes;
      const Vec<float> second = whole ? load(tile + at + W) : Vec<float>{};
      const Vec<int32_t> pairs = halves_of(load(tile + at), second);
      std::memcpy(buf + at / 2, &pairs, whole ? 4 * W : 2 * W);
    }
    return buf;
  }
  static const int32_t* tile_across(const float* tile, int64_t keys, int64_t lanes, int32_t* buf) {
    for (int64_t j = 0; j < keys; j += 2)
      for (int64_t l = 0; l < lanes; l += W) {
        const float* at = tile + j * lanes + l;
        const Vec<float> second = j + 1 < keys ? load(at + lanes) : Vec<float>{};
        store(buf + j / 2 * lanes + l, zip_halves(halves_of(load(at), second)));
      }
    return buf;
  }
};
#endif

// out[r0 + lane][c0 + c] = tile[c][lane] * factor[lane] for `rows` lanes.
template <class R>
void write_transposed(const R* tile, int64_t lanes, const R* factor, const Plane& out, int64_t r0,
                      int64_t rows, int64_t c0, int64_t columns) {
  constexpr int W = kLanes<R>, kWide = 16;  // columns that are written at once
  R block[W * kWide];
  for (int64_t l = 0; l < rows; l += W) {
    const Vec<R> f = load(factor + l);
    const int64_t n = std::min<int64_t>(W, rows - l);
    for (int64_t c = 0; c < columns; c += kWide) {
      const int64_t width = std::min<int64_t>(kWide, columns - c);
      for (int64_t x = 0; x < width; x += W) {
        Vec<R> v[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          v[i] = Vec<R>{};
          if (x + i < width) v[i] = load(tile + (c + x + i) * lanes + l) * f;
        }
        transpose_registers<R>(v);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(block + i * kWide + x, v[i]);
      }
      for (int64_t i = 0; i < n; ++i)
        write_row(const_cast<void*>(out.data), out.dtype, out.at(r0 + l + i, c0 + c), out.step,
                  width, block + i * kWide);
    }
  }
}

}  // namespace FA_ISA
}  // namespace fa
