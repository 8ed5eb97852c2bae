// The layouts of the AMX kernels: tensors and tiles of scores split into planes of bfloat16.
//
// Where both operands of a product are packed, pair i of a step holds numbers i and 16 + i, which
// are in two vectors of the score pipeline. Only bfloat16 K and V, along D, are read in place:
// there pair i holds numbers 2i and 2i + 1.
#pragma once
#include "bf16_split.h"

namespace fa {
namespace FA_ISA {

template <int P>
struct Operand<Amx<P>> {
  using E = Planes<P>;
  // The type of a row before it is split; bfloat16 is not split.
  using Source = std::conditional_t<P == 1, uint16_t, float>;

  // C += A B.
  template <Sums To = P == 1 ? Sums::go_on : Sums::add, class Beside = Nothing>
  static void multiply_add(const E* a, int64_t row, int64_t step, const E* b, int64_t ldb,
                           int64_t steps, int64_t rows, int64_t columns, float* c, int64_t ldc,
                           Beside beside = {}) {
    tile_product<To, OfSums<P>>(TileRows<P>{a, row, step}, TilePairs<P>{b, ldb}, steps, rows,
                                columns, c, ldc, beside);
  }
  static constexpr Source kZeros[FA_CPU_MAX_HEAD_DIM] = {};
  // One row, padded to whole steps: in place, or in `buf`. Zeros if it is not among A's `rows`, or
  // if it has no planes, which sets `unfit`.
  template <class A>
  static const Source* row(const A& a, int64_t r0, int64_t r, int64_t rows, int64_t columns,
                           Source* buf, uint8_t* unfit) {
    if (r >= rows) return kZeros;
    const bool whole = a.step == 1 && columns % kStep == 0;
    const Source* source = buf;
    if (whole && a.dtype == (P == 1 ? FA_BF16 : FA_F32)) {
      source = static_cast<const Source*>(a.data) + a.at(r0 + r);
    } else {
      copy(a, r0 + r, 1, columns, buf);
    }
    return fit_or_zeros(source, columns, unfit);
  }
  // Rows of whole steps.
  template <class A>
  static void copy(const A& a, int64_t r, int64_t rows, int64_t columns, Source* buf) {
    copy_rows(a, r, rows, 0, columns, buf, round_up(columns, kStep));
  }
  static const Source* fit_or_zeros(const Source* row, int64_t columns, uint8_t* unfit) {
    if constexpr (P == 1) return row;
    const Fit fit = fit_of(reinterpret_cast<const float*>(row), round_up(columns, kStep));
    if (unfit) *unfit |= fit;
    return fit == kFits ? row : kZeros;
  }
  static Source* as_source(E* rows_buf) { return reinterpret_cast<Source*>(rows_buf); }
  static int32_t* as_pairs(E* dst) { return reinterpret_cast<int32_t*>(dst); }

  // Calls out(plane, pairs) for sixteen numbers paired with sixteen more.
  template <class Out>
  static FA_INLINE void cut(const Source* first, const Source* second, Out out) {
    if constexpr (P == 1)
      out(0, pair_up(first, second));
    else
      each_plane<P, true>(load(first), load(second), out);
  }
  template <class Out>
  static FA_INLINE void cut_row(const Source* at, Out out) {
    Vec<int32_t> pairs;
    if constexpr (P == 1) {
      std::memcpy(&pairs, at, sizeof pairs);
      out(0, pairs);
    } else {
      cut(at, at + 16, out);
    }
  }

  // A as [rows][steps][P][32]; in place if it has that layout. `unfit` gets a flag for each row.
  // Columns are padded with zeros to whole steps, rows to a multiple of `read`.
  template <class A>
  static Broadcast<E> along(const A& a, int64_t r0, int64_t rows, int64_t columns, E* buf,
                            uint8_t* unfit = nullptr, int64_t read = kStep) {
    const bool whole = a.step == 1 && columns % kStep == 0 && rows % read == 0;
    if (P == 1 && a.dtype == FA_BF16 && whole && a.one_block(r0, rows))
      return {static_cast<const E*>(a.data) + a.at(r0), a.row};
    const int64_t ld = round_up(columns, kStep);
    if (P == 1 && a.scaled()) {
      Source* halves = as_source(buf);
      copy(a, r0, rows, columns, halves);
      std::fill(halves + rows * ld, halves + round_up(rows, read) * ld, Source(0));
      return {buf, ld};
    }
    alignas(64) Source staged[FA_CPU_MAX_HEAD_DIM];
    int32_t* to = as_pairs(buf);
    const bool scattered = !a.one_block(r0, rows);  // in pages, which hardware does not prefetch
    for (int64_t r = 0; r < round_up(rows, read); ++r) {
      uint8_t* told = unfit && r < rows ? unfit + r : nullptr;
      if (told) *told = kFits;
      if (scattered && r + kStep < rows) prefetch(a, r0 + r + kStep, 1, columns);
      const Source* from = row(a, r0, r, rows, columns, staged, told);
      for (int64_t c = 0; c < ld; c += kStep, to += 16 * P)
        cut_row(from + c, [&](int x, Vec<int32_t> pairs) { store(to + 16 * x, pairs); });
    }
    return {buf, ld};
  }
  // dst[columns / 2][P][lanes]. `rows_buf` holds 16 rows; `unfit` accumulates each row's flag.
  static void transposed(const Plane& a, int64_t r0, int64_t rows, int64_t, int64_t columns,
                         int64_t lanes, E* dst, E* rows_buf, uint8_t* unfit = nullptr) {
    const int64_t ld = round_up(columns, kStep);
    for (int64_t l = 0; l < lanes; l += 16) {
      const Source* from[16];
      for (int x = 0; x < 16; ++x)
        from[x] = row(a, r0, l + x, rows, columns, as_source(rows_buf) + x * ld,
                      unfit ? unfit + l + x : nullptr);
      transpose_rows(from, ld, lanes, as_pairs(dst) + l);
    }
  }
  // Transposes 16 rows of whole steps.
  static void transpose_rows(const Source* const* from, int64_t columns, int64_t lanes,
                             int32_t* dst) {
    for (int64_t c = 0; c < columns; c += kStep) {
      Vec<int32_t> block[P][16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r)
        cut_row(from[r] + c, [&](int x, Vec<int32_t> pairs) { block[x][r] = pairs; });
      for (int x = 0; x < P; ++x) {
        transpose_registers<int32_t>(block[x]);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store(dst + ((c / 2 + i) * P + x) * lanes, block[x][i]);
      }
    }
  }
  // dst[rows / 32][columns][P][32]: A's transpose for the left side, summed along A's rows.
  template <class A>
  static void turned(const A& a, int64_t r0, int64_t rows, int64_t columns, E* dst, E* rows_buf,
                     uint8_t* unfit = nullptr) {
    const int64_t ld = round_up(columns, kStep);
    int32_t* to = as_pairs(dst);
    each_step(a, r0, rows, columns, rows_buf, unfit, [&](const Source* const* from) {
      for (int64_t c = 0; c < ld; c += 16, to += 256 * P) {
        Vec<int32_t> block[P][16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          cut(from[i] + c, from[16 + i] + c,
              [&](int x, Vec<int32_t> pairs) { block[x][i] = pairs; });
        for (int x = 0; x < P; ++x) {
          transpose_registers<int32_t>(block[x]);
#pragma GCC unroll 16
          for (int i = 0; i < 16; ++i) store(to + (i * P + x) * 16, block[x][i]);
        }
      }
    });
  }
  // dst[rows / 2][P][columns]: A for the right side, summed along its rows.
  template <class A>
  static void across(const A& a, int64_t r0, int64_t rows, int64_t columns, E* dst, E* rows_buf,
                     uint8_t* unfit = nullptr) {
    const int64_t ld = round_up(columns, kStep);
    int32_t* to = as_pairs(dst);
    each_step(a, r0, rows, columns, rows_buf, unfit, [&](const Source* const* from) {
      for (int i = 0; i < 16; ++i, to += P * ld)
        for (int64_t c = 0; c < ld; c += 16)
          cut(from[i] + c, from[16 + i] + c,
              [&](int x, Vec<int32_t> pairs) { store(to + x * ld + c, pairs); });
    });
  }
  // Calls f(the 32 rows of a step) for each step; `rows_buf` holds 32 rows. `unfit` gets a flag for
  // each row.
  template <class A, class F>
  static FA_INLINE void each_step(const A& a, int64_t r0, int64_t rows, int64_t columns,
                                  E* rows_buf, uint8_t* unfit, F f) {
    const int64_t ld = round_up(columns, kStep);
    for (int64_t at = 0; at < rows; at += kStep) {
      const Source* from[kStep];
      const int64_t copied = a.scaled() ? std::min(kStep, rows - at) : 0;
      if (copied) copy(a, r0 + at, copied, columns, as_source(rows_buf));
      for (int64_t x = 0; x < kStep; ++x) {
        uint8_t* told = unfit && at + x < rows ? unfit + at + x : nullptr;
        if (told) *told = kFits;
        Source* buf = as_source(rows_buf) + x * ld;
        from[x] = x < copied ? fit_or_zeros(buf, columns, told)
                             : row(a, r0, at + x, rows, columns, buf, told);
      }
      f(from);
    }
  }
  // tile_along: a tile [keys][32 lanes] for the left side, summed along its lanes:
  // dst[keys][P][32], with zeros past the last key. tile_across: a tile that is zero past its last
  // key for the right side, summed along its keys: dst[keys / 2][P][lanes].
  static void tile_along(const float* tile, int64_t keys, E* dst) {
    int32_t* to = as_pairs(dst);
    for (int64_t j = 0; j < keys; ++j, tile += 32, to += 16 * P)
      each_plane<P, false>(load(tile), load(tile + 16),
                           [&](int x, Vec<int32_t> pairs) { store(to + 16 * x, pairs); });
    std::fill(to, to + (round_up(keys, kStep) - keys) * 16 * P, 0);
  }
  // Both layouts, from value(key, vector). Returns whether all values have planes.
  template <class Value>
  static FA_INLINE bool along_and_across(int64_t keys, E* along, E* across, Value value) {
    int32_t *rows = as_pairs(along), *to = as_pairs(across);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < round_up(keys, kStep); at += 2, to += 32 * P) {
      const int64_t j = at / kStep * kStep + at % kStep / 2;  // and j + 16
      Vec<float> x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int64_t key = j + i / 2 * 16;
        x[i] = key < keys ? value(key, i % 2) : Vec<float>{};
        if (P > 1) largest = _mm512_max_epu32(largest, magnitude(x[i]));
      }
#pragma GCC unroll 3
      for (int plane = 0; plane < P; ++plane) {
        __m512i half[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) half[i] = take_plane<P, false>(plane, x[i]);
        store(rows + (j * P + plane) * 16, pair_up(half[0], half[1]));
        store(rows + ((j + 16) * P + plane) * 16, pair_up(half[2], half[3]));
        store(to + plane * 32, pair_up(half[0], half[2]));
        store(to + plane * 32 + 16, pair_up(half[1], half[3]));
      }
    }
    return P == 1 || sums_fit(largest);
  }
  template <int NV>
  static void tile_across(const float* tile, int64_t keys, E* dst) {
    constexpr int64_t lanes = NV * 16;
    int32_t* to = as_pairs(dst);
    for (int64_t j = 0; j < keys; j += kStep, tile += 16 * lanes)
      for (int i = 0; i < 16; ++i, tile += lanes, to += P * lanes)
        for (int64_t l = 0; l < lanes; l += 16)
          each_plane<P, false>(
              load(tile + l), load(tile + l + 16 * lanes),
              [&](int x, Vec<int32_t> pairs) { store(to + x * lanes + l, pairs); });
  }
};

}  // namespace FA_ISA
}  // namespace fa
