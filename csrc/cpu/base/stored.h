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
// Eight bits: FA_I8, FA_E4M3 or FA_E5M2, without the scale of their row, and without `factor`.
template <int64_t DTYPE>
struct StoredByte {
  uint8_t bits;
  using Packed = Bytes;
  static constexpr float factor = kWidened<DTYPE>;
  static FA_INLINE Vec<float> widened(Packed bits) { return widen<DTYPE>(bits); }
};
// Four bits: a byte of a row of FA_I4.
struct StoredInt4 {
  uint8_t bits;
};
template <class S>
constexpr bool has_scales = false;
template <int64_t DTYPE>
constexpr bool has_scales<StoredByte<DTYPE>> = true;
template <class S>
constexpr bool is_int4 = std::is_same_v<S, StoredInt4>;

// How many S hold a row.
template <class S>
constexpr int64_t stored_size(int64_t columns) {
  return is_int4<S> ? Int4Block::bytes_of(columns) : columns;
}
// Vectors that are best read one after the other: those of a block share its scale.
template <class S>
constexpr int kVectorsAtOnce = is_int4<S> ? 2 : 1;
// How many steps of kVectorsAtOnce vectors a cache line has.
template <class S>
constexpr int kStepsOfLine = is_int4<S> ? 2 : std::max<int>(1, 64 / sizeof(S) / kLanes<float>);
template <>
constexpr int kStepsOfLine<double> = std::max<int>(1, 64 / FA_VECTOR_BYTES);

// The numbers from column c of a row on: N vectors.
template <int N, class S, class V>
FA_INLINE void numbers(const S* row, int64_t c, V (&to)[N]) {
  if constexpr (is_int4<S>) {
    const uint8_t* block = &row->bits + Int4Block::bytes_of(c);
    Int4Block{block}.vectors(c % Int4Block::columns, to);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v, c += kLanes<float>) {
      if constexpr (std::is_arithmetic_v<S>) {
        to[v] = load(row + c);
      } else {
        typename S::Packed bits;
        std::memcpy(&bits, row + c, sizeof bits);
        to[v] = S::widened(bits);
      }
    }
  }
}
// n of them, fewer than a vector has, and zeros after them. Rows of StoredInt4 are whole blocks.
template <class S, class V>
FA_INLINE void last_numbers(const S* row, int64_t c, int64_t n, V (&to)[1]) {
  if constexpr (std::is_arithmetic_v<S>) {
    to[0] = load_some(row + c, n);
  } else if constexpr (is_int4<S>) {
    numbers(row, c, to);
  } else {
    typename S::Packed bits{};
    std::memcpy(&bits, row + c, n * sizeof(S));
    to[0] = S::widened(bits);
  }
}

// buf[rows][ld] = rows r0.. of A as they are stored, zero past `columns`.
template <class S>
void copy_stored(const KeyPlane& a, int64_t r0, int64_t rows, int64_t columns, S* buf, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r, buf += ld) {
    const S* row = static_cast<const S*>(a.data) + a.at(r0 + r);
    for (int64_t c = 0; c < columns; ++c) buf[c] = row[c * a.step];
    std::fill(buf + columns, buf + ld, S{});
  }
}

}  // namespace FA_ISA
}  // namespace fa
