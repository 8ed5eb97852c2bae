// Converts storage types to the type of computation, and back.
#pragma once
#include <algorithm>

#include "../../abi.h"
#include "../../common/item_size.h"
#include "simd.h"

namespace fa {
namespace FA_ISA {

template <class R>
constexpr int64_t dtype_of = sizeof(R) == 8 ? FA_F64 : FA_F32;

FA_INLINE uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
FA_INLINE float number(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

FA_INLINE float from_bf16(uint16_t x) { return number(uint32_t(x) << 16); }
FA_INLINE uint16_t to_bf16(float x) {
  const uint32_t u = bits(x);
  const uint32_t even = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7FC0u : even);
}

// IEEE half without hardware: subnormals come out of a float subtraction and an
// addition that let the FPU do the rounding.
FA_INLINE float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, body = uint32_t(h & 0x7FFFu) << 13;
  const float normal = number(body + (112u << 23));
  const float special = number(body | (255u << 23));
  const float tiny = number(body + (113u << 23)) - number(113u << 23);
  const float x = (h & 0x7C00u) == 0x7C00u ? special : (h & 0x7C00u) == 0 ? tiny : normal;
  return number(bits(x) | sign);
}
FA_INLINE uint16_t to_f16(float x) {
  const uint32_t u = bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  const uint32_t normal = (a - (112u << 23) + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  const uint32_t tiny = bits(number(a) + 0.5f) - bits(0.5f);
  const uint32_t h = a > 0x7F800000u     ? 0x7E00u
                     : a >= (143u << 23) ? 0x7C00u
                     : a < (113u << 23)  ? tiny
                                         : normal;
  return uint16_t(h | sign);
}

FA_INLINE void widen_f16(const uint16_t* src, int64_t n, float* dst) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    store(dst + i, (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(src + i))));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    store(dst + i, (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + i))));
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1q_f32(dst + i, vcvt_f32_f16((float16x4_t)vld1_u16(src + i)));
#endif
  for (; i < n; ++i) dst[i] = from_f16(src[i]);
}

FA_INLINE void narrow_f16(const float* src, int64_t n, uint16_t* dst) {
  int64_t i = 0;
#if defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1_u16(dst + i, (uint16x4_t)vcvt_f16_f32(vld1q_f32(src + i)));
#endif
  for (; i < n; ++i) dst[i] = to_f16(src[i]);
}

// dst[i] = to_bf16(src[i]).
FA_INLINE void narrow_bf16(const float* src, int64_t n, uint16_t* dst) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(src + i);
    const __m512i u = (__m512i)x, upper = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_epi32(upper, _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i half =
        _mm512_mask_mov_epi32(_mm512_srli_epi32(even, 16), nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256((__m256i*)(dst + i), _mm512_cvtepi32_epi16(half));
  }
#elif defined(FA_BF16_PRODUCTS)
  for (; i + 4 <= n; i += 4) vst1_u16(dst + i, (uint16x4_t)vcvt_bf16_f32(vld1q_f32(src + i)));
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4) {
    const float32x4_t x = vld1q_f32(src + i);
    const uint32x4_t u = (uint32x4_t)x, odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t even = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7FFF)), odd);
    const uint32x4_t half = vbslq_u32(vceqq_f32(x, x), even, vdupq_n_u32(0x7FC00000));
    vst1_u16(dst + i, vshrn_n_u32(half, 16));
  }
#endif
  for (; i < n; ++i) dst[i] = to_bf16(src[i]);
}

// One element of any storage type. A bool mask reads as what it adds to a score.
template <class R>
FA_INLINE R read(const void* data, int64_t dtype, int64_t at) {
  switch (dtype) {
    case FA_F32:
      return R(static_cast<const float*>(data)[at]);
    case FA_F64:
      return R(static_cast<const double*>(data)[at]);
    case FA_BF16:
      return R(from_bf16(static_cast<const uint16_t*>(data)[at]));
    case FA_F16:
      return R(from_f16(static_cast<const uint16_t*>(data)[at]));
    default:
      return static_cast<const uint8_t*>(data)[at] ? R(0) : -kInf<R>;
  }
}

// dst[0..n) = n elements of `data`, starting at element `at`, `step` apart.
template <class R>
void read_row(const void* data, int64_t dtype, int64_t at, int64_t step, int64_t n, R* dst) {
  if (step != 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] = read<R>(data, dtype, at + i * step);
    return;
  }
  if constexpr (sizeof(R) == 4) {
    const uint16_t* half = static_cast<const uint16_t*>(data) + at;
    if (dtype == FA_F16) return widen_f16(half, n, dst);
    if (dtype == FA_BF16) {
      for (int64_t i = 0; i < n; ++i) dst[i] = from_bf16(half[i]);
      return;
    }
  }
  if (dtype == dtype_of<R>) {
    std::copy_n(static_cast<const R*>(data) + at, n, dst);
  } else if (dtype == FA_BOOL) {
    const uint8_t* flag = static_cast<const uint8_t*>(data) + at;
    for (int64_t i = 0; i < n; ++i) dst[i] = flag[i] ? R(0) : -kInf<R>;
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = read<R>(data, dtype, at + i);
  }
}

// Copies bfloat16 unchanged.
inline void read_row(const void* data, int64_t, int64_t at, int64_t step, int64_t n,
                     uint16_t* dst) {
  const uint16_t* src = static_cast<const uint16_t*>(data) + at;
  if (step == 1)
    std::copy_n(src, n, dst);
  else
    for (int64_t i = 0; i < n; ++i) dst[i] = src[i * step];
}

// The reverse, rounding to nearest even.
template <class R>
void write_row(void* data, int64_t dtype, int64_t at, int64_t step, int64_t n, const R* src) {
  if (dtype == dtype_of<R> && step == 1) {
    std::copy_n(src, n, static_cast<R*>(data) + at);
  } else if (dtype == FA_BF16) {
    uint16_t* half = static_cast<uint16_t*>(data) + at;
    if constexpr (sizeof(R) == 4)
      if (step == 1) return narrow_bf16(src, n, half);
    for (int64_t i = 0; i < n; ++i) half[i * step] = to_bf16(float(src[i]));
  } else if (dtype == FA_F16) {
    uint16_t* half = static_cast<uint16_t*>(data) + at;
    if constexpr (sizeof(R) == 4)
      if (step == 1) return narrow_f16(src, n, half);
    for (int64_t i = 0; i < n; ++i) half[i * step] = to_f16(float(src[i]));
  } else if (dtype == FA_F32) {
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(data)[at + i * step] = float(src[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(data)[at + i * step] = double(src[i]);
  }
}

}  // namespace FA_ISA
}  // namespace fa
