// Dropout's draws, a lane's part of a tile at a time. Philox draws for four keys of a row at once
// (philox.h), which are in several lanes: each lane draws for one row, and they exchange bits.
#pragma once
#include "score.cuh"

namespace fa {

// Which of a lane's weights in a tile dropout keeps: bit 4 k + e for each.
template <int n>
struct Kept {
  uint32_t bits[(n + 7) / 8];
  FA_DEVICE bool at(int k, int e) const { return bits[k / 8] >> (4 * (k % 8) + e) & 1; }
};

// This lane and (this ^ flip) exchange bits that are `apart` from each other: the upper ones of the
// lower lane and the lower ones of the upper.
FA_DEVICE uint32_t exchange_bits(uint32_t bits, int flip, int apart) {
  const bool upper = threadIdx.x & static_cast<unsigned>(flip);
  const uint32_t low = apart == 1 ? 0x55555555u : 0x33333333u, own = upper ? ~low : low;
  const uint32_t other = ptx::shuffle_xor(bits & ~own, flip);
  return (bits & own) | (upper ? other >> apart : other << apart);
}

// The four words of row i for the four keys from 4 * four on, counted in the larger call; h is its
// head there.
FA_DEVICE void draw_four(uint32_t (&words)[4], const Head& head, int64_t four, int64_t i,
                         uint32_t h) {
  const FaParams& p = head.p;
  words[0] = static_cast<uint32_t>(four);
  words[1] = static_cast<uint32_t>(p.at_row + i);
  words[2] = h;
  words[3] = head.drawn_b;
  philox(words, head.seed);
}

// Draws for each weight by itself: where the keys of a draw are not adjacent in a tile.
template <int n, class Places>
FA_DEVICE Kept<n> draw_each(const Places& at) {
  const Head& head = at.head(0);
  Kept<n> kept = {};
#pragma unroll
  for (int e = 0; e < 4; ++e)
#pragma unroll
    for (int first = 0; first < n; first += 8)
#pragma unroll 1
      for (int k = first; k < n && k < first + 8; ++k) {
        const int64_t j = head.p.at_key + at.j(k, e);
        uint32_t words[4];
        draw_four(words, head, j / 4, at.i(k, e), at.drawn_h(e));
        const uint32_t low = j & 1 ? words[1] : words[0], high = j & 1 ? words[3] : words[2];
        if ((j & 2 ? high : low) >= head.dropout_threshold)
          kept.bits[first / 8] |= 1u << (4 * (k % 8) + e);
      }
  return kept;
}

// Neighbouring keys are in two lanes if rows stay, else in four lanes 4 apart. Each lane draws for
// the row of its element with the lane's own number among these lanes. The first lane's passing
// index begins at a multiple of 8.
template <int n, class Places>
FA_DEVICE Kept<n> draw(const Places& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int e = Places::kKeysStay ? lane / 4 % 4 : 2 * (lane % 2);
  const Head& head = at.head(0);  // seed and rate are those of all heads
  if (head.p.at_key % 4) return draw_each<n>(at);
  Kept<n> kept = {};
#pragma unroll
  for (int k = 0; k < n; ++k) {
    uint32_t words[4];
    draw_four(words, head, head.p.at_key / 4 + at.j(k, e) / 4, at.i(k, e), at.drawn_h(e));
#pragma unroll
    for (int word = 0; word < 4; ++word)
      if (words[word] >= head.dropout_threshold) kept.bits[k / 8] |= 1u << (4 * (k % 8) + word);
  }
#pragma unroll
  for (uint32_t& bits : kept.bits) {
    if (Places::kKeysStay)
      bits = exchange_bits(exchange_bits(bits, 4, 1), 8, 2);
    else
      bits = exchange_bits(bits, 1, 2);
  }
  return kept;
}

}  // namespace fa
