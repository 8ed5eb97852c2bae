// The two products of decoding, for a few query rows against keys and values that are read as they
// lie, lanes along their columns:
//
//   Products   S[key][row] = factor * sum_c K[key][c] Q[row][c]
//   Sum        O[row][c]  += sum_key P[key][row] V[key][c]
//
// (product.h has lanes along the rows: most would be empty here.)
#pragma once
#include "operand.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct FewRows {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  static constexpr int pair = Mul::pair, W = kLanes<R>;

  static int64_t elements(int64_t columns) { return (columns + pair - 1) / pair; }
  static int64_t padded(int64_t columns) { return round_up(elements(columns), kLanes<E>); }

  // s[key][W rows] of at most W keys; q is [rows][padded(columns)], with zeros at the end.
  static void products(Broadcast<E> k, int64_t keys, int64_t columns, const E* q, int64_t rows,
                       R factor, R* s) {
    const int64_t n = elements(columns), whole = n / kLanes<E> * kLanes<E>;
    const E* key[W];
    for (int x = 0; x < W; ++x) key[x] = k.data + std::min<int64_t>(x, keys - 1) * k.stride;
    Vec<R> block[W] = {};  // [row][key], then [key][row]
    for (int64_t r = 0; r < rows; ++r) {
      const E* qr = q + r * padded(columns);
      Vec<R> sum[W] = {};
      for (int64_t c = 0; c < whole; c += kLanes<E>) {
        const Vec<E> y = load(qr + c);
#pragma GCC unroll 16
        for (int x = 0; x < W; ++x) sum[x] = Mul::fma(sum[x], load(key[x] + c), y);
      }
      if (whole < n) {
        const Vec<E> y = load(qr + whole);
#pragma GCC unroll 16
        for (int x = 0; x < W; ++x)
          sum[x] = Mul::fma(sum[x], load_some(key[x] + whole, n - whole), y);
      }
      block[r] = sum_lanes<R>(sum) * factor;
    }
    transpose_registers<R>(block);
    for (int64_t x = 0; x < keys; ++x) store(s + x * W, block[x]);
  }
};

// out is [rows][columns(Dv)], in an order of its own that `natural` undoes.
template <class Mul>
struct WeightedSum {
  using R = typename Mul::Real;
  using Op = Operand<Mul>;
  static int64_t columns(int64_t Dv) { return round_up(Dv, kLanes<R>); }
  static Broadcast<R> stage(const Plane& v, int64_t j0, int64_t keys, int64_t Dv, R* buf) {
    return Op::across(v, j0, keys, Dv, true, buf);
  }
  static int64_t staged(int64_t keys, int64_t Dv) { return keys * columns(Dv); }
  static void add(const R* p, Broadcast<R> v, int64_t keys, int64_t rows, int64_t Dv, R*, R* out) {
    accumulate_wide<Mul, Unit::along_r>(Broadcast<R>{p, kLanes<R>}, v.data, v.stride, keys, rows,
                                        columns(Dv), out, columns(Dv));
  }
  static void natural(const R* out, int64_t Dv, R* to) { std::copy_n(out, columns(Dv), to); }
};

#if defined(__AVX512BF16__)
// Two keys at a time: their rows are zipped to pairs within 128 bits, which is one instruction but
// takes columns 0-3, 8-11, .. into one vector and 4-7, 12-15, .. into the next.
template <>
struct WeightedSum<PairedBf16> {
  using Op = Operand<PairedBf16>;
  static int64_t columns(int64_t Dv) { return round_up(Dv, 32); }
  static Broadcast<int32_t> stage(const Plane& v, int64_t j0, int64_t keys, int64_t Dv,
                                  int32_t* buf) {
    if (v.step == 1 && v.row % 2 == 0 && Dv % 32 == 0) {
      const uint16_t* first = static_cast<const uint16_t*>(v.data) + v.at(j0);
      return {reinterpret_cast<const int32_t*>(first), v.row / 2};
    }
    const int64_t ld = columns(Dv) / 2;
    for (int64_t j = 0; j < keys; ++j)
      Op::copy_halves(v, j0 + j, Dv, reinterpret_cast<uint16_t*>(buf + j * ld), 2 * ld);
    return {buf, ld};
  }
  static int64_t staged(int64_t keys, int64_t Dv) { return keys * columns(Dv) / 2; }

  // `rows` rows and 32 G columns.
  template <int ROWS, int G>
  static FA_INLINE void block(const int32_t* p, const int32_t* v, int64_t ldv, int64_t keys,
                              float* out, int64_t ldo) {
    Vec<float> acc[ROWS][2 * G];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < 2 * G; ++g) acc[r][g] = load(out + r * ldo + 16 * g);
    for (int64_t j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const __m512i a = (__m512i)load(v + j * ldv + 16 * g);
        __m512i b = _mm512_setzero_si512();
        if (j + 1 < keys) b = (__m512i)load(v + (j + 1) * ldv + 16 * g);
        const Vec<int32_t> lo = (Vec<int32_t>)_mm512_unpacklo_epi16(a, b);
        const Vec<int32_t> hi = (Vec<int32_t>)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const int32_t* both = p + j / 2 * 16 + r;
          acc[r][2 * g] = PairedBf16::fma(acc[r][2 * g], both, lo);
          acc[r][2 * g + 1] = PairedBf16::fma(acc[r][2 * g + 1], both, hi);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < 2 * G; ++g) store(out + r * ldo + 16 * g, acc[r][g]);
  }
  template <int ROWS, int G>
  static void rows(const int32_t* p, const int32_t* v, int64_t ldv, int64_t keys, int64_t ldo,
                   float* out, int64_t c = 0) {
    for (; c + 32 * G <= ldo; c += 32 * G)
      block<ROWS, G>(p, v + c / 2, ldv, keys, out + c, ldo);
    if constexpr (G > 1)
      if (c < ldo) rows<ROWS, G / 2>(p, v, ldv, keys, ldo, out, c);
  }
  static void add(const float* tile, Broadcast<int32_t> v, int64_t keys, int64_t count, int64_t Dv,
                  int32_t* pairs, float* out) {
    const int32_t* p = Op::tile_across(tile, keys, 16, pairs);
    const int64_t ldo = columns(Dv);
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) rows<4, 2>(p + r, v.data, v.stride, keys, ldo, out + r * ldo);
    for (; r < count; ++r) rows<1, 4>(p + r, v.data, v.stride, keys, ldo, out + r * ldo);
  }
  static void natural(const float* out, int64_t Dv, float* to) {
    for (int64_t c = 0; c < columns(Dv); ++c)
      to[c / 32 * 32 + c % 16 / 4 * 8 + c % 32 / 16 * 4 + c % 4] = out[c];
  }
};
#endif

}  // namespace FA_ISA
}  // namespace fa
