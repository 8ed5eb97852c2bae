// bfloat16 on tiles: the Mul of the AMX kernels, their one matrix product, and the layouts that it
// reads. Everything is cut in steps of 32: numbers along k, and rows and columns of C (16 lanes, or
// 16 rows, where there are no more). What is missing to 32 is zeros.
//
// Where both operands are packed, pair i of a step holds numbers i and 16 + i, which lie in two
// vectors of the score pipeline; where one is read as it lies (K and V, along D), 2i and 2i + 1.
#pragma once
#include "operand.h"
#if defined(FA_AMX_MODEL)
#include "amx_model.h"
#else
#include "amx.h"
#endif

namespace fa {
namespace FA_ISA {

struct AmxBf16 {
  using Real = float;
  using Element = uint16_t;
  using Registers = amx::Tiles;
  static constexpr int pair = 1;
};
template <>
struct Sizes<AmxBf16> {
  static constexpr int64_t rows = 128, part = 32, first_key = 32, padding = 32;
};
constexpr int64_t kStep = 32;

// A of a product: the numbers of a row and step lie together; rows are `row` numbers apart, steps
// `step`.
struct TileRows {
  const uint16_t* data;
  int64_t row, step;
};
inline const uint32_t* pairs_in(const uint16_t* b) { return reinterpret_cast<const uint32_t*>(b); }
inline TileRows as_it_lies(Broadcast<uint16_t> a) { return {a.data, a.stride, kStep}; }

// One step of a block of R x C tiles of C, whose tiles are 0 to 3; A has 4 and 5, B 6 and 7.
template <int R, int C, int... I>
FA_INLINE void tile_step(const TileRows& a, const uint32_t* b, int64_t ldb,
                         std::integer_sequence<int, I...>) {
  const auto one = [&](auto at) {
    constexpr int r = decltype(at)::value / C, c = decltype(at)::value % C;
    if constexpr (c == 0) amx::load<4 + r>(a.data + 16 * r * a.row, 2 * a.row);
    if constexpr (r == 0) amx::load<6 + c>(b + 16 * c, 4 * ldb);
    amx::dot<r * C + c, 4 + r, 6 + c>();
  };
  (one(std::integral_constant<int, I>{}), ...);
}
template <int R, int C, bool Add, int... I>
FA_INLINE void tile_block(TileRows a, const uint32_t* b, int64_t ldb, int64_t steps, float* c,
                          int64_t ldc, std::integer_sequence<int, I...> all) {
  if constexpr (Add)
    (amx::load<I>(c + I / C * 16 * ldc + I % C * 16, 4 * ldc), ...);
  else
    (amx::zero<I>(), ...);
  for (; steps > 0; --steps, a.data += a.step, b += 16 * ldb) tile_step<R, C>(a, b, ldb, all);
  (amx::store<I>(c + I / C * 16 * ldc + I % C * 16, 4 * ldc), ...);
}

// C (+)= A B, of `steps` steps; B is [steps][16 pairs][ldb]. `rows` and `columns` are multiples of
// 32, or one of them is 16.
template <bool Add>
void tile_product(const TileRows& a, const uint32_t* b, int64_t ldb, int64_t steps, int64_t rows,
                  int64_t columns, float* c, int64_t ldc) {
  const auto blocks = [&](auto r, auto n) {
    constexpr int R = decltype(r)::value, C = decltype(n)::value;
    for (int64_t i = 0; i < rows; i += 16 * R)
      for (int64_t j = 0; j < columns; j += 16 * C)
        tile_block<R, C, Add>({a.data + i * a.row, a.row, a.step}, b + j, ldb, steps,
                              c + i * ldc + j, ldc, std::make_integer_sequence<int, R * C>{});
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (rows == 16)
    blocks(One{}, Two{});
  else if (columns == 16)
    blocks(Two{}, One{});
  else
    blocks(Two{}, Two{});
}

// C = A B of 32 columns and at most two steps: B stays in four tiles, and a tile of C is stored
// while the next is made. Half the loads of a block's.
template <int Steps>
void resident_product(const TileRows& a, const uint32_t* b, int64_t rows, float* c) {
  amx::load<4>(b, 4 * 32);
  amx::load<5>(b + 16, 4 * 32);
  if constexpr (Steps == 2) {
    amx::load<6>(b + 16 * 32, 4 * 32);
    amx::load<7>(b + 16 * 32 + 16, 4 * 32);
  }
  for (int64_t i = 0; i < rows; i += 16, c += 16 * 32) {
    const uint16_t* row = a.data + i * a.row;
    amx::load<2>(row, 2 * a.row);
    amx::zero<0>();
    amx::dot<0, 2, 4>();
    if constexpr (Steps == 2) {
      amx::load<3>(row + a.step, 2 * a.row);
      amx::dot<0, 3, 6>();
    }
    if (i > 0) amx::store<1>(c - 16 * 32 + 16, 4 * 32);
    amx::zero<1>();
    amx::dot<1, 2, 5>();
    if constexpr (Steps == 2) amx::dot<1, 3, 7>();
    amx::store<0>(c, 4 * 32);
  }
  if (rows > 0) amx::store<1>(c - 16 * 32 + 16, 4 * 32);
}

// S[r][lane] = the dot product of row r of X, as it lies, with lane's column of Y. Both have whole
// steps, and S and X whole 32s of rows.
template <int NV>
void tile_products(Broadcast<uint16_t> x, const uint16_t* y, int64_t columns, int64_t rows,
                   float* s) {
  constexpr int64_t lanes = NV * kLanes<float>;
  const int64_t steps = round_up(columns, kStep) / kStep, whole = round_up(rows, kStep);
  const uint32_t* b = pairs_in(y);
  if (NV == 2 && steps == 2)
    resident_product<2>(as_it_lies(x), b, whole, s);
  else if (NV == 2 && steps == 1)
    resident_product<1>(as_it_lies(x), b, whole, s);
  else
    tile_product<false>(as_it_lies(x), b, lanes, steps, whole, lanes, s, lanes);
}
template <int NV>
struct DotProducts<AmxBf16, NV> {
  static void run(Broadcast<uint16_t> x, const uint16_t* y, int64_t columns, int64_t rows,
                  float factor, float* s) {
    tile_products<NV>(x, y, columns, rows, s);
    if (factor == 1) return;
    for (int64_t at = 0; at < rows * NV * 16; at += 16) store(s + at, load(s + at) * factor);
  }
};

// The numbers' bits rounded to bfloat16 in the upper half, ties away from zero. A NaN needs its own
// care only where nobody sees it elsewhere: of one with many bits set the sum would be a number.
FA_INLINE __m512i upper_halves(Vec<float> x) {
  return _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000));
}
FA_INLINE __m512i upper_halves_or_nan(Vec<float> x) {
  return _mm512_mask_add_epi32((__m512i)x, _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), (__m512i)x,
                               _mm512_set1_epi32(0x8000));
}
FA_INLINE Vec<int32_t> pair_up(__m512i first, __m512i second) {
  return (Vec<int32_t>)_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
}
FA_INLINE Vec<int32_t> pair_up(Vec<float> first, Vec<float> second) {
  return pair_up(upper_halves_or_nan(first), upper_halves_or_nan(second));
}
// Sixteen halves and sixteen more, to pairs of one from each.
FA_INLINE Vec<int32_t> pair_up(const uint16_t* first, const uint16_t* second) {
  const __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
  const __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
  return (Vec<int32_t>)_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
}

template <>
struct Operand<AmxBf16> {
  // C += A B.
  static void multiply_add(const uint16_t* a, int64_t row, int64_t step, const uint16_t* b,
                           int64_t ldb, int64_t steps, int64_t rows, int64_t columns, float* c,
                           int64_t ldc) {
    tile_product<true>({a, row, step}, pairs_in(b), ldb, steps, rows, columns, c, ldc);
  }
  // One row, of whole steps: in place, or in `buf`; zeros if it is none of A's `rows`.
  static const uint16_t* row(const Plane& a, int64_t r0, int64_t r, int64_t rows, int64_t columns,
                             uint16_t* buf) {
    static const uint16_t zeros[FA_CPU_MAX_HEAD_DIM] = {};
    if (r >= rows) return zeros;
    const uint16_t* from = static_cast<const uint16_t*>(a.data) + a.at(r0 + r);
    if (a.step == 1 && columns % kStep == 0) return from;
    for (int64_t c = 0; c < columns; ++c) buf[c] = from[c * a.step];
    std::fill(buf + columns, buf + round_up(columns, kStep), uint16_t(0));
    return buf;
  }
  // A as it lies, if it has whole steps of columns and rows.
  static Broadcast<uint16_t> along(const Plane& a, int64_t r0, int64_t rows, int64_t columns,
                                   uint16_t* buf) {
    if (a.step == 1 && columns % kStep == 0 && rows % kStep == 0)
      return {static_cast<const uint16_t*>(a.data) + a.at(r0), a.row};
    const int64_t ld = round_up(columns, kStep);
    for (int64_t r = 0; r < round_up(rows, kStep); ++r, buf += ld) {
      const uint16_t* from = row(a, r0, r, rows, columns, buf);
      if (from != buf) std::copy_n(from, ld, buf);
    }
    return {buf - round_up(rows, kStep) * ld, ld};
  }
  // dst[columns / 2][lanes], of pairs 2i and 2i + 1; `rows_buf` holds 16 rows.
  static void transposed(const Plane& a, int64_t r0, int64_t rows, int64_t, int64_t columns,
                         int64_t lanes, uint16_t* dst, uint16_t* rows_buf) {
    const int64_t ld = round_up(columns, kStep);
    for (int64_t l = 0; l < lanes; l += 16) {
      const uint16_t* from[16];
      for (int x = 0; x < 16; ++x) from[x] = row(a, r0, l + x, rows, columns, rows_buf + x * ld);
      transpose_rows(from, ld, lanes, dst + 2 * l);
    }
  }
  // Of 16 rows of whole steps.
  static void transpose_rows(const uint16_t* const* from, int64_t columns, int64_t lanes,
                             uint16_t* dst) {
    for (int64_t c = 0; c < columns; c += 32) {
      Vec<int32_t> block[16];
#pragma GCC unroll 16
      for (int x = 0; x < 16; ++x) std::memcpy(&block[x], from[x] + c, 64);
      transpose_registers<int32_t>(block);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) std::memcpy(dst + (c + 2 * i) * lanes, &block[i], 64);
    }
  }
  // dst[rows / 32][columns][32]: A's transpose for the left side, summed along A's rows.
  static void turned(const Plane& a, int64_t r0, int64_t rows, int64_t columns, uint16_t* dst,
                     uint16_t* rows_buf) {
    const int64_t ld = round_up(columns, kStep);
    int32_t* to = reinterpret_cast<int32_t*>(dst);
    each_step(a, r0, rows, columns, rows_buf, [&](const uint16_t* const* from) {
      for (int64_t c = 0; c < ld; c += 16) {
        Vec<int32_t> block[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) block[i] = pair_up(from[i] + c, from[16 + i] + c);
        transpose_registers<int32_t>(block);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i, to += 16) store(to, block[i]);
      }
    });
  }
  // dst[rows / 2][columns]: A for the right side, summed along its rows.
  static void across(const Plane& a, int64_t r0, int64_t rows, int64_t columns, uint16_t* dst,
                     uint16_t* rows_buf) {
    const int64_t ld = round_up(columns, kStep);
    int32_t* to = reinterpret_cast<int32_t*>(dst);
    each_step(a, r0, rows, columns, rows_buf, [&](const uint16_t* const* from) {
      for (int i = 0; i < 16; ++i, to += ld)
        for (int64_t c = 0; c < ld; c += 16) store(to + c, pair_up(from[i] + c, from[16 + i] + c));
    });
  }
  // Calls f(the 32 rows of a step) for each step; `rows_buf` holds 32 rows.
  template <class F>
  static FA_INLINE void each_step(const Plane& a, int64_t r0, int64_t rows, int64_t columns,
                                  uint16_t* rows_buf, F f) {
    for (int64_t at = 0; at < rows; at += kStep) {
      const uint16_t* from[kStep];
      for (int64_t x = 0; x < kStep; ++x)
        from[x] = row(a, r0, at + x, rows, columns, rows_buf + x * round_up(columns, kStep));
      f(from);
    }
  }
  // A tile [keys][32 lanes] for the left side, summed along its lanes: dst[keys][32], with zeros
  // past the last key; and one of zeros there for the right, summed along its keys:
  // dst[keys / 2][lanes].
  static void tile_along(const float* tile, int64_t keys, uint16_t* dst) {
    int32_t* to = reinterpret_cast<int32_t*>(dst);
    for (int64_t j = 0; j < keys; ++j, tile += 32, to += 16)
      store(to, pair_up(load(tile), load(tile + 16)));
    std::fill(to, to + (round_up(keys, kStep) - keys) * 16, 0);
  }
  // Both, of value(key, vector).
  template <class Value>
  static FA_INLINE void along_and_across(int64_t keys, uint16_t* along, uint16_t* across,
                                         Value value) {
    int32_t *rows = reinterpret_cast<int32_t*>(along), *to = reinterpret_cast<int32_t*>(across);
    for (int64_t at = 0; at < round_up(keys, kStep); at += 2, to += 32) {
      const int64_t j = at / kStep * kStep + at % kStep / 2;  // and j + 16
      const auto halves = [&](int64_t key, int v) {
        return key < keys ? upper_halves_or_nan(value(key, v)) : _mm512_setzero_si512();
      };
      const __m512i a = halves(j, 0), b = halves(j, 1);
      const __m512i c = halves(j + 16, 0), d = halves(j + 16, 1);
      store(rows + j * 16, pair_up(a, b));
      store(rows + (j + 16) * 16, pair_up(c, d));
      store(to, pair_up(a, c));
      store(to + 16, pair_up(b, d));
    }
  }
  template <int NV>
  static void tile_across(const float* tile, int64_t keys, uint16_t* dst) {
    constexpr int64_t lanes = NV * 16;
    int32_t* to = reinterpret_cast<int32_t*>(dst);
    for (int64_t j = 0; j < keys; j += kStep, tile += 16 * lanes)
      for (int i = 0; i < 16; ++i, tile += lanes)
        for (int64_t l = 0; l < lanes; l += 16, to += 16)
          store(to, pair_up(load(tile + l), load(tile + l + 16 * lanes)));
  }
};

}  // namespace FA_ISA
}  // namespace fa
