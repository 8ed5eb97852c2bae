// A few query rows against keys and values in four bits, which are read in place: few_rows.h for
// StoredInt4. q and O have the order of int4_vector.h, [vector][k][lane]. The numbers of a lane share
// scale and minimum, which are multiplied once for all eight:
//
//   S  = factor * sum_blocks (scale * sum_c n q + minimum * sum_c q)
//   O += sum_keys (P scale) n + P minimum
#pragma once
#include "few_rows.h"
#include "int4_vector.h"
#include "integers.h"

namespace fa {
namespace FA_ISA {

// t += sums over a vector's columns of n q, in float32.
struct Int4Floats {
  using Sum = Vec<float>;
  template <int ROWS>
  static FA_INLINE void add(const Int4Vector& x, const float* q, int64_t ldq, Sum (&t)[ROWS]) {
#pragma GCC unroll 8
    for (int k = 0; k < Int4Vector::kSteps; ++k) {
      const Vec<float> n = x.numbers(k);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) t[r] += n * load(q + r * ldq + k * Int4Vector::W);
    }
  }
  static FA_INLINE Vec<float> value(Sum t) { return t; }
};
#if defined(__AVX2__)
// The same in integers: each lane of q has two of 16 bits, of the columns of steps k and k + 4.
template <bool VNNI>
struct Int4Integers {
  using Sum = Words;
  template <int ROWS>
  static FA_INLINE void add(const Int4Vector& x, const float* q, int64_t ldq, Sum (&t)[ROWS]) {
#pragma GCC unroll 4
    for (int k = 0; k < Int4Vector::kSteps / 2; ++k) {
      const Words n = x.bytes >> (4 * k) & 0x000F000Fu;
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
        add_products<VNNI>(t[r], n, (Words)load(q + r * ldq + k * Int4Vector::W));
    }
  }
  static FA_INLINE Vec<float> value(Sum t) { return from_integers(t); }
};
#endif

struct Int4Rows : FewRows<Plain<float> > {
  using V = Int4Vector;
  // A staged row of q is [vectors][kSteps][W], the sums of blocks [vectors][W], and two numbers: not
  // 0 if q is in integers, and the largest of |q|, which is then 32767.
  static int64_t sums_at(int64_t columns) {
    return Int4Layout(columns).vectors() * V::kSteps * V::W;
  }
  static int64_t tail_at(int64_t columns) {
    return Int4Layout(columns).vectors() * (V::kSteps + 1) * V::W;
  }
  static int64_t padded(int64_t columns) { return round_up(tail_at(columns) + 2, W); }
  // q of 16 bits is multiplied as integers, where there are instructions for them: a row's largest
  // number becomes 32767. That changes a score, before its factor, by a 65534th of that number times
  // the sum of a key's n * scale, at most. Sums of floats overflow for q from about 1e36 on.
  static void stage(const Plane& a, int64_t i0, int64_t rows, int64_t columns, float* q) {
    const Int4Layout layout(columns);
    float row[FA_CPU_MAX_HEAD_DIM];
    for (int64_t i = 0; i < rows; ++i, q += padded(columns)) {
      a.read(i0 + i, 1, 0, columns, row, columns);
      std::fill(q, q + padded(columns), 0.0f);
      layout.each_lane([&](int64_t to, int64_t c) { q[to] = row[c]; });
#if defined(__AVX2__)
      if (item_size(a.dtype) == 2) {
        to_integers(columns, q);
        continue;
      }
#endif
      for (int64_t v = 0; v < layout.vectors(); ++v) {
        Vec<float> sum{};
        for (int k = 0; k < V::kSteps; ++k) sum += load(q + (v * V::kSteps + k) * V::W);
        store(q + sums_at(columns) + v * V::W, sum);
      }
    }
  }
#if defined(__AVX2__)
  static void to_integers(int64_t columns, float* q) {
    Vec<float> top{};
    for (int64_t c = 0; c < sums_at(columns); c += W)
      top = max_or_second(absolute<float>(load(q + c)), top);
    const float most =
        reduce_lanes<float>(top, [](Vec<float> a, Vec<float> b) { return max_or_second(a, b); });
    // (Rows of subnormals become zeros. Two factors stay in the range of float32.)
    const bool known = most >= std::numeric_limits<float>::min();
    const float up = most > 1.0f ? 0x1p-64f : 0x1p64f, by = known ? 32767.0f / (most * up) : 0.0f;
    for (int64_t v = 0; v < Int4Layout(columns).vectors(); ++v) {
      float* of_vector = q + v * V::kSteps * V::W;
      Vec<float> sum{};
      for (int k = 0; k < V::kSteps / 2; ++k) {
        const auto scaled = [&](int step) { return load(of_vector + step * V::W) * up * by; };
        const Vec<float> low = scaled(k), high = scaled(k + V::kSteps / 2);
        sum += low + high;
        store(of_vector + k * V::W, (Vec<float>)((rounded(low) & 0xFFFFu) | (rounded(high) << 16)));
      }
      store(q + sums_at(columns) + v * V::W, sum);
    }
    q[tail_at(columns)] = 1.0f;
    q[tail_at(columns) + 1] = most;
  }
#endif
  // Of a product of integers; in the order that stays in the range of float32.
  static FA_INLINE float unit(float most, float factor) {
    return most > 1.0f ? most / 32767.0f * factor : most * factor / 32767.0f;
  }
  // As FewRows::products.
  static void products(Broadcast<StoredInt4> k, int64_t keys, int64_t columns, const float* q,
                       int64_t rows, float factor, float* s, Later later = {}) {
    for (int64_t r = 0; r < rows; later = {}) {
      const int many = rows - r >= 4 ? 4 : 1;
      const auto of = many == 4 ? products_for<4>(columns, q) : products_for<1>(columns, q);
      of(k, keys, columns, q + r * padded(columns), factor, s + r * kTileKeys, later);
      r += many;
    }
  }
  using Products = void(Broadcast<StoredInt4>, int64_t, int64_t, const float*, float, float*,
                        const Later&);
  template <int ROWS>
  static Products* products_for(int64_t columns, [[maybe_unused]] const float* q) {
    constexpr int two = std::min(2, V::kBlocks);  // there is no half of one
    const bool shared = Int4Layout(columns).shared();
#if defined(__AVX2__)
    if (q[tail_at(columns)] != 0)
      return with_vnni([&](auto vnni) {
        using Integers = Int4Integers<decltype(vnni)::value>;
        return shared ? products_of<ROWS, two, Integers> : products_of<ROWS, 1, Integers>;
      });
#endif
    return shared ? products_of<ROWS, two, Int4Floats> : products_of<ROWS, 1, Int4Floats>;
  }
  template <int ROWS, int SHARE, class Numbers>
  static void products_of(Broadcast<StoredInt4> k, int64_t keys, int64_t columns, const float* q,
                          float factor, float* s, const Later& ahead) {
    constexpr int KEYS = kKeys / ROWS;
    const Int4Layout layout(columns);
    const int64_t ldq = padded(columns);
    const Later later = ahead;
    float by[kKeys];
    for (int r = 0; r < ROWS; ++r) {
      const float* tail = q + r * ldq + tail_at(columns);
      std::fill_n(by + r * KEYS, KEYS, tail[0] != 0 ? unit(tail[1], factor) : factor);
    }
    for (int64_t j = 0; j < keys; j += KEYS) {
      Vec<float> sum[kKeys];
      for (int i = 0; i < KEYS; i += SHARE) {
        const uint8_t* first = &k.data[std::min(j + i, keys - 1) * k.stride].bits;
        const uint8_t* second = &k.data[std::min(j + i + SHARE - 1, keys - 1) * k.stride].bits;
        Vec<float> of_row[ROWS] = {};
        layout.each_vector([&](int v, int n) __attribute__((always_inline)) {
          const V x = V::of<SHARE>(first + v * V::kBytes, second + v * V::kBytes, n);
          for (int row = 0; row < SHARE; ++row)
            for (int64_t at = 0; at < V::kBytes; at += 64)
              later.ask(j + i + row, v * V::kBytes + at);
          typename Numbers::Sum t[ROWS] = {};
          Numbers::add(x, q + v * V::kSteps * V::W, ldq, t);
          const float* sums = q + sums_at(columns) + v * V::W;
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            of_row[r] += Numbers::value(t[r]) * x.scale;
            of_row[r] += x.minimum * load(sums + r * ldq);
          }
        });
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          Vec<float>* to = sum + r * KEYS + i;
          to[0] = SHARE == 2 ? half(of_row[r], Vec<float>{}) : of_row[r];
          if (SHARE == 2) to[SHARE - 1] = half(Vec<float>{}, of_row[r]);
        }
      }
      Vec<float> sums[kKeys / W];
      for (int x = 0; x < kKeys / W; ++x)
        sums[x] = sum_lanes<float>(sum + x * W) * load(by + x * W);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(s + r * kTileKeys + j, reinterpret_cast<const float*>(sums) + r * KEYS,
                    KEYS * sizeof(float));
    }
  }
  // The first half of a, the second of b.
  static FA_INLINE Vec<float> half(Vec<float> a, Vec<float> b) {
    Vec<int32_t> first;
    for (int l = 0; l < W; ++l) first[l] = l < W / 2 ? -1 : 0;
    return first ? a : b;
  }
};

// out is [rows][columns(Dv)].
struct Int4WeightedSum : WeightedSum<Plain<float> > {
  using V = Int4Vector;
  static int64_t columns(int64_t Dv) { return Int4Layout(Dv).vectors() * V::kSteps * V::W; }
  static int64_t staged(int64_t keys, int64_t Dv) { return keys * columns(Dv); }
  static void add(const float* p, int64_t j, Broadcast<StoredInt4> v, int64_t keys, int64_t count,
                  int64_t Dv, float* out, Later later = {}) {
#if defined(__AVX512F__) || defined(__aarch64__)
    constexpr int steps = V::kSteps;
#else
    constexpr int steps = 2;  // as registers allow for four rows
#endif
    constexpr int two = std::min(2, V::kBlocks);
    const int64_t ldo = columns(Dv);
    const bool shared = Int4Layout(Dv).shared();
    for (int64_t r = 0; r < count; later = {}) {
      const int many = count - r >= 4 ? 4 : 1;
      const auto rows = many == 4 ? shared ? add_rows<4, steps, two> : add_rows<4, steps, 1>
                        : shared  ? add_rows<1, V::kSteps, two>
                                  : add_rows<1, V::kSteps, 1>;
      rows(p + r * kTileKeys + j, v, keys, Dv, out + r * ldo, later);
      r += many;
    }
  }
  // STEPS of a vector at a time.
  template <int ROWS, int STEPS, int SHARE>
  static void add_rows(const float* p, Broadcast<StoredInt4> v, int64_t keys, int64_t Dv,
                       float* out, const Later& later_) {
    const Later later = later_;
    const int64_t ldo = columns(Dv);
    Int4Layout(Dv).each_vector([&](int vector, int n) __attribute__((always_inline)) {
      for (int first = 0; first < V::kSteps; first += STEPS) {
        Vec<float> acc[ROWS][STEPS] = {}, minima[ROWS] = {};
        for (int64_t j = 0; j < keys; j += SHARE) {
          const uint8_t* row = &v.data[j * v.stride].bits + vector * V::kBytes;
          const bool last = j + SHARE > keys;  // P is 0 after it
          const V x = V::of<SHARE>(row, last ? row : row + (SHARE - 1) * v.stride, n);
          for (int ahead = 0; ahead < (first ? 0 : SHARE); ++ahead)
            for (int64_t at = 0; at < V::kBytes; at += 64)
              later.ask(j + ahead, vector * V::kBytes + at);
          Vec<float> weight[ROWS];
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const float* of_row = p + r * kTileKeys + j;
            const Vec<float> of_key =
                SHARE == 2 ? Int4Rows::half(splat(of_row[0]), splat(of_row[SHARE - 1]))
                           : splat(of_row[0]);
            weight[r] = of_key * x.scale;
            minima[r] += of_key * x.minimum;
          }
#pragma GCC unroll 8
          for (int step = 0; step < STEPS; ++step) {
            const Vec<float> numbers = x.numbers(first + step);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) acc[r][step] += weight[r] * numbers;
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
          for (int step = 0; step < STEPS; ++step) {
            float* at = out + r * ldo + (vector * V::kSteps + first + step) * V::W;
            store(at, Vec<float>(load(at) + acc[r][step] + minima[r]));
          }
      }
    });
  }
  static void natural(const float* out, int64_t Dv, float* to) {
    std::fill(to, to + columns(Dv), 0.0f);
    Int4Layout(Dv).each_lane([&](int64_t at, int64_t c) { to[c] += out[at]; });
  }
};

template <class Mul>
struct ProductsOf<Mul, StoredInt4> {
  using Few = Int4Rows;
  using Sum = Int4WeightedSum;
};

}  // namespace FA_ISA
}  // namespace fa
