// A few query rows of 16 bits against keys and values in int8, as products of integers: few_rows.h
// for StoredInt8. q and P times the scales of values become integers of 16 bits:
//
//   S  = factor * unit(q) * sum_c q16 k         (times the scale of the key: decode.h)
//   O += unit(P) * sum_keys P16 v
//
// A vector has twice as many of them as of float32, and widening to them is one instruction, not
// two. Columns are multiples of 32.
#pragma once
#include "few_rows.h"
#include "integers.h"

namespace fa {
namespace FA_ISA {

#if defined(__AVX2__)
template <bool VNNI>
struct PairedInt16 {
  using Real = float;
  using Element = int32_t;
  static constexpr int pair = 2;
  static FA_INLINE Vec<float> fma(Vec<float> acc, Vec<int32_t> x, Vec<int32_t> y) {
    Words sum = (Words)acc;
    add_products<VNNI>(sum, (Words)x, (Words)y);
    return (Vec<float>)sum;
  }
  static FA_INLINE Vec<float> value(Vec<float> sum) { return from_integers((Words)sum); }
};
template <bool VNNI>
constexpr bool sums_integers<PairedInt16<VNNI> > = true;

using Int8AsFloats = StoredByte<FA_I8>;
FA_INLINE Broadcast<Int8AsFloats> as_floats(Broadcast<StoredInt8> a) {
  return {reinterpret_cast<const Int8AsFloats*>(a.data), a.stride};
}

// Integers of a set of numbers: x is about rounded(x * by) * unit. `most` has the bits of the largest
// number without its sign. That becomes 32767, and the others err by a 65534th of it at most. Sets
// with a number that is not finite, or of tiny ones, have no integers: unit is NaN.
FA_INLINE Vec<int32_t> size_of(Vec<float> x) { return (Vec<int32_t>)absolute<float>(x); }
FA_INLINE Vec<int32_t> larger(Vec<int32_t> a, Vec<int32_t> b) { return a > b ? a : b; }
FA_INLINE void in_units(Vec<int32_t> most, Vec<float>& by, Vec<float>& unit) {
  const Vec<float> top = (Vec<float>)most;
  const Vec<float> none = splat(std::numeric_limits<float>::quiet_NaN());
  by = most == 0 ? top : 32767.0f / top;
  unit = top / 32767.0f;
  const auto usual = (top >= 0x1p-64f) & (top < kInf<float>);
  unit = (usual | (most == 0)) ? unit : none;
}
FA_INLINE bool is_number(float x) { return x == x; }

struct Int8Rows : FewRows<Plain<float> > {
  using Floats = FewRows<Plain<float> >;
  // A staged row of q is its numbers, their integers, and the unit of these: NaN if there are none.
  // A score changes, before its factors, by a 65534th of the largest |q| times the sum of a key's
  // |k|, at most.
  static int64_t pairs_at(int64_t columns) { return Floats::padded(columns); }
  static int64_t unit_at(int64_t columns) { return pairs_at(columns) + columns / 2; }
  static int64_t padded(int64_t columns) { return round_up(unit_at(columns) + 1, W); }
  static void stage(const Plane& a, int64_t i0, int64_t rows, int64_t columns, float* q) {
    for (int64_t i = 0; i < rows; ++i, q += padded(columns)) {
      Floats::stage(a, i0 + i, 1, columns, q);
      Vec<int32_t> most{};
      for (int64_t c = 0; c < columns; c += W) most = larger(size_of(load(q + c)), most);
      Vec<float> by, unit;
      in_units(splat(reduce_lanes<int32_t>(most, larger)), by, unit);
      uint16_t* to = reinterpret_cast<uint16_t*>(q + pairs_at(columns));
      for (int64_t c = 0; c < columns; c += W) store_rounded(to + c, load(q + c) * by);
      q[unit_at(columns)] = unit[0];
    }
  }
  // As FewRows::products.
  static void products(Broadcast<StoredInt8> k, int64_t keys, int64_t columns, const float* q,
                       int64_t rows, float factor, float* s, Later later = {}) {
    const int64_t ldq = padded(columns);
    const auto integers = [&](int64_t r) { return is_number(q[r * ldq + unit_at(columns)]); };
    for (int64_t r = 0; r < rows; later = {}) {
      const float* from = q + r * ldq;
      float* to = s + r * kTileKeys;
      const int many = fours_or_one(r, rows, integers);
      r += many;
      if (integers(r - many))
        with_vnni([&](auto vnni) {
          constexpr bool VNNI = decltype(vnni)::value;
          const auto of = many == 4 ? products_of<4, VNNI> : products_of<1, VNNI>;
          of(k, keys, columns, from, factor, to, later);
        });
      else
        Floats::products(as_floats(k), keys, columns, from, 1, factor, to, later);
    }
  }
  // How many rows to take from r on: four, if they all have integers.
  template <class F>
  static FA_INLINE int fours_or_one(int64_t r, int64_t rows, F integers) {
    return r + 4 <= rows && integers(r) && integers(r + 1) && integers(r + 2) && integers(r + 3)
               ? 4
               : 1;
  }
  template <int ROWS, bool VNNI>
  static void products_of(Broadcast<StoredInt8> k, int64_t keys, int64_t columns, const float* q,
                          float factor, float* s, const Later& later) {
    constexpr int64_t KEYS = kKeys / ROWS;
    const int64_t ldq = padded(columns);
    float unit[kKeys];
    for (int r = 0; r < ROWS; ++r)
      std::fill_n(unit + r * KEYS, KEYS, q[r * ldq + unit_at(columns)]);
    const Vec<float> units = load(unit);
    // (Not by their product, which may leave the range of float32.)
    const auto scaled = [&](Vec<float> x) { return Vec<float>(x * units * factor); };
    const int32_t* pairs = reinterpret_cast<const int32_t*>(q + pairs_at(columns));
    FewRows<PairedInt16<VNNI> >::template products_of<ROWS>(k, keys, columns, pairs, ldq, scaled, s,
                                                            later);
  }
};
#endif

#if defined(__AVX512F__)
// Two keys at a time: zip_in_eights makes pairs of their numbers. out is in that order.
struct Int8WeightedSum : WeightedSum<Plain<float> > {
  using Floats = WeightedSum<Plain<float> >;
  static constexpr int W = kLanes<float>, kKeys = W;
  // P of a row as integers, with a unit for each kKeys keys: NaN if these have none.
  struct Weights {
    uint16_t integers[kTileKeys];
    float unit[kTileKeys / kKeys];
    const float* numbers;
  };
  static constexpr int64_t kWeights = W;  // rows
  static const Weights* operand(const float* p, int64_t rows, Weights* to, int64_t keys) {
    static_assert(kTileKeys / kKeys <= W && kKeys == W);
    const int64_t blocks = (keys + kKeys - 1) / kKeys;
    for (int64_t r = 0; r < rows; ++r, p += kTileKeys) {
      Vec<int32_t> most[W] = {};
      for (int64_t x = 0; x < blocks; ++x) most[x] = size_of(load(p + x * W));
      Vec<float> by, unit;
      in_units(reduce_vectors<int32_t>(most, larger), by, unit);
      std::memcpy(to[r].unit, &unit, sizeof to[r].unit);
      for (int64_t x = 0; x < blocks; ++x)
        store_rounded(to[r].integers + x * W, load(p + x * W) * by[x]);
      to[r].numbers = p;
    }
    return to;
  }
  // kKeys keys at most, from a multiple of them on.
  static void add(const Weights* p, int64_t j, Broadcast<StoredInt8> v, int64_t keys, int64_t count,
                  int64_t Dv, float* out, Later later = {}) {
    const auto integers = [&](int64_t r) { return is_number(p[r].unit[j / kKeys]); };
    for (int64_t r = 0; r < count; later = {}) {
      const int many = Int8Rows::fours_or_one(r, count, integers);
      float* to = out + r * Dv;
      if (integers(r))
        with_vnni([&](auto vnni) {
          constexpr bool VNNI = decltype(vnni)::value;
          const auto rows = many == 4 ? rows_of<4, 2, VNNI> : rows_of<1, 4, VNNI>;
          rows(p + r, j, v, keys, Dv, to, later, 0);
        });
      else
        add_floats(p[r].numbers, j, v, keys, Dv, to, later);
      r += many;
    }
  }
  // 2 G vectors of columns at a time.
  template <int ROWS, int G, bool VNNI>
  static void rows_of(const Weights* weights, int64_t j0, Broadcast<StoredInt8> v, int64_t keys,
                      int64_t Dv, float* out, const Later& later, int64_t c) {
    for (; c + 2 * W * G <= Dv; c += 2 * W * G) {
      Words acc[ROWS][2 * G] = {};
      for (int64_t j = 0; j < keys; j += 2) {
        const StoredInt8 *first = v.data + j * v.stride, *second = first;
        if (j + 1 < keys) second += v.stride;  // else its P is 0
        Words p[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          uint32_t both;
          std::memcpy(&both, weights[r].integers + j0 + j, sizeof both);
          p[r] = splat(both);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          const int64_t at = c + 2 * W * g;
          Vec<int32_t> low, high;
          zip_in_eights(numbers(first, at), numbers(second, at), low, high);
          if (g % kVectorsOfLine<StoredInt8> == 0) later.ask(j, at), later.ask(j + 1, at);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            add_products<VNNI>(acc[r][2 * g], (Words)low, p[r]);
            add_products<VNNI>(acc[r][2 * g + 1], (Words)high, p[r]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int g = 0; g < 2 * G; ++g) {
          float* at = out + r * Dv + c + W * g;
          store(at, Vec<float>(load(at) + from_integers(acc[r][g]) * weights[r].unit[j0 / kKeys]));
        }
    }
    if constexpr (G > 1)
      if (c < Dv) rows_of<ROWS, G / 2, VNNI>(weights, j0, v, keys, Dv, out, later, c);
  }
  static void add_floats(const float* p, int64_t j, Broadcast<StoredInt8> v, int64_t keys,
                         int64_t Dv, float* out, const Later& later) {
    float sum[FA_CPU_MAX_HEAD_DIM] = {};
    Floats::add(p, j, as_floats(v), keys, 1, Dv, sum, later);
    for (int64_t c = 0; c < Dv; ++c) out[c] += sum[column_in_eights(c)];
  }
  static void natural(const float* out, int64_t Dv, float* to) {
    for (int64_t c = 0; c < Dv; c += 4) std::copy_n(out + c, 4, to + column_in_eights(c));
  }
};
#elif defined(__AVX2__)
// Pairs gain nothing: vectors of sixteen bits need an addition for each product.
struct Int8WeightedSum : WeightedSum<Plain<float> > {
  static void add(const float* p, int64_t j, Broadcast<StoredInt8> v, int64_t keys, int64_t count,
                  int64_t Dv, float* out, Later later = {}) {
    WeightedSum<Plain<float> >::add(p, j, as_floats(v), keys, count, Dv, out, later);
  }
};
#endif

#if defined(__AVX2__)
template <class Mul>
struct ProductsOf<Mul, StoredInt8> {
  using Few = Int8Rows;
  using Sum = Int8WeightedSum;
};
#endif

}  // namespace FA_ISA
}  // namespace fa
