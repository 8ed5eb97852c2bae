// Rows in eight and in four bits, with the bits of `quantised` and `quantised_int4`
// (fastattn/call/quantisation.py and int4.py), which describe them. Each step is rounded as torch's
// operation is, and no product is added to: a compiler may fuse such a pair.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fa {

template <class To, class From>
inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// --- the numbers of a row, as float or double ---------------------------------------------------

struct RowBf16 {
  uint16_t bits;
};
struct RowF16 {
  uint16_t bits;
};
inline float number(float x) { return x; }
inline double number(double x) { return x; }
inline float number(RowBf16 x) { return same_bits<float>(uint32_t{x.bits} << 16); }
inline float number(RowF16 x) {
  const uint32_t rest = x.bits & 0x7FFFu, wide = rest << 13;
  // A subnormal number is added to 2^-14 first: a process may flush float32's subnormals.
  const uint32_t tiny = same_bits<uint32_t>(same_bits<float>(0x38800000u + wide) - 0x1p-14f);
  const uint32_t size = rest < 0x400    ? tiny
                        : rest < 0x7C00 ? wide + (112u << 23)
                                        : wide + (224u << 23);
  return same_bits<float>(size | uint32_t(x.bits & 0x8000u) << 16);
}
template <class T>
using NumberOf = decltype(number(T{}));

// The largest absolute value, by its bits: NaN is above infinity.
template <class T>
NumberOf<T> largest_size(const T* x, int64_t n) {
  using R = NumberOf<T>;
  using Bits = std::conditional_t<sizeof(R) == 4, int32_t, int64_t>;
  Bits most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits size = same_bits<Bits>(number(x[i])) & std::numeric_limits<Bits>::max();
    most = size > most ? size : most;
  }
  return same_bits<R>(most);
}

// A number of at most 2^22 (double: 2^51) in two's complement, rounded to nearest even, in the low
// bits of the result.
inline uint32_t nearest(float x) { return same_bits<uint32_t>(x + 0x1.8p23f); }
inline uint32_t nearest(double x) { return uint32_t(same_bits<uint64_t>(x + 0x1.8p52)); }

// --- eight bits ---------------------------------------------------------------------------------

struct ToInt8 {
  static constexpr float kLargest = 127;
  template <class R>
  static uint8_t of(R x) {
    return uint8_t(nearest(x));
  }
};
// x is at most kLargest.
template <int MANTISSA, int BIAS, int LARGEST>
struct ToFloat8 {
  static constexpr float kLargest = LARGEST;
  static uint8_t of(double x) { return of(float(x)); }
  static uint8_t of(float x) {
    constexpr int kCut = 23 - MANTISSA;
    const uint32_t bits = same_bits<uint32_t>(x), size = bits & 0x7FFFFFFFu;
    const uint32_t odd = size >> kCut & 1;
    const uint32_t normal =
        ((size + (1u << (kCut - 1)) - 1 + odd) >> kCut) - ((127u - BIAS) << MANTISSA);
    // The spacing of float32 from this number on is that of the subnormal numbers.
    constexpr uint32_t kShift = (127u + 24 - BIAS - MANTISSA) << 23;
    const float shifted = same_bits<float>(size) + same_bits<float>(kShift);
    const uint32_t subnormal = same_bits<uint32_t>(shifted) - kShift;
    return uint8_t((size < (128u - BIAS) << 23 ? subnormal : normal) | (bits >> 24 & 0x80u));
  }
};
using ToE4m3 = ToFloat8<3, 7, 448>;
using ToE5m2 = ToFloat8<2, 15, 57344>;

template <class To, class T>
void quantise_row(const void* row, int64_t n, uint8_t* __restrict to, float* scale) {
  using R = NumberOf<T>;
  const T* __restrict x = static_cast<const T*>(row);
  constexpr R most = To::kLargest;
  constexpr float highest = float(double(FLT_MAX) / To::kLargest * (1 - 0x1p-23));
  const R size = largest_size(x, n);
  const float exact = float(size / most);
  *scale = !(size <= R(FLT_MAX)) ? NAN : exact < highest ? exact : highest;
  if (!(*scale > 0)) {
    std::memset(to, 0, size_t(n));
    return;
  }
  const R by = *scale;
  for (int64_t i = 0; i < n; ++i) {
    R y = number(x[i]) / by;
    y = y < -most ? -most : y;
    y = y > most ? most : y;
    to[i] = To::of(y);
  }
}

// --- four bits ----------------------------------------------------------------------------------

constexpr int kInt4Columns = 32, kInt4Bytes = 20;  // of a block: FA_I4 of abi.h

inline float of_bf16(uint16_t bits) { return number(RowBf16{bits}); }

template <class R>
uint16_t nearest_bf16(R x) {
  const uint32_t bits = same_bits<uint32_t>(float(x));
  return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
template <class R>
uint16_t bf16_below(R x) {  // x, or the next below
  const uint16_t y = nearest_bf16(x);
  return R(of_bf16(y)) > x ? uint16_t((y & 0x8000u) ? y + 1 : y - 1) : y;
}
template <class R>
uint16_t bf16_above(R x) {  // x, which is not negative, or the next above
  const uint16_t y = nearest_bf16(x);
  return R(of_bf16(y)) < x ? uint16_t(y + 1) : y;
}

template <class T>
void quantise_int4_block(const T* __restrict x, uint8_t* __restrict to) {
  using R = NumberOf<T>;
  constexpr int kColumns = kInt4Columns, kHalf = kColumns / 2;
  constexpr uint16_t kNan = 0x7FC0;
  R low = number(x[0]), high = low;
  for (int i = 1; i < kColumns; ++i) {
    const R y = number(x[i]);
    low = y < low ? y : low;
    high = y > high ? y : high;
  }
  uint16_t factors[2] = {kNan, kNan};  // scale and minimum
  if (largest_size(x, kColumns) <= R(of_bf16(0x7F7F))) {
    const uint16_t minimum = bf16_below(low + R(0));  // 0, not -0
    const uint16_t scale = bf16_above((high - R(of_bf16(minimum))) / R(15));
    const float span = 15 * of_bf16(scale);  // exact, or infinite
    if (span <= FLT_MAX && of_bf16(minimum) + span <= FLT_MAX) {
      factors[0] = scale;
      factors[1] = minimum;
    }
  }
  const R from = of_bf16(factors[1]), by = of_bf16(factors[0]);
  uint8_t n[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    R y = (number(x[i]) - from) / by;
    y = y > R(0) ? y : R(0);  // also NaN: of scale 0 or NaN
    y = y < R(15) ? y : R(15);
    n[i] = uint8_t(nearest(y));
  }
  for (int i = 0; i < kHalf; ++i) to[i] = uint8_t(n[i] | n[i + kHalf] << 4);
  std::memcpy(to + kHalf, factors, sizeof factors);
}

template <class T>
void quantise_int4_row(const void* row, int64_t n, uint8_t* to, float*) {
  const T* x = static_cast<const T*>(row);
  for (int64_t c = 0; c + kInt4Columns <= n; c += kInt4Columns, to += kInt4Bytes)
    quantise_int4_block(x + c, to);
}

template <class T>
void copy_row(const void* row, int64_t n, uint8_t* to, float*) {
  std::memcpy(to, row, size_t(n) * sizeof(T));
}

}  // namespace fa
