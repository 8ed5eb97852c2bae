// Which keys a row may see: a band, cut to the key lengths. And the key head of a query head. Every
// native backend shares this arithmetic; cpu/score/tile.h and cuda/score.cuh compute the scores.
#pragma once
#include "../abi.h"
#include "host_device.h"

namespace fa {

FA_SHARED int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FA_SHARED int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// All keys of the larger call that contains this one.
FA_SHARED int64_t all_keys(const FaParams& p) { return p.at_key + p.N + p.keys_after; }

// The key length of an item, clamped: on a GPU the values have not been checked.
FA_SHARED int64_t whole_length(const FaParams& p, int64_t b) {
  return p.lengths ? most(0, least(p.lengths[b], all_keys(p))) : all_keys(p);
}

// How many of this call's own keys are within that length.
FA_SHARED int64_t key_length(const FaParams& p, int64_t b) {
  return most(0, least(whole_length(p, b) - p.at_key, p.N));
}

// The position of row i among the keys is i + diagonal(p, b), from this call's first key.
FA_SHARED int64_t diagonal(const FaParams& p, int64_t b) {
  const int64_t shift = p.bottom_right ? whole_length(p, b) - (p.at_row + p.M + p.rows_after) : 0;
  return shift + p.at_row - p.at_key;
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

}  // namespace fa
