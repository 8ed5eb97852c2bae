// Products of bfloat16 by BFMMLA, an instruction of Arm: a 2 x 2 block of sums gains the products of
// two rows with two columns, four numbers long. So an element is four bfloat16 that are adjacent
// along k, and operands bring elements of two rows, or of two columns, to one vector:
//
//   X, along_k   [rows / 2][k][2]    (`stride`: elements of one row)
//   X, along_r   [k][rows]
//   Y            [k][columns]
#pragma once
#include "operand_packing.h"

#if defined(FA_NEON) && defined(FA_BF16_PRODUCTS)
#define FA_BF16_QUADS

namespace fa {
namespace FA_ISA {

struct QuadBf16 {
  using Real = float;
  using Element = int64_t;
  using Registers = NoRegisters;
  static constexpr int pair = 4, planes = 1;
  // x: rows i and i + 1, y: columns j and j + 1; the block is by rows.
  static FA_INLINE Vec<float> add(Vec<float> block, Vec<int64_t> x, Vec<int64_t> y) {
    return (Vec<float>)vbfmmlaq_f32((float32x4_t)block, (bfloat16x8_t)x, (bfloat16x8_t)y);
  }
};

FA_INLINE Vec<int64_t> zip_low(Vec<int64_t> a, Vec<int64_t> b) {
  return (Vec<int64_t>)vzip1q_s64((int64x2_t)a, (int64x2_t)b);
}
FA_INLINE Vec<int64_t> zip_high(Vec<int64_t> a, Vec<int64_t> b) {
  return (Vec<int64_t>)vzip2q_s64((int64x2_t)a, (int64x2_t)b);
}

template <Unit U>
struct RegisterSums<QuadBf16, U> {
  template <int MR, int NV>
  static FA_INLINE void find(Broadcast<int64_t> x, const int64_t* y, int64_t ldy, int64_t n,
                             Vec<float> (&sums)[MR][NV]) {
    constexpr int pairs = (MR + 1) / 2;
    const int64_t of_pair = U == Unit::along_k ? 2 * x.stride : 2;  // from pair to pair of rows
    const int64_t step = U == Unit::along_k ? 2 : x.stride;
    Vec<float> blocks[pairs][2 * NV];
#pragma GCC unroll 16
    for (int r = 0; r < pairs; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < 2 * NV; ++c) blocks[r][c] = Vec<float>{};
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; ++k) {
      Vec<int64_t> columns[2 * NV];
#pragma GCC unroll 16
      for (int c = 0; c < 2 * NV; ++c) columns[c] = load(y + k * ldy + 2 * c);
#pragma GCC unroll 16
      for (int r = 0; r < pairs; ++r) {
        const Vec<int64_t> rows = load(x.data + r * of_pair + k * step);
#pragma GCC unroll 16
        for (int c = 0; c < 2 * NV; ++c)
          blocks[r][c] = QuadBf16::add(blocks[r][c], rows, columns[c]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const auto a = (Vec<int64_t>)blocks[r / 2][2 * v],
                   b = (Vec<int64_t>)blocks[r / 2][2 * v + 1];
        sums[r][v] = (Vec<float>)(r % 2 ? zip_high(a, b) : zip_low(a, b));
      }
  }
};

template <>
struct Operand<QuadBf16> {
  static constexpr int64_t kMost = FA_CPU_MAX_HEAD_DIM + 8;
  static int64_t elements(int64_t columns) { return (columns + 3) / 4; }

  // One row of bfloat16 that can be read in whole vectors: zeros past `columns`, and if the row is
  // not among A's `rows`.
  template <class A>
  static const uint16_t* row(const A& a, int64_t r0, int64_t r, int64_t rows, int64_t columns,
                             uint16_t* buf) {
    const bool whole = a.dtype == FA_BF16 && a.step == 1 && columns % 8 == 0;
    if (r < rows && whole && !a.scaled())
      return static_cast<const uint16_t*>(a.data) + a.at(r0 + r);
    const int64_t ld = round_up(columns, 8);
    if (r < rows)
      copy_rows(a, r0 + r, 1, 0, columns, buf, ld);
    else
      std::fill(buf, buf + ld, uint16_t(0));
    return buf;
  }
  static FA_INLINE Vec<int64_t> load_halves(const uint16_t* at) {
    return load(reinterpret_cast<const int64_t*>(at));
  }

  template <class A>
  static Broadcast<int64_t> along(const A& a, int64_t r0, int64_t rows, int64_t columns,
                                  int64_t* buf) {
    const int64_t ld = elements(columns);
    for (int64_t r = 0; r < rows; r += 2) pair_of_rows(a, r0, r, rows, columns, buf + r * ld, 2);
    return {buf, ld};
  }
  // dst[elements][2], `step` elements apart.
  template <class A>
  static FA_INLINE void pair_of_rows(const A& a, int64_t r0, int64_t r, int64_t rows,
                                     int64_t columns, int64_t* dst, int64_t step) {
    uint16_t buf[2][kMost];
    const uint16_t* first = row(a, r0, r, rows, columns, buf[0]);
    const uint16_t* second = row(a, r0, r + 1, rows, columns, buf[1]);
    const int64_t n = elements(columns);
    for (int64_t k = 0; k < n; k += 2) {
      const Vec<int64_t> x = load_halves(first + 4 * k), y = load_halves(second + 4 * k);
      store(dst + k * step, zip_low(x, y));
      if (k + 1 < n) store(dst + (k + 1) * step, zip_high(x, y));
    }
  }
  static void transposed(const Plane& a, int64_t r0, int64_t rows, int64_t, int64_t columns,
                         int64_t lanes, int64_t* dst, int64_t*) {
    for (int64_t l = 0; l < lanes; l += 2) pair_of_rows(a, r0, l, rows, columns, dst + l, lanes);
  }

  // Eight numbers of each of four rows, to elements of one number from each.
  static FA_INLINE void store_turned(const Vec<int64_t> (&rows)[4], int64_t* dst) {
    const auto half = [&](int r) { return (int16x8_t)rows[r]; };
    const auto put = [](int64_t* to, int16x8_t even, int16x8_t odd) {  // of rows 0, 2 and 1, 3
      store(to, (Vec<int64_t>)vzip1q_s16(even, odd));
      store(to + 2, (Vec<int64_t>)vzip2q_s16(even, odd));
    };
    put(dst, vzip1q_s16(half(0), half(2)), vzip1q_s16(half(1), half(3)));
    put(dst + 4, vzip2q_s16(half(0), half(2)), vzip2q_s16(half(1), half(3)));
  }
  template <class A>
  static Broadcast<int64_t> across(const A& a, int64_t r0, int64_t rows, int64_t columns, bool,
                                   int64_t* buf, bool = false) {
    const int64_t ld = round_up(columns, kLanes<float>);
    uint16_t copies[4][kMost];
    for (int64_t r = 0; r < rows; r += 4) {
      const uint16_t* from[4];
      for (int x = 0; x < 4; ++x) from[x] = row(a, r0, r + x, rows, columns, copies[x]);
      int64_t* to = buf + r / 4 * ld;
      for (int64_t c = 0; c < ld; c += 8) {
        Vec<int64_t> eight[4];
#pragma GCC unroll 4
        for (int x = 0; x < 4; ++x) eight[x] = load_halves(from[x] + c);
        int64_t turned[8];
        const bool whole = c + 8 <= ld;
        store_turned(eight, whole ? to + c : turned);
        if (!whole) std::copy_n(turned, 4, to + c);
      }
    }
    return {buf, ld};
  }
  static const int64_t* tile_along(const float* tile, int64_t keys, int64_t lanes, int64_t* buf) {
    const int64_t ld = lanes / 4;
    for (int64_t j = 0; j < keys; j += 2)
      for (int64_t k = 0; k < ld; ++k) {
        const float* at = tile + j * lanes + 4 * k;
        const Vec<float> second = j + 1 < keys ? load(at + lanes) : Vec<float>{};
        store(buf + j * ld + 2 * k, (Vec<int64_t>)halves_of(load(at), second));
      }
    return buf;
  }
  static const int64_t* tile_across(const float* tile, int64_t keys, int64_t lanes, int64_t* buf) {
    for (int64_t j = 0; j < keys; j += 4)
      for (int64_t l = 0; l < lanes; l += 4) {
        const float* at = tile + j * lanes + l;
        Vec<float> row[4];
#pragma GCC unroll 4
        for (int x = 0; x < 4; ++x) row[x] = j + x < keys ? load(at + x * lanes) : Vec<float>{};
        // Rows 0 and 1, 2 and 3 in the halves of a vector: 0 and 2, then 1 and 3 are zipped.
        const auto a = (int16x8_t)halves_of(row[0], row[1]),
                   b = (int16x8_t)halves_of(row[2], row[3]);
        const int16x8_t even = vzip1q_s16(a, b), odd = vzip2q_s16(a, b);
        store(buf + j / 4 * lanes + l, (Vec<int64_t>)vzip1q_s16(even, odd));
        store(buf + j / 4 * lanes + l + 2, (Vec<int64_t>)vzip2q_s16(even, odd));
      }
    return buf;
  }
};

}  // namespace FA_ISA
}  // namespace fa
#endif
