// Rows of eight bits as the numbers they stand for: each times the row's scale, rounded to the
// dtype that the call computes in. So kernels read what rows kept in that dtype would be.
#pragma once
#include "convert.h"

namespace fa {
namespace FA_ISA {

FA_INLINE void widen_i8(const int8_t* src, int64_t n, float* dst) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    store(dst + i, (Vec<float>)_mm512_cvtepi32_ps(
                       _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(src + i)))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    store(dst + i, (Vec<float>)_mm256_cvtepi32_ps(
                       _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(src + i)))));
#endif
  for (; i < n; ++i) dst[i] = float(src[i]);
}
// Halves have the numbers of float8_e5m2, and 2^-8 of float8_e4m3fn's, which has no infinity.
FA_INLINE void widen_f8(const uint8_t* src, int64_t dtype, int64_t n, float* dst) {
  uint16_t halves[FA_CPU_MAX_HEAD_DIM];
  if (dtype == FA_E5M2) {
    for (int64_t i = 0; i < n; ++i) halves[i] = uint16_t(src[i] << 8);
    return widen_f16(halves, n, dst);
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t sign = uint16_t((src[i] & 0x80) << 8), rest = src[i] & 0x7F;
    halves[i] = uint16_t(sign | (rest == 0x7F ? 0x7E00 : rest << 7));
  }
  widen_f16(halves, n, dst);
  for (int64_t i = 0; i < n; ++i) dst[i] *= 256;
}

FA_INLINE void round_f16(int64_t n, float* x) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    store(x + i, (Vec<float>)_mm512_cvtph_ps(_mm512_cvtps_ph(load(x + i), 0)));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    store(x + i, (Vec<float>)_mm256_cvtph_ps(_mm256_cvtps_ph(load(x + i), 0)));
#endif
  for (; i < n; ++i) x[i] = from_f16(to_f16(x[i]));
}

// dst[0..n) = src[0..n) * scale as `kept` has them.
template <class R>
void dequantise(const uint8_t* src, int64_t dtype, int64_t n, float scale, int64_t kept, R* dst) {
  float row[FA_CPU_MAX_HEAD_DIM];
  if (dtype == FA_I8)
    widen_i8(reinterpret_cast<const int8_t*>(src), n, row);
  else
    widen_f8(src, dtype, n, row);
  for (int64_t i = 0; i < n; ++i) dst[i] = R(row[i]) * R(scale);
  if constexpr (sizeof(R) == 4) {
    if (kept == FA_F16) round_f16(n, dst);
    if (kept == FA_BF16)
      for (int64_t i = 0; i < n; ++i) dst[i] = from_bf16(to_bf16(dst[i]));
  }
}
// As bfloat16.
inline void dequantise(const uint8_t* src, int64_t dtype, int64_t n, float scale, int64_t,
                       uint16_t* dst) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  const auto sixteen = [&](int64_t at) {
    const __m128i eight_bits = _mm_loadu_si128((const __m128i*)(src + at));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(eight_bits)),
                         _mm512_set1_ps(scale));
  };
  if (dtype == FA_I8)
    for (; i + 32 <= n; i += 32)
      _mm512_storeu_si512(dst + i, (__m512i)_mm512_cvtne2ps_pbh(sixteen(i + 16), sixteen(i)));
#endif
  if (i == n) return;
  float row[FA_CPU_MAX_HEAD_DIM];
  dequantise(src + i, dtype, n - i, scale, FA_F32, row);
  narrow_bf16(row, n - i, dst + i);
}

}  // namespace FA_ISA
}  // namespace fa
