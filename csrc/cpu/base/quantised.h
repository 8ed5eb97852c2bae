// Reads rows of eight and of four bits as numbers. Eight bits are multiplied by the row's scale,
// four by that of their block, and rounded to the dtype that the call computes in. So kernels read
// the numbers that rows in that dtype would have. Decoding on vectors does not round them: stored.h.
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
FA_INLINE Halves sign_extended(Bytes bytes) {
#if defined(__AVX512F__)
  return (Halves)_mm256_cvtepi8_epi16((__m128i)bytes);
#elif defined(__AVX2__)
  return (Halves)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Halves);
#endif
}
// Float16 has all numbers of float8_e5m2, and 2^-8 times those of float8_e4m3fn. There the largest
// pattern of each sign is NaN. A number is widen() times kWidened.
template <int64_t DTYPE>
constexpr float kWidened = DTYPE == FA_E4M3 ? 256.0f : 1.0f;
template <int64_t DTYPE, bool NANS = true>
FA_INLINE Vec<float> widen(Bytes bytes) {
  if constexpr (DTYPE == FA_I8) {
    return widen_whole(bytes);
  } else {
    const Halves eight = sign_extended(bytes);
    if constexpr (DTYPE == FA_E5M2) return widen_halves(eight << 8);
    const Halves halves = eight << 7 & int16_t(0xBFFF);
    if constexpr (!NANS) return widen_halves(halves);
#if defined(__AVX512F__)
    const __mmask16 nan =
        _mm256_cmpeq_epi16_mask(_mm256_slli_epi16((__m256i)halves, 1), _mm256_set1_epi16(0x7F00));
    return widen_halves(
        (Halves)_mm256_mask_mov_epi16((__m256i)halves, nan, _mm256_set1_epi16(0x7E00)));
#else
    const Halves most = halves & int16_t(0x3F80);
    return widen_halves(halves | (Halves(most == int16_t(0x3F80)) & int16_t(0x7C00)));
#endif
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
    scaled(widen<DTYPE>(bytes) * kWidened<DTYPE>, scale, kept, W, dst + i);
  }
  if (i == n) return;
  bytes = Bytes{};
  std::memcpy(&bytes, src + i, n - i);
  scaled(widen<DTYPE>(bytes) * kWidened<DTYPE>, scale, kept, n - i, dst + i);
}

// FA_I4 of abi.h.
struct Int4Block {
  static constexpr int64_t columns = 32, bytes = 20;
  static constexpr int64_t bytes_of(int64_t row) { return row / columns * bytes; }
  const uint8_t* data;
  FA_INLINE uint32_t scale_and_minimum() const {
    uint32_t both;
    std::memcpy(&both, data + 16, sizeof both);
    return both;
  }
  FA_INLINE float scale() const { return number(scale_and_minimum() << 16); }
  FA_INLINE float minimum() const { return number(scale_and_minimum() & 0xFFFF0000u); }
  FA_INLINE int32_t at(int64_t c) const { return data[c % 16] >> (c < 16 ? 0 : 4) & 15; }
  // Those of N vectors, from column c on, a multiple of their lanes.
  template <int N>
  FA_INLINE void vectors(int64_t c, Vec<float> (&to)[N]) const {
#if defined(__AVX512F__)
    // The sixteen values are one vector, from which the four bits choose.
    const Vec<float> n = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec<float> value = n * scale() + minimum();
    const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)data));
    for (int v = 0; v < N; ++v)
      to[v] = _mm512_permutexvar_ps(c + 16 * v ? _mm512_srli_epi32(bits, 4) : bits, value);
#else
    constexpr int W = kLanes<float>;
    const Vec<float> by = splat(scale()), from = splat(minimum());
    for (int v = 0; v < N; ++v, c += W) {
#if defined(__AVX2__)
      const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(data + c % 16)));
      const __m256i upper = _mm256_srli_epi32(bits, 4);
      const __m256i four = c < 16 ? _mm256_and_si256(bits, _mm256_set1_epi32(15)) : upper;
      to[v] = (Vec<float>)_mm256_cvtepi32_ps(four) * by + from;
#else
      Vec<Int<float> > four;
      for (int l = 0; l < W; ++l) four[l] = at(c + l);
      to[v] = __builtin_convertvector(four, Vec<float>) * by + from;
#endif
    }
#endif
  }
};
// dst[0..n) = a row's numbers from its column c on, rounded as above.
template <class T>
FA_INLINE void dequantise_int4(const uint8_t* row, int64_t c, int64_t n, int64_t kept, T* dst) {
  constexpr int64_t W = kLanes<float>;
  for (int64_t i = 0; i < n;) {
    const int64_t at = (c + i) % Int4Block::columns;
    const Int4Block block{row + (c + i) / Int4Block::columns * Int4Block::bytes};
    if constexpr (sizeof(T) == 8) {
      dst[i++] = double(block.at(at)) * double(block.scale()) + double(block.minimum());
    } else if (at % W == 0) {
      Vec<float> here[1];
      block.vectors(at, here);
      scaled(here[0], 1.0f, kept, std::min(W, n - i), dst + i);
      i += std::min(W, n - i);
    } else {
      scaled(splat(float(block.at(at)) * block.scale() + block.minimum()), 1.0f, kept, 1, dst + i);
      ++i;
    }
  }
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
