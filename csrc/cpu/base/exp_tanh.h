// exp, log and tanh of vectors, with their errors.
#pragma once
#include "simd.h"

namespace fa {
namespace FA_ISA {

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
template <class R>
FA_INLINE Vec<R> clamped(Vec<R> x, R low, R high) {  // NaN stays NaN
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}
#if defined(FA_NEON)
template <>
FA_INLINE Vec<float> clamped<float>(Vec<float> x, float low, float high) {
  return (Vec<float>)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(low)), vdupq_n_f32(high));
}
template <>
FA_INLINE Vec<double> clamped<double>(Vec<double> x, double low, double high) {
  return (Vec<double>)vminq_f64(vmaxq_f64((float64x2_t)x, vdupq_n_f64(low)), vdupq_n_f64(high));
}
#endif
// Rounds by adding 1.5 * 2^mantissa: the low bits of the sum then hold n.
template <class R>
FA_INLINE Vec<R> exp_by_magic(Vec<R> x) {
  using I = Int<R>;
  constexpr int mantissa = std::numeric_limits<R>::digits - 1;
  constexpr I bias = std::numeric_limits<R>::max_exponent - 1;
  constexpr R magic = R(1.5) * R(I(1) << mantissa), ln2 = R(0.69314718055994530942);
  constexpr R low = kLeastExponent<R>, high = R(bias + 1) * ln2;
  const Vec<I> counts = ~(x < low);  // true for NaN, which must stay NaN
  x = clamped<R>(x, low, high);      // 2^(bias + 1) is the bit pattern of infinity
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

// log of a number from 2^-126 on, of +inf or NaN, after Cephes: x = 2^n (1 + f), with 1 + f in
// [sqrt(1/2), sqrt(2)). Within 1 ulp.
FA_INLINE Vec<float> log(Vec<float> x) {
  constexpr int32_t half = 0x3f3504f3;  // sqrt(1/2)
  const Vec<int32_t> bits = (Vec<int32_t>)x - half, n = bits >> 23;
  const Vec<float> f = (Vec<float>)((bits & 0x7fffff) + half) - 1.0f, z = f * f;
  const Vec<float> e = __builtin_convertvector(n, Vec<float>);
  Vec<float> p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec<float> low = p * f * z + (e * -2.12194440e-4f - 0.5f * z);
  const Vec<float> y = e * 0.693359375f + (f + low);
  return x < kInf<float> ? y : x;
}
// Few are needed: one by one.
FA_INLINE Vec<double> log(Vec<double> x) {
  for (int l = 0; l < kLanes<double>; ++l) x[l] = std::log(x[l]);
  return x;
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

}  // namespace FA_ISA
}  // namespace fa
