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
#endif

#define FA_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define FA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FA_VECTOR_BYTES 32
#else
#define FA_VECTOR_BYTES 16
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

// a where a > b, else b: a NaN in `a` loses, so a running maximum stays a number
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

// 2^r on [-1/2, 1/2]. float: minimax, 2e-9; double: Taylor, 4e-18; roundings: see exp.
FA_INLINE Vec<float> exp2_fraction(Vec<float> r) {
  Vec<float> p = r * 0.000153458117f + 0.00133999312f;
  p = p * r + 0.00961848896f;
  p = p * r + 0.0555032878f;
  p = p * r + 0.240226469f;
  p = p * r + 0.693147206f;
  return p * r + 1.0f;
}
FA_INLINE Vec<double> exp2_fraction(Vec<double> r) {
  Vec<double> p = r * 1.3691488853904129e-12 + 2.5678435993488206e-11;
  p = p * r + 4.4455382718708116e-10;
  p = p * r + 7.0549116208011233e-9;
  p = p * r + 1.0178086009239699e-7;
  p = p * r + 1.3215486790144310e-6;
  p = p * r + 1.5252733804059841e-5;
  p = p * r + 1.5403530393381610e-4;
  p = p * r + 1.3333558146428443e-3;
  p = p * r + 9.6181291076284772e-3;
  p = p * r + 5.5504108664821580e-2;
  p = p * r + 2.4022650695910071e-1;
  p = p * r + 6.9314718055994531e-1;
  return p * r + 1.0;
}

// log2(e) in two parts: their products with x are fused into sums, so that n + r is
// x log2(e) to the last bit of r even where n is large.
template <class R>
constexpr R kLog2eHigh = R(1.4426950408889634074);
template <class R>
constexpr R kLog2eLow = R(1.4426950408889634074L - (long double)kLog2eHigh<R>);
template <>
constexpr double kLog2eLow<double> = 2.0355273740931033e-17;

// exp gives no subnormal number: each would cost an Intel core a microcode trap of some 150 cycles,
// here and in every product that follows. A result below 2^-100 (double: 2^-900) is exactly 0:
// beside the 1 of a row's largest weight it cannot matter, and its products with ordinary numbers
// would be as slow. (dS has `normal_or_zero` for the same reason.) The process's flush-to-zero mode
// stays as it is: tiny values of the caller are kept.
template <class R>
constexpr R kLeastExponent = sizeof(R) == 4 ? R(-69.3147180559945309) : R(-623.832462503950778);

// e^x = 2^n 2^r, for x up to 2^20, or +inf: 0 below kLeastExponent, +inf above 88.7 (double: 709.7)
// and without AVX-512 already from 2^127.5 (2^1023.5) on, NaN at NaN. Between them within 1.5 ulp;
// where there is no fused multiply-add (generic), within 2 on [-1, 1] and 46 (356) at the ends.
#if defined(__AVX512F__)
// The products with kLog2eHigh are written as fused multiply-adds: GCC fuses none of several equal
// products if one of them is also used alone. The comparison "not less" holds for NaN, which so
// stays NaN; a lane that the mask clears gets 0 and makes no subnormal number on the way.
FA_INLINE Vec<float> exp(Vec<float> x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, splat(kLeastExponent<float>), _CMP_NLT_UQ);
  const Vec<float> high = splat(kLog2eHigh<float>), n = _mm512_roundscale_ps(x * high, 0);
  const Vec<float> r = x * kLog2eLow<float> + (Vec<float>)_mm512_fmsub_ps(x, high, n);
  return _mm512_maskz_scalef_ps(counts, exp2_fraction(r), n);
}
FA_INLINE Vec<double> exp(Vec<double> x) {
  const __mmask8 counts = _mm512_cmp_pd_mask(x, splat(kLeastExponent<double>), _CMP_NLT_UQ);
  const Vec<double> high = splat(kLog2eHigh<double>), n = _mm512_roundscale_pd(x * high, 0);
  const Vec<double> r = x * kLog2eLow<double> + (Vec<double>)_mm512_fmsub_pd(x, high, n);
  return _mm512_maskz_scalef_pd(counts, exp2_fraction(r), n);
}
#else
// Rounds by adding 1.5 * 2^mantissa: the low bits of the sum then hold n.
template <class R>
FA_INLINE Vec<R> exp_by_magic(Vec<R> x) {
  using I = Int<R>;
  constexpr int mantissa = std::numeric_limits<R>::digits - 1;
  constexpr I bias = std::numeric_limits<R>::max_exponent - 1;
  constexpr R magic = R(1.5) * R(I(1) << mantissa), ln2 = R(0.69314718055994530942);
  constexpr R low = kLeastExponent<R>, high = R(bias + 1) * ln2;
  const Vec<I> counts = ~(x < low);  // true for NaN, which must stay NaN
  x = x < low ? splat(low) : x;
  x = x > high ? splat(high) : x;  // 2^(bias + 1) is the bit pattern of infinity
  const Vec<R> t = x * kLog2eHigh<R> + magic, n = t - magic;
  const Vec<R> r = x * kLog2eLow<R> + (x * kLog2eHigh<R> - n);
  const Vec<I> power = ((Vec<I>)t << mantissa) + (bias << mantissa);
  return (Vec<R>)((Vec<I>)(exp2_fraction(r) * (Vec<R>)power) & counts);
}
FA_INLINE Vec<float> exp(Vec<float> x) { return exp_by_magic<float>(x); }
FA_INLINE Vec<double> exp(Vec<double> x) { return exp_by_magic<double>(x); }
#endif

template <class R>
FA_INLINE R exp_one(R x) {
  return exp(splat(x))[0];
}

// tanh, after Cephes (Moshier): a polynomial near 0, where 1 - 2/(e^2x + 1) cancels. Within 2 ulp
// everywhere, infinities too.
FA_INLINE Vec<float> tanh_near_zero(Vec<float> x) {
  const Vec<float> z = x * x;
  Vec<float> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return p * z * x + x;
}
FA_INLINE Vec<double> tanh_near_zero(Vec<double> x) {
  const Vec<double> z = x * x;
  Vec<double> p = z * -9.64399179425052238628e-1 - 9.92877231001918586564e1;
  p = p * z - 1.61468768441708447952e3;
  Vec<double> q = z + 1.12811678491632931402e2;
  q = q * z + 2.23548839060100448583e3;
  q = q * z + 4.84406305325125486048e3;
  return x + x * z * (p / q);
}
template <class R>
FA_INLINE Vec<R> tanh(Vec<R> x) {
  const Vec<R> a = absolute<R>(x);
  const Vec<R> e = exp(Vec<R>(a + a));
  const Vec<R> far = R(1) - R(2) / (e + R(1));
  const Vec<R> near = tanh_near_zero(a);
  const Vec<R> t = a < R(0.625) ? near : far;
  return x < R(0) ? -t : t;
}

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

// Sums along the lanes of kLanes vectors: lane i has the sum of r[i]. The vectors are overwritten.
template <class E, int S = 1>
FA_INLINE Vec<E> sum_lanes(Vec<E>* r) {
  constexpr int W = kLanes<E>;
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 2 * S) {
      swap_halves<E, S>(r[i], r[i + S], std::make_integer_sequence<int, W>{});
      r[i] += r[i + S];
    }
    return sum_lanes<E, 2 * S>(r);
  } else {
    return r[0];
  }
}

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
