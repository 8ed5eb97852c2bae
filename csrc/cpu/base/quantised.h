// Reads rows of eight bits as numbers: each is multiplied by the row's scale and rounded to the
// dtype that the call computes in. So kernels read the numbers that rows in that dtype would have.
#pragma once
#include "convert.h"

namespace fa {
namespace FA_ISA {

// A float32 vector's lanes of eight and of sixteen bits.
typedef int8_t Bytes __attribute__((vector_size(kLanes<float>)));
typedef int16_t Halves __attribute__((vector_size(2 * kLanes<float>)));

// (Written as a conversion of vectors, GCC 12 does it lane by lane.)
FA_INLINE Vec<float> widen_whole(Bytes bytes) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)bytes)));
#elif defined(FA_NEON)
  const int8x8_t twice = (int8x8_t)vdup_n_s32((int32_t)bytes);
  return (Vec<float>)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(twice))));
#else
  Vec<float> wide;
  for (int l = 0; l < kLanes<float>; ++l) wide[l] = bytes[l];
  return wide;
#endif
}
FA_INLINE Vec<float> widen_halves(Halves halves) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)halves);
#elif defined(FA_NEON)
  return (Vec<float>)vcvt_f32_f16((float16x4_t)halves);
#else
  Vec<float> wide;
  for (int l = 0; l < kLanes<float>; ++l) wide[l] = from_f16(uint16_t(halves[l]));
  return wide;
#endif
}
// Float16 has all numbers of float8_e5m2, and 2^-8 times those of float8_e4m3fn. There the largest
// pattern of each sign is NaN.
template <int64_t DTYPE>
FA_INLINE Vec<float> widen(Bytes bytes) {
  if constexpr (DTYPE == FA_I8) {
    return widen_whole(bytes);
  } else {
    const Halves eight = __builtin_convertvector(bytes, Halves);
    if constexpr (DTYPE == FA_E5M2) return widen_halves(eight << 8);
    const Halves halves = eight << 7 & int16_t(0xBFFF), most = halves & int16_t(0x3F80);
    return widen_halves(halves | (Halves(most == int16_t(0x3F80)) & int16_t(0x7C00))) * 256.0f;
  }
}

// To the nearest bfloat16, in the upper half of each lane.
FA_INLINE Words round_bf16(Vec<float> x) {
  const Words u = (Words)x, even = u + 0x7FFFu + (u >> 16 & 1u);
  return x == x ? even & 0xFFFF0000u : splat(0x7FC00000u);
}
FA_INLINE Vec<float> round_f16(Vec<float> x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, 0));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, 0));
#elif defined(FA_NEON)
  return (Vec<float>)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x));
#else
  for (int l = 0; l < kLanes<float>; ++l) x[l] = from_f16(to_f16(x[l]));
  return x;
#endif
}

// Scales a vector of numbers, rounds them and stores dst[0..n), n lanes at most.
template <class E, class V>
FA_INLINE void store_some(E* dst, V lanes, int64_t n) {
  std::memcpy(dst, &lanes, n * sizeof(E));
}
FA_INLINE void scaled(Vec<float> x, float scale, int64_t kept, int64_t n, float* dst) {
  x *= scale;
  if (kept == FA_BF16) x = (Vec<float>)round_bf16(x);
  if (kept == FA_F16) x = round_f16(x);
  store_some(dst, x, n);
}
FA_INLINE void scaled(Vec<float> x, float scale, int64_t, int64_t n, double* dst) {
  for (int64_t l = 0; l < n; ++l) dst[l] = double(x[l]) * double(scale);
}
FA_INLINE void scaled(Vec<float> x, float scale, int64_t, int64_t n, uint16_t* dst) {
  x *= scale;
#if defined(__AVX512BF16__)
  const Halves halves = (Halves)_mm512_cvtneps_pbh((__m512)x);
#elif defined(FA_BF16_PRODUCTS)
  const Halves halves = (Halves)vcvt_bf16_f32((float32x4_t)x);
#else
  const Halves halves = __builtin_convertvector(round_bf16(x) >> 16, Halves);
#endif
  store_some(dst, halves, n);
}

// dst[0..n) = src[0..n) * scale, rounded to the dtype `kept`; bfloat16 stays as it is if T has 16
// bits.
template <int64_t DTYPE, class T>
FA_INLINE void dequantise(const uint8_t* src, int64_t n, float scale, int64_t kept, T* dst) {
  constexpr int64_t W = kLanes<float>;
  Bytes bytes;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    std::memcpy(&bytes, src + i, W);
    scaled(widen<DTYPE>(bytes), scale, kept, W, dst + i);
  }
  if (i == n) return;
  bytes = Bytes{};
  std::memcpy(&bytes, src + i, n - i);
  scaled(widen<DTYPE>(bytes), scale, kept, n - i, dst + i);
}
// Calls f with the storage dtype as a constant.
template <class F>
FA_INLINE void with_storage(int64_t dtype, F f) {
  if (dtype == FA_I8) return f(std::integral_constant<int64_t, FA_I8>{});
  if (dtype == FA_E4M3) return f(std::integral_constant<int64_t, FA_E4M3>{});
  f(std::integral_constant<int64_t, FA_E5M2>{});
}

}  // namespace FA_ISA
}  // namespace fa
