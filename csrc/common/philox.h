// Dropout's random numbers: the generator's constants, and which elements are kept. Every native
// backend runs the rounds on its own vectors.
#pragma once
#include <stdint.h>

#include "host_device.h"

namespace fa {

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11): key = the seed, low word first; counter = (j >> 2, i, h, b); element
// (b, h, i, j) takes word j & 3 and is kept iff that word >= floor(p * 2^32).
struct Philox {
  static constexpr int rounds = 10;
  static constexpr uint32_t mul0 = 0xD2511F53u, mul1 = 0xCD9E8D57u;
  static constexpr uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
};

// The word h or b of the x-th head or item of a call: `first` is that of its first, and words
// repeat after a period, unless that is 0.
FA_SHARED uint32_t drawn(int64_t first, int64_t x, int64_t period) {
  if (period) x = static_cast<uint32_t>(x) % static_cast<uint32_t>(period);
  return static_cast<uint32_t>(first + x);
}

struct Dropout {
  uint32_t threshold;  // words below it are dropped
  double factor;       // what a kept element is multiplied by
};

FA_SHARED Dropout dropout_rule(double p) {
  // p = 1 drops all, though no 32-bit threshold can: the factor 0 does it.
  if (p >= 1.0) return {0xFFFFFFFFu, 0.0};
  return {static_cast<uint32_t>(p * 4294967296.0), 1.0 / (1.0 - p)};
}

}  // namespace fa
