// Splits numbers into planes of bfloat16, and finds the numbers that cannot be split. For tensors
// each plane is the remainder rounded to nearest: the plane products that are omitted, below a
// number's last bit, then have no bias. P and dS are multiplied by tensors only; their planes are
// truncated, which costs less. The last plane is exact, except where P of float16 has more bits
// than two planes.
#pragma once
#include "amx_product.h"
#include "split_fallback.h"

namespace fa {
namespace FA_ISA {

// The numbers' bits rounded to bfloat16 in the upper half, ties away from zero. A NaN needs special
// handling only where nothing else detects it: with many bits set the sum would be a number.
FA_INLINE __m512i upper_halves(Vec<float> x) {
  return _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000));
}
FA_INLINE __m512i upper_halves_or_nan(Vec<float> x) {
  return _mm512_mask_add_epi32((__m512i)x, _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), (__m512i)x,
                               _mm512_set1_epi32(0x8000));
}
FA_INLINE Vec<int32_t> pair_up(__m512i first, __m512i second) {
  return (Vec<int32_t>)_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
}
// Sixteen halves and sixteen more, to pairs of one from each.
FA_INLINE Vec<int32_t> pair_up(const uint16_t* first, const uint16_t* second) {
  const __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
  const __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
  return (Vec<int32_t>)_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
}

// The next plane of x, in the upper halves; x becomes what is left for those after it.
template <int P, bool nearest>
FA_INLINE __m512i take_plane(int plane, Vec<float>& x) {
  if (P == 1) return upper_halves_or_nan(x);
  if (plane == P - 1) return upper_halves(x);
  const __m512i half = nearest ? upper_halves(x) : (__m512i)x;
  x -= (Vec<float>)_mm512_and_si512(half, _mm512_set1_epi32(int(0xffff0000)));
  return half;
}
// Calls out(plane, pairs of one number from each).
template <int P, bool nearest, class Out>
FA_INLINE void each_plane(Vec<float> first, Vec<float> second, Out out) {
#pragma GCC unroll 3
  for (int plane = 0; plane < P; ++plane) {
    const __m512i one = take_plane<P, nearest>(plane, first);
    out(plane, pair_up(one, take_plane<P, nearest>(plane, second)));
  }
}

// Limits of the numbers that have planes. Tiles flush subnormal numbers to 0, so the last plane
// must not be one; and from 2^30 on a sum of products of sums may overflow, which would give planes
// that are infinities of both signs. Float16 is always within both limits, if it is finite.
constexpr uint32_t power_of_two(int exponent) { return uint32_t(exponent + 127) << 23; }

FA_INLINE __m512i magnitude(Vec<float> x) {
  return _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff));
}
inline Fit fit_of(const float* row, int64_t columns) {
  constexpr uint32_t least = power_of_two(-99), most = power_of_two(30);
  __mmask16 unfit = 0;
  for (int64_t c = 0; c < columns; c += 16) {
    const __m512i x = magnitude(load(row + c));
    const __m512i above = _mm512_sub_epi32(x, _mm512_set1_epi32(int(least)));
    unfit |= _mm512_mask_cmpge_epu32_mask(_mm512_test_epi32_mask(x, x), above,
                                          _mm512_set1_epi32(int(most - least)));
  }
  return unfit ? kUnfit : kFits;
}
// The same test for dS, by its largest number: small ones beside it do not matter to its sums.
FA_INLINE bool sums_fit(__m512i largest) {
  const uint32_t x = _mm512_reduce_max_epu32(largest);
  return x == 0 || (x >= power_of_two(-80) && x < power_of_two(60));
}

}  // namespace FA_ISA
}  // namespace fa
