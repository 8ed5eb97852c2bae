// Products of 16-bit integers with keys and values that are stored as integers. Two share a lane.
// Sums of products are exact, in 32 bits.
#pragma once
#include "../base/stored.h"

namespace fa {
namespace FA_ISA {

#if defined(__AVX2__)
FA_INLINE Words rounded(Vec<float> x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtps_epi32((__m512)x);
#else
  return (Words)_mm256_cvtps_epi32((__m256)x);
#endif
}
// to[0..W) = x, rounded; they have 16 bits.
FA_INLINE void store_rounded(uint16_t* to, Vec<float> x) {
#if defined(__AVX512F__)
  const Halves halves = (Halves)_mm512_cvtepi32_epi16((__m512i)rounded(x));
#else
  const Halves halves = __builtin_convertvector(rounded(x), Halves);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

// t += products of both integers of each lane. VNNI adds them to the sum itself; the bits are the
// same.
template <bool VNNI>
FA_INLINE void add_products(Words& t, Words a, Words b) {
#if defined(__AVX512F__)
  if constexpr (VNNI)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(t) : "v"(a), "vm"(b));
  else
    t += (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  t += (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
// Calls f with true as a constant where there is VNNI.
template <class F>
FA_INLINE auto with_vnni(F f) {
#if defined(__AVX512F__)
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  if (vnni) return f(std::true_type{});
#endif
  return f(std::false_type{});
}
FA_INLINE Vec<float> from_integers(Words t) {
  return __builtin_convertvector((Vec<int32_t>)t, Vec<float>);
}
#endif

}  // namespace FA_ISA
}  // namespace fa
