// Dropout's draws, a lane's part of a tile at a time. Philox draws for four keys of a row at once
// (csrc/philox.h), and these lie in several lanes: each of them draws for one row, and they exchange.
#pragma once
#include "score.cuh"

namespace fa {

// Which of a lane's weights of a tile dropout keeps: a bit each, 4 k + e.
template <int n>
struct Kept {
  uint32_t bits[(n + 7) / 8];
  FA_DEVICE bool at(int k, int e) const { return bits[k / 8] >> (4 * (k % 8) + e) & 1; }
};

// Of this lane and (this ^ flip), bits that lie `apart` change places: the upper ones of the lower
// lane and the lower ones of the upper.
FA_DEVICE uint32_t exchange_bits(uint32_t bits, int flip, int apart) {
  const bool upper = threadIdx.x & static_cast<unsigned>(flip);
  const uint32_t low = apart == 1 ? 0x55555555u : 0x33333333u, own = upper ? ~low : low;
  const uint32_t other = ptx::shuffle_xor(bits & ~own, flip);
  return (bits & own) | (upper ? other >> apart : other << apart);
}

// Neighbouring keys are those of two lanes where rows stay, else of four lanes 4 apart. Each draws
// for the row of that one of its elements which has its own number among them. What passes begins,
// for the first lane, at a multiple of 8.
template <int n, class Places>
FA_DEVICE Kept<n> draw(const Places& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int e = Places::kKeysStay ? lane / 4 % 4 : 2 * (lane % 2);
  const Head& head = at.head(e);
  Kept<n> kept = {};
#pragma unroll
  for (int k = 0; k < n; ++k) {
    uint32_t words[4] = {static_cast<uint32_t>(at.j(k, e)) / 4, static_cast<uint32_t>(at.i(k, e)),
                         static_cast<uint32_t>(head.h), static_cast<uint32_t>(head.b)};
    philox(words, head.seed);
#pragma unroll
    for (int word = 0; word < 4; ++word)
      if (words[word] >= head.dropout_threshold) kept.bits[k / 8] |= 1u << (4 * (k % 8) + word);
  }
#pragma unroll
  for (uint32_t& bits : kept.bits) {
    if (Places::kKeysStay) bits = exchange_bits(exchange_bits(bits, 4, 1), 8, 2);
    else bits = exchange_bits(bits, 1, 2);
  }
  return kept;
}

}  // namespace fa
