// Vectors of float and double, as wide as in the instruction set this file is compiled for, in
// compiler vector extensions; intrinsics only where the extensions cannot express what the machine
// can do. Lanes run over query rows; only decoding sums across them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#include <arm_sve.h>
#define FA_SVE256
#endif

#define FA_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define FA_VECTOR_BYTES 64
#elif defined(__AVX2__) || defined(FA_SVE256)
#define FA_VECTOR_BYTES 32
#else
#define FA_VECTOR_BYTES 16
#endif
#if defined(__aarch64__) && !defined(FA_SVE256)
#define FA_NEON
#endif
// There are instructions that multiply bfloat16: VDPBF16PS of AVX-512, BFDOT and BFMMLA of Arm.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FA_BF16_PRODUCTS
#endif

namespace fa {
namespace FA_ISA {

template <class E>
struct VectorOf {
  typedef E type __attribute__((vector_size(FA_VECTOR_BYTES)));
};
template <class E>
using Vec = typename VectorOf<E>::type;
template <class E>
constexpr int kLanes = FA_VECTOR_BYTES / sizeof(E);

template <class R>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class R>
using Int = typename IntOf<R>::type;  // an integer with the size of R

template <class R>
constexpr R kInf = std::numeric_limits<R>::infinity();

template <class E>
FA_INLINE Vec<E> load(const E* p) {
  Vec<E> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class E>
FA_INLINE void store(E* p, Vec<E> v) {
  std::memcpy(p, &v, sizeof v);
}
// The first n elements of a vector, zeros after them.
template <class E>
FA_INLINE Vec<E> load_some(const E* p, int64_t n) {
  Vec<E> v{};
#if defined(__AVX512F__)
  if constexpr (sizeof(E) == 4)
    v = (Vec<E>)_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p);
  else
    v = (Vec<E>)_mm512_maskz_loadu_epi64(__mmask8((1u << n) - 1), p);
#elif defined(__AVX2__)
  if constexpr (sizeof(E) == 4) {
    const __m256i below =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    v = (Vec<E>)_mm256_maskload_epi32(reinterpret_cast<const int*>(p), below);
  } else {
    const __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
    v = (Vec<E>)_mm256_maskload_epi64(reinterpret_cast<const long long*>(p), below);
  }
#else
  std::memcpy(&v, p, n * sizeof(E));
#endif
  return v;
}
template <class E>
FA_INLINE Vec<E> splat(E x) {
  return x - Vec<E>{};
}
#if defined(__AVX512F__)
FA_INLINE Vec<float> splat(float x) { return _mm512_set1_ps(x); }
FA_INLINE Vec<double> splat(double x) { return _mm512_set1_pd(x); }
#elif defined(__AVX2__)
FA_INLINE Vec<float> splat(float x) { return _mm256_set1_ps(x); }
FA_INLINE Vec<double> splat(double x) { return _mm256_set1_pd(x); }
#endif

// a where a > b, else b, which is a number: a NaN in `a` loses, so a running maximum stays a number
// and the NaN reaches the sum through exp(NaN - max) instead.
template <class V>
FA_INLINE V max_or_second(V a, V b) {
  return a > b ? a : b;
}
#if defined(__AVX512F__)
FA_INLINE Vec<float> max_or_second(Vec<float> a, Vec<float> b) { return _mm512_max_ps(a, b); }
FA_INLINE Vec<double> max_or_second(Vec<double> a, Vec<double> b) { return _mm512_max_pd(a, b); }
#elif defined(__AVX2__)
FA_INLINE Vec<float> max_or_second(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
FA_INLINE Vec<double> max_or_second(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
#elif defined(FA_NEON)  // FMAXNM: the number, if one of the two is NaN
FA_INLINE Vec<float> max_or_second(Vec<float> a, Vec<float> b) {
  return (Vec<float>)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
}
FA_INLINE Vec<double> max_or_second(Vec<double> a, Vec<double> b) {
  return (Vec<double>)vmaxnmq_f64((float64x2_t)a, (float64x2_t)b);
}
#endif

// The larger of 0 and x. NaN stays NaN.
template <class V>
FA_INLINE V relu(V x) {
  return max_or_second(V{}, x);
}
#if defined(FA_NEON)  // FMAX: NaN, if one of the two is NaN
FA_INLINE Vec<float> relu(Vec<float> x) {
  return (Vec<float>)vmaxq_f32(float32x4_t{}, (float32x4_t)x);
}
FA_INLINE Vec<double> relu(Vec<double> x) {
  return (Vec<double>)vmaxq_f64(float64x2_t{}, (float64x2_t)x);
}
#endif

template <class R>
FA_INLINE Vec<R> absolute(Vec<R> x) {
  const Vec<Int<R>> sign_off = splat(std::numeric_limits<Int<R>>::max());
  return (Vec<R>)((Vec<Int<R>>)x & sign_off);
}

#if defined(__AVX512F__)
// x y as one rounded number: the compiler cannot fuse it with an addition.
FA_INLINE Vec<float> rounded_product(Vec<float> x, float y) {
  return _mm512_mul_round_ps(x, splat(y), _MM_FROUND_CUR_DIRECTION);
}
#endif

// x, or 0 where it is subnormal.
template <class R>
FA_INLINE Vec<R> normal_or_zero(Vec<R> x) {
  return absolute<R>(x) < splat(std::numeric_limits<R>::min()) ? Vec<R>{} : x;
}
#if defined(__AVX512DQ__)
constexpr int kSubnormal = 0x20;  // of VFPCLASS
template <>
FA_INLINE Vec<float> normal_or_zero<float>(Vec<float> x) {
  return _mm512_mask_mov_ps(x, _mm512_fpclass_ps_mask(x, kSubnormal), Vec<float>{});
}
template <>
FA_INLINE Vec<double> normal_or_zero<double>(Vec<double> x) {
  return _mm512_mask_mov_pd(x, _mm512_fpclass_pd_mask(x, kSubnormal), Vec<double>{});
}
#endif

// Transposes a kLanes x kLanes block held in registers: log2 rounds of butterflies.
template <class E, int S, int... L>
FA_INLINE void swap_halves(Vec<E>& a, Vec<E>& b, std::integer_sequence<int, L...>) {
  constexpr int W = kLanes<E>;
#if defined(__clang__)
  const Vec<E> lo = __builtin_shufflevector(a, b, ((L & S) ? W + L - S : L)...);
  const Vec<E> hi = __builtin_shufflevector(a, b, ((L & S) ? W + L : L + S)...);
#else
  using I = Vec<Int<std::conditional_t<sizeof(E) == 4, float, double>>>;
  const Vec<E> lo = __builtin_shuffle(a, b, I{((L & S) ? W + L - S : L)...});
  const Vec<E> hi = __builtin_shuffle(a, b, I{((L & S) ? W + L : L + S)...});
#endif
  a = lo;
  b = hi;
}
template <class E, int S = 1>
FA_INLINE void transpose_registers(Vec<E>* r) {
  constexpr int W = kLanes<E>;
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if (!(i & S)) swap_halves<E, S>(r[i], r[i + S], std::make_integer_sequence<int, W>{});
    transpose_registers<E, 2 * S>(r);
  }
}
// Reads a kLanes x kLanes block with rows `ld` apart, transposed: r[c] has column c.
template <class E>
FA_INLINE void load_transposed(const E* src, int64_t ld, Vec<E>* r) {
#if defined(__AVX512F__)
  // Four rows of four numbers fill a register as they are read, so two rounds remain. Inserting from
  // memory takes no turn of the one unit that shuffles.
  if constexpr (sizeof(E) == 4) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const E* at = src + i % 4 * ld + i / 4 * 4;
      const auto quarter = [&](int q) { return _mm_loadu_ps((const float*)(at + 4 * q * ld)); };
      __m512 rows = _mm512_castps128_ps512(quarter(0));
      rows = _mm512_insertf32x4(rows, quarter(1), 1);
      rows = _mm512_insertf32x4(rows, quarter(2), 2);
      r[i] = (Vec<E>)_mm512_insertf32x4(rows, quarter(3), 3);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      const __m512 a = (__m512)r[i], b = (__m512)r[i + 1], c = (__m512)r[i + 2],
                   d = (__m512)r[i + 3];
      const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
      const __m512d AB = (__m512d)_mm512_unpackhi_ps(a, b), CD = (__m512d)_mm512_unpackhi_ps(c, d);
      r[i] = (Vec<E>)_mm512_unpacklo_pd(ab, cd), r[i + 1] = (Vec<E>)_mm512_unpackhi_pd(ab, cd);
      r[i + 2] = (Vec<E>)_mm512_unpacklo_pd(AB, CD), r[i + 3] = (Vec<E>)_mm512_unpackhi_pd(AB, CD);
    }
    return;
  }
#endif
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<E>; ++i) r[i] = load(src + i * ld);
  transpose_registers<E>(r);
}

// f of the lanes of each of kLanes vectors: lane i has that of r[i]. The vectors are overwritten.
template <class E, int S = 1, class F>
FA_INLINE Vec<E> reduce_vectors(Vec<E>* r, F f) {
  constexpr int W = kLanes<E>;
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 2 * S) {
      swap_halves<E, S>(r[i], r[i + S], std::make_integer_sequence<int, W>{});
      r[i] = f(r[i], r[i + S]);
    }
    return reduce_vectors<E, 2 * S>(r, f);
  } else {
    return r[0];
  }
}
template <class E>
FA_INLINE Vec<E> sum_lanes(Vec<E>* r) {
  return reduce_vectors<E>(r, [](Vec<E> a, Vec<E> b) { return Vec<E>(a + b); });
}

// f of all lanes of a vector, by halves.
template <class E, int S = kLanes<E> / 2, class F>
FA_INLINE E reduce_lanes(Vec<E> low, F f) {
  if constexpr (S == 0) {
    return low[0];
  } else {
    Vec<E> high = low;
    swap_halves<E, S>(low, high, std::make_integer_sequence<int, kLanes<E>>{});
    return reduce_lanes<E, S / 2>(f(low, high), f);
  }
}

#if defined(FA_BF16_PRODUCTS)
// Two vectors' bfloat16, rounded to nearest even: those of `first`, then those of `second`.
FA_INLINE Vec<int32_t> halves_of(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  return (Vec<int32_t>)_mm512_cvtne2ps_pbh(second, first);
#else
  const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)first);
  return (Vec<int32_t>)vcvtq_high_bf16_f32(low, (float32x4_t)second);
#endif
}
// Half a vector of each row.
FA_INLINE Vec<int32_t> two_rows(const uint16_t* a, const uint16_t* b) {
#if defined(__AVX512BF16__)
  const __m256i lo = _mm256_loadu_si256((const __m256i*)a);
  const __m256i hi = _mm256_loadu_si256((const __m256i*)b);
  return (Vec<int32_t>)_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
#else
  return (Vec<int32_t>)vcombine_u16(vld1_u16(a), vld1_u16(b));
#endif
}
// To pairs of one from the first half of a vector and one from the second.
FA_INLINE Vec<int32_t> zip_halves(Vec<int32_t> halves) {
#if defined(__AVX512BF16__)
  alignas(64) static const int16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Vec<int32_t>)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)halves);
#else
  const int16x8_t x = (int16x8_t)halves;
  return (Vec<int32_t>)vzip1q_s16(x, vextq_s16(x, x, 4));
#endif
}
#endif
#if defined(__AVX512F__) || defined(FA_BF16_PRODUCTS)
// To pairs of one from each vector, of the first four of every eight numbers, and of the others: one
// instruction each.
FA_INLINE void zip_in_eights(Vec<int32_t> a, Vec<int32_t> b, Vec<int32_t>& low,
                             Vec<int32_t>& high) {
#if defined(__AVX512F__)
  low = (Vec<int32_t>)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  high = (Vec<int32_t>)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  low = (Vec<int32_t>)vzip1q_s16((int16x8_t)a, (int16x8_t)b);
  high = (Vec<int32_t>)vzip2q_s16((int16x8_t)a, (int16x8_t)b);
#endif
}
// Which column has place c of their vectors.
constexpr int64_t column_in_eights(int64_t c) {
  constexpr int64_t W = kLanes<float>;
  return c / (2 * W) * (2 * W) + c % W / 4 * 8 + c % (2 * W) / W * 4 + c % 4;
}
#endif

using Words = Vec<uint32_t>;

FA_INLINE void multiply_wide(Words a, uint32_t m, Words& hi, Words& lo) {
#if defined(__AVX512F__)
  const __m512i x = (__m512i)a, y = _mm512_set1_epi32((int)m);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  lo = (Words)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  hi = (Words)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i x = (__m256i)a, y = _mm256_set1_epi32((int)m);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  lo = (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  hi = (Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#elif defined(FA_NEON)
  const uint32x4_t x = (uint32x4_t)a;
  const auto low = (uint32x4_t)vmull_n_u32(vget_low_u32(x), m);
  const auto high = (uint32x4_t)vmull_high_n_u32(x, m);
  lo = (Words)vuzp1q_u32(low, high);
  hi = (Words)vuzp2q_u32(low, high);
#else
  for (int l = 0; l < kLanes<uint32_t>; ++l) {
    const uint64_t w = uint64_t(a[l]) * m;
    lo[l] = uint32_t(w);
    hi[l] = uint32_t(w >> 32);
  }
#endif
}

}  // namespace FA_ISA
}  // namespace fa
