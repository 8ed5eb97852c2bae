// Numbers of keys and values in the types that memory holds them in. `numbers` loads a vector of
// them as what products multiply, so that rows that are read few times are not converted into a
// buffer first.
#pragma once
#include "matrix_view.h"

namespace fa {
namespace FA_ISA {

struct StoredBf16 {
  uint16_t bits;
  using Packed = Halves;  // a vector's numbers in memory
  static FA_INLINE Vec<float> widened(Packed bits) {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
    return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#elif defined(FA_NEON)
    return (Vec<float>)vshll_n_u16((uint16x4_t)bits, 16);
#else
    Vec<float> wide;
    for (int l = 0; l < kLanes<float>; ++l) wide[l] = from_bf16(uint16_t(bits[l]));
    return wide;
#endif
  }
};
struct StoredF16 {
  uint16_t bits;
  using Packed = Halves;
  static FA_INLINE Vec<float> widened(Packed bits) { return widen_halves(bits); }
};
// Eight bits: FA_I8, FA_E4M3 or FA_E5M2, without the scale of their row, and without `factor`. Rows
// without NaN are quicker to widen.
template <int64_t DTYPE, bool NANS = true>
struct StoredByte {
  uint8_t bits;
  using Packed = Bytes;
  static constexpr float factor = kWidened<DTYPE>;
  static FA_INLINE Vec<float> widened(Packed bits) { return widen<DTYPE, NANS>(bits); }
};
// FA_I8 as pairs of integers of 16 bits: int8_rows.h has its products.
struct StoredInt8 {
  uint8_t bits;
  using Packed = Halves;
  static constexpr float factor = 1.0f;
#if defined(__AVX512F__)
  static FA_INLINE Vec<int32_t> widened(Packed bytes) {
    return (Vec<int32_t>)_mm512_cvtepi8_epi16((__m256i)bytes);
  }
#elif defined(__AVX2__)
  static FA_INLINE Vec<int32_t> widened(Packed bytes) {
    return (Vec<int32_t>)_mm256_cvtepi8_epi16((__m128i)bytes);
  }
#endif
};
// FA_E4M3 where it is read from tables: e4m3_rows.h has its products.
struct StoredE4m3 {
  uint8_t bits;
  static constexpr float factor = kWidened<FA_E4M3>;
};
// Four bits: a byte of a row of FA_I4. int4_rows.h has its products.
struct StoredInt4 {
  uint8_t bits;
};
template <class S>
constexpr bool has_scales = false;
template <int64_t DTYPE, bool NANS>
constexpr bool has_scales<StoredByte<DTYPE, NANS> > = true;
template <>
constexpr bool has_scales<StoredInt8> = true;
template <>
constexpr bool has_scales<StoredE4m3> = true;
template <class S>
constexpr bool is_int4 = std::is_same_v<S, StoredInt4>;

// How many S hold a row.
template <class S>
constexpr int64_t stored_size(int64_t columns) {
  return is_int4<S> ? Int4Block::bytes_of(columns) : columns;
}
// How many vectors of numbers a cache line has.
template <class S>
constexpr int kVectorsOfLine = std::max<int>(1, 64 / sizeof(S) / kLanes<float>);
template <>
constexpr int kVectorsOfLine<StoredInt8> = 64 / (FA_VECTOR_BYTES / 2);
template <>
constexpr int kVectorsOfLine<double> = std::max<int>(1, 64 / FA_VECTOR_BYTES);

// The first bytes of a packed vector, fewer than it has, and zeros after them. A copy of a varying
// length would be a call.
template <class Packed>
FA_INLINE Packed load_bytes(const void* p, int64_t bytes) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Packed) == 32)
    return (Packed)_mm256_maskz_loadu_epi8(__mmask32((1u << bytes) - 1), p);
  else
    return (Packed)_mm_maskz_loadu_epi8(__mmask16((1u << bytes) - 1), p);
#elif defined(__AVX2__)
  const int words = int(bytes / 4);
  const __m128i at = _mm_setr_epi32(0, 1, 2, 3);
  __m128i x =
      _mm_maskload_epi32(static_cast<const int*>(p), _mm_cmpgt_epi32(_mm_set1_epi32(words), at));
  if (bytes % 4) {
    int last = 0;
    for (int64_t i = 0; i < bytes % 4; ++i)
      last |= static_cast<const uint8_t*>(p)[4 * words + i] << 8 * i;
    x = _mm_or_si128(
        x, _mm_and_si128(_mm_set1_epi32(last), _mm_cmpeq_epi32(_mm_set1_epi32(words), at)));
  }
  Packed first;
  std::memcpy(&first, &x, sizeof first);
  return first;
#else
  Packed x{};
  std::memcpy(&x, p, bytes);
  return x;
#endif
}
// The numbers from column c of a row on.
template <class S>
FA_INLINE auto numbers(const S* row, int64_t c) {
  if constexpr (std::is_arithmetic_v<S>) {
    return load(row + c);
  } else {
    typename S::Packed bits;
    std::memcpy(&bits, row + c, sizeof bits);
    return S::widened(bits);
  }
}
// n of them, fewer than a vector has, and zeros after them.
template <class S>
FA_INLINE auto last_numbers(const S* row, int64_t c, int64_t n) {
  if constexpr (std::is_arithmetic_v<S>) {
    return load_some(row + c, n);
  } else {
    return S::widened(load_bytes<typename S::Packed>(row + c, n * sizeof(S)));
  }
}

// True if some of these rows has a NaN of float8_e4m3fn, the largest pattern of each sign.
inline bool has_nan(Broadcast<StoredByte<FA_E4M3> > a, int64_t rows, int64_t columns) {
  typedef uint8_t Whole __attribute__((vector_size(FA_VECTOR_BYTES)));
  constexpr int64_t size = sizeof(Whole);
  const int64_t whole = columns / size * size;
  Whole most{};
  const auto look = [&](Whole bits) { most = max_or_second(Whole(bits & uint8_t(0x7F)), most); };
  for (int64_t r = 0; r < rows; ++r) {
    const StoredByte<FA_E4M3>* row = a.data + r * a.stride;
    Whole bits;
    for (int64_t c = 0; c < whole; c += size) {
      std::memcpy(&bits, row + c, size);
      look(bits);
    }
    if (whole == columns) continue;
    bits = Whole{};
    std::memcpy(&bits, row + whole, columns - whole);
    look(bits);
  }
  const Vec<int64_t> words = (Vec<int64_t>)(most == uint8_t(0x7F));
  int64_t all = 0;
  for (int l = 0; l < kLanes<int64_t>; ++l) all |= words[l];
  return all;
}
// Calls f(rows), as rows without NaN if they have none and that type is quicker.
template <class S, class F>
FA_INLINE void with_rows(Broadcast<S> a, int64_t rows, int64_t columns, F f) {
  if constexpr (std::is_same_v<S, StoredByte<FA_E4M3> >) {
    using Finite = StoredByte<FA_E4M3, false>;
    if (!has_nan(a, rows, columns))
      return f(Broadcast<Finite>{reinterpret_cast<const Finite*>(a.data), a.stride});
  }
  f(a);
}

// buf[rows][columns] = rows r0.. of A as they are stored.
template <class S>
void copy_stored(const KeyPlane& a, int64_t r0, int64_t rows, int64_t columns, S* buf) {
  for (int64_t r = 0; r < rows; ++r, buf += columns) {
    const S* row = static_cast<const S*>(a.data) + a.at(r0 + r);
    for (int64_t c = 0; c < columns; ++c) buf[c] = row[c * a.step];
  }
}

}  // namespace FA_ISA
}  // namespace fa
