// Rows of FA_I4 as vectors, without moving their numbers: a vector has the bytes of some blocks, lane
// l four bytes of block l / 4. Shifted right by 4 k bits, k = 0 to 7, its lanes begin with the
// numbers of one column each: k / 2 + 4 (l % 4), and 16 more for odd k.
#pragma once
#include "../base/stored.h"

namespace fa {
namespace FA_ISA {

struct Int4Vector {
  static constexpr int kLanesOfBlock = 4, kSteps = 8;
  static constexpr int W = kLanes<float>, kBlocks = W / kLanesOfBlock;
  static constexpr int64_t kBytes = kBlocks * Int4Block::bytes;

  Words bytes;
  Vec<float> scale, minimum;

  // n blocks of a row. With SHARE 2 those of two rows, the second's from the middle on. The blocks
  // that are missing are not read, but zeros.
  template <int SHARE>
  static FA_INLINE Int4Vector of(const uint8_t* first, const uint8_t* second, int n) {
#if defined(__AVX512F__)
    const Words from = SHARE == 2 ? Words{0, 1, 2, 3, 5, 6, 7, 8, 16, 17, 18, 19, 21, 22, 23, 24}
                                  : Words{0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 28, 29, 30};
    const Words factors_from = SHARE == 2
                                   ? Words{4, 4, 4, 4, 9, 9, 9, 9, 20, 20, 20, 20, 25, 25, 25, 25}
                                   : Words{4, 4, 4, 4, 9, 9, 9, 9, 14, 14, 14, 14, 31, 31, 31, 31};
    const uint32_t words = (1u << 5 * n) - 1;
    const __m512i a = _mm512_maskz_loadu_epi32(__mmask16(words), first);
    const __m512i b = SHARE == 2 ? _mm512_maskz_loadu_epi32(__mmask16(words), second)
                                 : _mm512_maskz_loadu_epi32(__mmask16(words >> 4), first + 16);
    const Words factors = (Words)_mm512_permutex2var_epi32(a, (__m512i)factors_from, b);
    return with((Words)_mm512_permutex2var_epi32(a, (__m512i)from, b), factors);
#else
    static constexpr uint8_t kMissing[Int4Block::bytes] = {};
    Int4Block block[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const int of_row = b % (kBlocks / SHARE);
      const uint8_t* row = b < kBlocks / SHARE ? first : second;
      block[b].data = of_row < n ? row + of_row * Int4Block::bytes : kMissing;
    }
#if defined(__AVX2__)
    const auto sixteen = [&](int b) { return _mm_loadu_si128((const __m128i*)block[b].data); };
    const auto factors = [&](int b) {
      return _mm256_set1_epi32(int32_t(block[b].scale_and_minimum()));
    };
    return with((Words)_mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(0)), sixteen(1), 1),
                (Words)_mm256_blend_epi32(factors(0), factors(1), 0xF0));
#else
    Words bytes, factors;
    for (int b = 0; b < kBlocks; ++b) {
      std::memcpy(reinterpret_cast<char*>(&bytes) + 16 * b, block[b].data, 16);
      for (int l = 0; l < kLanesOfBlock; ++l)
        factors[b * kLanesOfBlock + l] = block[b].scale_and_minimum();
    }
    return with(bytes, factors);
#endif
#endif
  }
  static FA_INLINE Int4Vector with(Words bytes, Words factors) {
    return {bytes, (Vec<float>)(factors << 16), (Vec<float>)(factors & 0xFFFF0000u)};
  }
  FA_INLINE Vec<float> numbers(int k) const {
#if defined(__AVX512F__)
    const Vec<float> n = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Vec<float>)_mm512_permutexvar_ps((__m512i)(bytes >> (4 * k)), (__m512)n);
#else
    return __builtin_convertvector((Vec<int32_t>)((bytes >> (4 * k)) & 15u), Vec<float>);
#endif
  }
};

// How a row's blocks are in vectors: several vectors, or half a vector.
struct Int4Layout {
  using V = Int4Vector;
  int blocks;
  explicit Int4Layout(int64_t columns) : blocks(int(columns / Int4Block::columns)) {}
  FA_INLINE bool shared() const { return 2 * blocks <= V::kBlocks; }
  FA_INLINE int vectors() const { return (blocks + V::kBlocks - 1) / V::kBlocks; }
  // Calls f(vector, the blocks of a row that it has).
  template <class F>
  FA_INLINE void each_vector(F f) const {
    int v = 0;
    for (; (v + 1) * V::kBlocks <= blocks; ++v) f(v, V::kBlocks);
    if (v * V::kBlocks < blocks) f(v, blocks - v * V::kBlocks);
  }
  // Calls f(place of a lane in [vectors][kSteps][W], its column) for all columns; twice for each if
  // two rows share a vector.
  template <class F>
  FA_INLINE void each_lane(F f) const {
    for (int copy = 0; copy < (shared() ? 2 : 1); ++copy)
      for (int b = 0; b < blocks; ++b) {
        const int at = b + copy * V::kBlocks / 2, of_vector = at % V::kBlocks;
        const int64_t to = at / V::kBlocks * V::kSteps * V::W + of_vector * V::kLanesOfBlock;
        for (int k = 0; k < V::kSteps; ++k)
          for (int l = 0; l < V::kLanesOfBlock; ++l)
            f(to + k * V::W + l, b * Int4Block::columns + k / 2 + k % 2 * 16 + 4 * l);
      }
  }
};

}  // namespace FA_ISA
}  // namespace fa
