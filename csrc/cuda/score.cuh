// What happens to a score between q.k and the softmax, and which weights dropout keeps: the stages
// of csrc/score.h for one element, forward and backward.
#pragma once
#include "../score.h"
#include "ptx.cuh"

namespace fa {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// An element of any storage type as a number; a bool as what it adds to a score.
FA_DEVICE float read(const FaTensor& x, int64_t at) {
  switch (x.dtype) {
    case FA_F32:
      return static_cast<const float*>(x.data)[at];
    case FA_BF16:
      return ptx::widen(ptx::BF16(), static_cast<const uint16_t*>(x.data)[at]);
    case FA_F16:
      return ptx::widen(ptx::F16(), static_cast<const uint16_t*>(x.data)[at]);
    default:
      return static_cast<const uint8_t*>(x.data)[at] ? 0.0f : -INFINITY;
  }
}

// Four random words for the keys 4 k to 4 k + 3 (csrc/score.h: Philox).
FA_DEVICE void philox(uint32_t (&c)[4], uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < Philox::rounds; ++round) {
    const uint64_t x = static_cast<uint64_t>(Philox::mul0) * c[0];
    const uint64_t y = static_cast<uint64_t>(Philox::mul1) * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(y >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(y),
                              static_cast<uint32_t>(x >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(x)};
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k0 += Philox::weyl0;
    k1 += Philox::weyl1;
  }
}

// The keys that row i sees: [lo, hi), empty where lo >= hi.
struct Band {
  int lo, hi;
  FA_DEVICE bool holds(int j) const { return lo <= j && j < hi; }
};

FA_DEVICE Band band_of(const FaParams& p, int64_t b, int64_t i) {
  const KeyRange range = key_range(p, b, i, i + 1);
  return {static_cast<int>(range.lo), static_cast<int>(range.hi)};
}

// Everything of one head that scores depend on beside q.k.
struct Head {
  const FaParams& p;
  int64_t b, h, shift;
  float scale, softcap, slope, dropout_factor;
  uint32_t dropout_threshold;
  uint64_t seed;

  FA_DEVICE Head(const FaParams& p, int64_t b, int64_t h)
      : p(p), b(b), h(h), shift(diagonal(p, b)), scale(static_cast<float>(p.scale)),
        softcap(static_cast<float>(p.softcap)), slope(0), dropout_factor(1), dropout_threshold(0),
        seed(0) {
    if (p.slopes.data) slope = read(p.slopes, b * p.slopes.stride[0] + h * p.slopes.stride[1]);
    if (p.dropout_p > 0) {
      const Dropout rule = dropout_rule(p.dropout_p);
      dropout_threshold = rule.threshold;
      dropout_factor = static_cast<float>(rule.factor);
      seed = static_cast<uint64_t>(*p.seed);
    }
  }

  // The logit of row i and key j from their product, before the band.
  FA_DEVICE float logit(float qk, int64_t i, int64_t j) const {
    float s = qk * scale;
    if (softcap > 0) s = softcap * tanhf(s / softcap);
    if (p.slopes.data) {
      const int64_t distance = i + shift - j;
      s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    if (p.mask.data) {
      const int64_t* stride = p.mask.stride;
      s += read(p.mask, b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]);
    }
    return s;
  }

  // What dropout multiplies the weights of row i at keys j and j + 1 by; j is even.
  FA_DEVICE float2 dropped(int64_t i, int64_t j) const {
    uint32_t words[4] = {static_cast<uint32_t>(j >> 2), static_cast<uint32_t>(i),
                         static_cast<uint32_t>(h), static_cast<uint32_t>(b)};
    philox(words, seed);
    const bool second = j & 2;
    const uint32_t low = second ? words[2] : words[0], high = second ? words[3] : words[1];
    return {low < dropout_threshold ? 0.0f : dropout_factor,
            high < dropout_threshold ? 0.0f : dropout_factor};
  }
};

}  // namespace fa
