// A few query rows against keys and values that are read in place, lanes along their columns:
//
//   Products   S[row][key] = factor * sum_c Q[row][c] K[key][c]
//   Softmax    S becomes P, row by row
//   Sum        O[row][c]  += sum_key P[row][key] V[key][c]
//
// (product.h and tile.h have lanes along the rows: most would be empty here.) A row of S or P has
// room for kTileKeys keys.
#pragma once
#include "../base/stored.h"
#include "../kernels.h"
#include "../score/tile.h"

namespace fa {
namespace FA_ISA {

// True if a product's sums are integers, as the bits of floats; Mul::value has their value.
template <class Mul>
constexpr bool sums_integers = false;

template <class Mul>
struct FewRows {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  static constexpr int pair = Mul::pair, W = kLanes<R>;

  static bool suit(const Params& p) { return has_few_rows(p, W); }

  static int64_t elements(int64_t columns) { return (columns + pair - 1) / pair; }
  static int64_t padded(int64_t columns) { return round_up(elements(columns), kLanes<E>); }

  // q is [rows][padded(columns)], with zeros at the end. `later` counts elements.
  template <class S = E>
  static void products(Broadcast<S> k, int64_t keys, int64_t columns, const E* q, int64_t rows,
                       R factor, R* s, Later later = {}) {
    constexpr int many = W >= 4 ? 4 : 1;
    const int64_t ldq = padded(columns);
    const auto scaled = [&](Vec<R> x) { return Vec<R>(x * factor); };
    int64_t r = 0;
    for (; r + many <= rows; r += many, later = {})
      products_of<many>(k, keys, columns, q + r * ldq, ldq, scaled, s + r * kTileKeys, later);
    for (; r < rows; ++r, later = {})
      products_of<1>(k, keys, columns, q + r * ldq, ldq, scaled, s + r * kTileKeys, later);
  }
  // The same products in the layout of tile.h, S[key][row]: for gradients and weights of rows that
  // forward scored here, so that they have the same roundings. `turned` has room for a vector of
  // rows.
  static void tile(Broadcast<E> k, int64_t keys, int64_t columns, const E* q, int64_t rows,
                   R factor, R* turned, R* s) {
    for (int64_t j = 0; j < keys; j += kKeys)
      products({k.data + j * k.stride, k.stride}, std::min<int64_t>(kKeys, keys - j), columns, q,
               rows, factor, turned + j);
    transpose(turned, kTileKeys, rows, keys, s, W);
  }
  // Stages rows [i0, i0 + rows) for that: q is [rows][padded(columns)].
  static void stage(const Plane& a, int64_t i0, int64_t rows, int64_t columns, E* q) {
    const int64_t ld = padded(columns);
    E row[FA_CPU_MAX_HEAD_DIM];
    for (int64_t i = 0; i < rows; ++i, q += ld) {
      std::copy_n(Operand<Mul>::along(a, i0 + i, 1, columns, row).data, elements(columns), q);
      std::fill(q + elements(columns), q + ld, E(0));
    }
  }
  // Transposes back from keys x lanes. Calls f(offset in [rows][kTileKeys], lanes along the keys).
  template <class F>
  static FA_INLINE void turn_back(const R* turned, int64_t keys, int64_t rows, F f) {
    for (int64_t j = 0; j < keys; j += W)
      each_column(turned + j * W, W, std::min<int64_t>(W, keys - j), rows,
                  [&](int64_t row, Vec<R> x) { f(row * kTileKeys + j, x); });
  }
  // Scaled products of `count` rows to scores, as Tile::score. What a mask does alone is done in
  // rows; anything else in the layout of tile.h, for which the scores are turned, and turned back.
  static void score(const Params& p, const Rows& rows, const Keys& keys, int64_t count, R* s,
                    R* turned, R* derivative, const ScoreScratch<R>& scratch) {
    using T = Tile<R, 1>;
    if (T::plain_but_for_mask(p, rows, keys)) {
      if (T::masked(p, rows, keys)) T::mask_rows(p, rows, keys, count, s, scratch);
      return;
    }
    transpose(s, kTileKeys, count, keys.count, turned, W);
    T::score(p, rows, keys, turned, derivative, scratch);
    turn_back(turned, keys.count, count, [&](int64_t at, Vec<R> x) { store(s + at, x); });
  }
  // Keys that are taken at once, of one row: as many as a vector has lanes, so that the sums over
  // the products' lanes make one vector; on Arm 16, which has the registers for their sums. Past the
  // last key it repeats the last one: there is room in S.
#if defined(__aarch64__)
  static constexpr int64_t kKeys = 16;
#else
  static constexpr int64_t kKeys = W;
#endif
  // `scaled` multiplies a vector of sums by their factors.
  template <int ROWS, class S, class F>
  static void products_of(Broadcast<S> k, int64_t keys, int64_t columns, const E* q, int64_t ldq,
                          F scaled, R* s, const Later& later) {
    constexpr int KEYS = kKeys / ROWS;
    constexpr int share = std::min({kVectorsOfLine<S>, KEYS, 4});  // prefetches each line once
    constexpr int64_t L = kLanes<E>, each = std::is_same_v<S, E> ? 1 : pair;  // S of an element
    const int64_t n = elements(columns);
    for (int64_t j = 0; j < keys; j += KEYS) {
      const S* key[KEYS];
      for (int x = 0; x < KEYS; ++x) key[x] = k.data + std::min(j + x, keys - 1) * k.stride;
      Vec<R> sum[kKeys] = {};
      // `ahead` is one of the lines to prefetch; the others are `share` rows apart.
      const auto add = [&](int64_t c, const char* ahead, auto read) {
        Vec<E> y[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) y[r] = load(q + r * ldq + c);
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
          const Vec<E> x = read(key[i], c);
          if (i % share == 0) __builtin_prefetch(ahead + i * later.row, 0, 2);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) sum[r * KEYS + i] = Mul::fma(sum[r * KEYS + i], x, y[r]);
        }
      };
      const auto whole = [](const S* row, int64_t at) { return numbers(row, at * each); };
      const auto some = [&](const S* row, int64_t at) {
        return last_numbers(row, at * each, (n - at) * each);
      };
      int64_t c = 0;
      for (; c + share * L <= n; c += share * L)
#pragma GCC unroll 4
        for (int turn = 0; turn < share; ++turn)
          add(c + turn * L, later.at(j + turn, c * each), whole);
      for (; c + L <= n; c += L) add(c, later.at(j, c * each), whole);
      if (c < n) add(c, later.at(j, c * each), some);
      if constexpr (sums_integers<Mul>)
#pragma GCC unroll 16
        for (int x = 0; x < kKeys; ++x) sum[x] = Mul::value(sum[x]);
      Vec<R> sums[kKeys / W];
#pragma GCC unroll 16
      for (int x = 0; x < kKeys / W; ++x) sums[x] = scaled(sum_lanes<R>(sum + x * W));
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(s + r * kTileKeys + j, reinterpret_cast<const R*>(sums) + r * KEYS,
                    KEYS * sizeof(R));
    }
  }

  // One step of the online softmax of one row, as in Tile; returns the factor for earlier sums. P
  // is 0 past `keys`.
  static R softmax(int64_t keys, R* s, R& m, R& l) {
    const int64_t end = round_up(keys, kPadded);
    std::fill(s + keys, s + end, -kInf<R>);
    Vec<R> top = splat(m);
    for (int64_t j = 0; j < end; j += W) top = max_or_second(load(s + j), top);
    const R most = reduce_lanes<R>(top, [](Vec<R> a, Vec<R> b) { return max_or_second(a, b); });
    const R pivot = most == -kInf<R> ? R(0) : most;
    Vec<R> sum{};
    for (int64_t j = 0; j < end; j += W) {
      const Vec<R> e = exp(Vec<R>(load(s + j) - pivot));
      sum += e;
      store(s + j, e);
    }
    const R rescale = exp_one(m - pivot);
    l = l * rescale + reduce_lanes<R>(sum, [](Vec<R> a, Vec<R> b) { return Vec<R>(a + b); });
    m = most;
    return rescale;
  }
  static constexpr int64_t kPadded = 32;  // pairs of the widest vectors
};

// out is [rows][columns(Dv)], in an order that `natural` undoes. P is read from its key j on, V
// from its beginning. V is read in place, whatever Dv is: where it does not fill vectors, the last
// one begins earlier and shares columns with the one before, so no row is read past its end. Of rows
// with fewer numbers than a vector these alone are loaded.
template <class Mul>
struct WeightedSum {
  using R = typename Mul::Real;
  using Op = Operand<Mul>;
  static int64_t columns(int64_t Dv) { return round_up(Dv, kLanes<R>); }
  template <class A>
  static Broadcast<R> stage(const A& v, int64_t j0, int64_t keys, int64_t Dv, R* buf) {
    return Op::along(v, j0, keys, Dv, buf);
  }
  static int64_t staged(int64_t keys, int64_t Dv) { return keys * Dv; }
  // P of `keys` keys as products read it, and the room that it needs for kLanes rows.
  using Weights = R;
  static constexpr int64_t kWeights = 0;
  static const R* operand(const R* p, int64_t, R*, int64_t = kTileKeys) { return p; }
  // `rows` rows and NV vectors of columns from c on, which `read` loads.
  template <int ROWS, int NV, class S, class Read>
  static FA_INLINE void block(const R* p, Broadcast<S> v, int64_t keys, int64_t c, R* out,
                              int64_t ldo, const Later& later, Read read) {
    constexpr int64_t W = kLanes<R>;
    Vec<R> acc[ROWS][NV] = {};
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 8
      for (int g = 0; g < NV; ++g) {
        const Vec<R> y = read(v.data + j * v.stride, c + W * g);
        if (g % kVectorsOfLine<S> == 0) later.ask(j, c + W * g);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) acc[r][g] = Mul::fma(acc[r][g], p + r * kTileKeys + j, y);
      }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < NV; ++g) {
        R* at = out + r * ldo + c + W * g;
        store(at, Vec<R>(load(at) + acc[r][g]));
      }
  }
  template <int ROWS, int NV, class S>
  static void rows(const R* p, Broadcast<S> v, int64_t keys, int64_t n, int64_t ldo, R* out,
                   const Later& later, int64_t c = 0) {
    constexpr int64_t step = NV * kLanes<R>;
    const auto whole = [](const S* row, int64_t at) { return numbers(row, at); };
    const auto some = [&](const S* row, int64_t) { return last_numbers(row, 0, n); };
    for (; c + step <= n; c += step) block<ROWS, NV>(p, v, keys, c, out, ldo, later, whole);
    if (c == ldo) return;
    if constexpr (NV > 1) return rows<ROWS, NV / 2>(p, v, keys, n, ldo, out, later, c);
    if (c == 0) return block<ROWS, 1>(p, v, keys, 0, out, ldo, later, some);
    // The last columns, and as many before them as make a vector.
    const Broadcast<S> last{v.data - (ldo - n), v.stride};
    block<ROWS, 1>(p, last, keys, c, out, ldo, later, whole);
  }
  // `later` counts columns.
  template <class S = R>
  static FA_INLINE void add(const R* p, int64_t j, Broadcast<S> v, int64_t keys, int64_t count,
                            int64_t Dv, R* out, Later later = {}) {
#if defined(__AVX512F__) || defined(__aarch64__)
    constexpr int many = sizeof(R) == 4 ? 4 : 2;  // vectors, as registers allow for four rows
#else
    constexpr int many = 2;
#endif
    const int64_t ldo = columns(Dv);
    p += j;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4, later = {})
      rows<4, many>(p + r * kTileKeys, v, keys, Dv, ldo, out + r * ldo, later);
    for (; r < count; ++r, later = {})
      rows<1, 2 * many>(p + r * kTileKeys, v, keys, Dv, ldo, out + r * ldo, later);
  }
  static void natural(const R* out, int64_t Dv, R* to) {
    const int64_t ldo = columns(Dv), W = kLanes<R>;
    std::copy_n(out, ldo, to);
    if (Dv == ldo || Dv < W) return;
    std::copy_n(out + ldo - W, W, to + Dv - W);
    std::fill(to + Dv, to + ldo, R(0));
  }
};

#if defined(FA_BF16_PRODUCTS)
// Two keys at a time: zip_in_eights makes pairs of their numbers. out is in that order.
template <>
struct WeightedSum<PairedBf16> {
  using Op = Operand<PairedBf16>;
  static constexpr int64_t W = kLanes<float>;
  static int64_t columns(int64_t Dv) { return round_up(Dv, 2 * W); }
  // A vector begins at an even column: odd rows are filled up with zeros.
  static int64_t numbers_of_row(int64_t Dv) { return Dv % 2 == 0 ? Dv : columns(Dv); }
  template <class A>
  static Broadcast<int32_t> stage(const A& v, int64_t j0, int64_t keys, int64_t Dv, int32_t* buf) {
    const int64_t ld = numbers_of_row(Dv);
    if (ld == Dv) return Op::along(v, j0, keys, Dv, buf);
    copy_rows(v, j0, keys, 0, Dv, reinterpret_cast<uint16_t*>(buf), ld);
    return {buf, ld / 2};
  }
  static int64_t staged(int64_t keys, int64_t Dv) { return keys * numbers_of_row(Dv) / 2; }

  // `rows` rows and 2 G vectors of columns. `read` loads a vector of V.
  template <int ROWS, int G, class Read>
  static FA_INLINE void block(const int32_t* p, const int32_t* v, int64_t ldv, int64_t keys,
                              float* out, int64_t ldo, const Later& later, int64_t c, Read read) {
    Vec<float> acc[ROWS][2 * G];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < 2 * G; ++g) acc[r][g] = load(out + r * ldo + W * g);
    for (int64_t j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Vec<int32_t> a = read(v + j * ldv + W * g);
        Vec<int32_t> b{}, lo, hi;
        later.ask(j, c + 2 * W * g);
        later.ask(j + 1, c + 2 * W * g);
        if (j + 1 < keys) b = read(v + (j + 1) * ldv + W * g);
        zip_in_eights(a, b, lo, hi);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const int32_t* both = p + r * (kTileKeys / 2) + j / 2;
          acc[r][2 * g] = PairedBf16::fma(acc[r][2 * g], both, lo);
          acc[r][2 * g + 1] = PairedBf16::fma(acc[r][2 * g + 1], both, hi);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int g = 0; g < 2 * G; ++g) store(out + r * ldo + W * g, acc[r][g]);
  }
  template <int ROWS, int G>
  static void rows(const int32_t* p, const int32_t* v, int64_t ldv, int64_t keys, int64_t n,
                   int64_t ldo, float* out, const Later& later, int64_t c = 0) {
    const auto whole = [](const int32_t* at) { return load(at); };
    const auto some = [&](const int32_t* at) { return load_some(at, n / 2); };
    for (; c + 2 * W * G <= n; c += 2 * W * G)
      block<ROWS, G>(p, v + c / 2, ldv, keys, out + c, ldo, later, c, whole);
    if (c == ldo) return;
    if constexpr (G > 1) return rows<ROWS, G / 2>(p, v, ldv, keys, n, ldo, out, later, c);
    if (c == 0) return block<ROWS, 1>(p, v, ldv, keys, out, ldo, later, 0, some);
    block<ROWS, 1>(p, v + n / 2 - W, ldv, keys, out + c, ldo, later, c, whole);
  }
  // P in pairs.
  using Weights = int32_t;
  static constexpr int64_t kWeights = kTileKeys / 2 * W;
  static const int32_t* operand(const float* p, int64_t rows, int32_t* buf, int64_t = kTileKeys) {
    return Op::tile_along(p, rows, kTileKeys, buf);
  }
  static FA_INLINE void add(const int32_t* p, int64_t j, Broadcast<int32_t> v, int64_t keys,
                            int64_t count, int64_t Dv, float* out, Later later = {}) {
    const int64_t n = numbers_of_row(Dv), ldo = columns(Dv), ldp = kTileKeys / 2;
    p += j / 2;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4, later = {})
      rows<4, 2>(p + r * ldp, v.data, v.stride, keys, n, ldo, out + r * ldo, later);
    for (; r < count; ++r, later = {})
      rows<1, 4>(p + r * ldp, v.data, v.stride, keys, n, ldo, out + r * ldo, later);
  }
  static void natural(const float* out, int64_t Dv, float* to) {
    const int64_t n = numbers_of_row(Dv), ldo = columns(Dv), last = ldo - 2 * W;
    for (int64_t c = 0; c < ldo; ++c) to[column_in_eights(c)] = out[c];
    if (n == ldo || n < 2 * W) return;
    for (int64_t c = 0; c < 2 * W; ++c) to[n - 2 * W + column_in_eights(c)] = out[last + c];
    std::fill(to + n, to + ldo, 0.0f);
  }
};
#endif

// The products of rows of type S.
template <class Mul, class S>
struct ProductsOf {
  using Few = FewRows<Mul>;
  using Sum = WeightedSum<Mul>;
};

}  // namespace FA_ISA
}  // namespace fa
