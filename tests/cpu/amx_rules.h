// TDPBF16PS by its rules, an operation at a time, as floats and as bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace plain {

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float number(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float quieted(float x) { return number(bits(x) | 0x00400000); }
inline float made(float x) { return std::isnan(x) ? number(0xffc00000) : x; }

// a b + c, rounded once. A result that is below 2^-126 when rounded to 24 bits with any exponent
// becomes 0, even if rounding to a subnormal number gives 2^-126; double is exact there.
inline float multiply_add(float a, float b, float c) {
  for (float x : {a, b, c})
    if (std::isnan(x)) return quieted(x);
  a = flushed(a), b = flushed(b), c = flushed(c);
  const float r = made(std::fma(a, b, c));
  const double exact = std::fma(double(a), double(b), double(c));
  const bool tiny = std::fabs(r) == 0x1p-126f && std::fabs(exact) < 0x1p-126 * (1 - 0x1p-25);
  return tiny ? std::copysign(0.0f, r) : flushed(r);
}
inline float add(float x, float y) {
  for (float z : {x, y})
    if (std::isnan(z)) return quieted(z);
  return flushed(made(flushed(x) + flushed(y)));
}
// C += A B, of tiles of 16 x 16 words.
inline void multiply(const uint32_t* a, const uint32_t* b, uint32_t* c) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t x = a[16 * m + k], y = b[16 * k + n];
        even = multiply_add(number(x << 16), number(y << 16), even);
        odd = multiply_add(number(x & 0xffff0000), number(y & 0xffff0000), odd);
      }
      uint32_t& sum = c[16 * m + n];
      sum = bits(add(number(sum), add(even, odd)));
    }
}

}  // namespace plain
