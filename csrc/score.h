// Where a row may look, and which draws dropout makes: the arithmetic that every
// native backend shares. Scalar, host and device.
#pragma once
#include "abi.h"

#ifdef __CUDACC__
#define FA_SHARED __host__ __device__ inline
#else
// Always inlined: a copy of its own, shared by objects compiled for different
// instruction sets, could end up being the one that this machine cannot run.
#define FA_SHARED inline __attribute__((always_inline))
#endif

namespace fa {

FA_SHARED int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FA_SHARED int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Cut to what there is: on a GPU nobody has looked at the values.
FA_SHARED int64_t key_length(const FaParams& p, int64_t b) {
  return p.lengths ? most(0, least(p.lengths[b], p.N)) : p.N;
}

// Row i stands at i' = i + diagonal(p, b).
FA_SHARED int64_t diagonal(const FaParams& p, int64_t b) {
  return p.bottom_right ? key_length(p, b) - p.M : 0;
}

FA_SHARED int64_t key_head(const FaParams& p, int64_t h) { return h / (p.H / p.Hk); }

struct KeyRange {
  int64_t lo, hi;  // [lo, hi); [0, 0) when empty
  FA_SHARED bool empty() const { return lo >= hi; }
};

FA_SHARED KeyRange clip(int64_t lo, int64_t hi, int64_t length) {
  lo = most(lo, 0);
  hi = least(hi, length);
  return lo < hi ? KeyRange{lo, hi} : KeyRange{0, 0};
}

// Keys that at least one row of [i0, i1) sees; everything else is skipped.
FA_SHARED KeyRange key_range(const FaParams& p, int64_t b, int64_t i0, int64_t i1) {
  const int64_t shift = diagonal(p, b);
  return clip(i0 + shift - p.left, i1 - 1 + shift + p.right + 1, key_length(p, b));
}

// Keys that every row of [i0, i1) sees; inside it no band test is needed.
FA_SHARED KeyRange common_range(const FaParams& p, int64_t b, int64_t i0, int64_t i1) {
  const int64_t shift = diagonal(p, b);
  return clip(i1 - 1 + shift - p.left, i0 + shift + p.right + 1, key_length(p, b));
}

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11): key = the seed, low word first; counter = (j >> 2, i, h, b); element
// (b, h, i, j) takes word j & 3 and is kept iff that word >= floor(p * 2^32).
struct Philox {
  static constexpr int rounds = 10;
  static constexpr uint32_t mul0 = 0xD2511F53u, mul1 = 0xCD9E8D57u;
  static constexpr uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
};

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
