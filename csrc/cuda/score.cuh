// The score pipeline of the CUDA kernels: the one place of them that implements features, forward
// and backward.
//
//   where   Visible, row_range, hide: which keys a row sees (csrc/common/band.h)
//   what    logits: scale, softcap, ALiBi, mask (mask.cuh), in this order
//   after   draw: dropout's (dropout.cuh)
//
// Each is a loop over all that a lane holds of a tile, behind one branch that all threads take
// alike: a feature that a call does not use costs a comparison for each tile.
#pragma once
#include "../common/band.h"
#include "../common/philox.h"
#include "ptx.cuh"
#include "seqlen_info.cuh"

namespace fa {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLog2eRest = static_cast<float>(1.4426950408889634 - static_cast<double>(kLog2e));

// An element of any storage type for numbers.
FA_DEVICE float read(const FaTensor& x, int64_t at) {
  switch (x.dtype) {
    case FA_F32:
      return static_cast<const float*>(x.data)[at];
    case FA_BF16:
      return ptx::widen(ptx::BF16(), static_cast<const uint16_t*>(x.data)[at]);
    default:
      return ptx::widen(ptx::F16(), static_cast<const uint16_t*>(x.data)[at]);
  }
}

// Four random words for the keys 4 k to 4 k + 3 (csrc/common/philox.h).
FA_DEVICE void philox(uint32_t (&c)[4], uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < Philox::rounds; ++round) {
    const uint64_t x = ptx::product(Philox::mul0, c[0]);
    const uint64_t y = ptx::product(Philox::mul1, c[2]);
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
  FA_DEVICE bool holds(int j0, int j1) const { return (lo <= j0) & (j1 <= hi); }  // all of them
};

// Which keys rows see, for the pairs of a tile: i + shift - left <= j <= i + shift + right, and j <
// length. Sizes fit an int, and band edges that no sequence reaches are clamped to fit one.
struct Visible {
  int shift, left, right, length;

  FA_DEVICE Visible(const FaParams& p, int64_t b)
      : shift(static_cast<int>(diagonal(p, b))),
        left(cut(p.left)),
        right(cut(p.right)),
        length(static_cast<int>(key_length(p, b))) {}
  static FA_DEVICE int cut(int64_t edge) {
    constexpr int64_t far = 1 << 30;
    return static_cast<int>(most(-far, least(edge, far)));
  }
  FA_DEVICE Band keys_of(int i) const {
    const int at = i + shift, end = at + right + 1;
    return {at - left, end < length ? end : length};
  }
  // The keys that row i sees, or the rows that see key j; there are `rows` rows.
  FA_DEVICE Band keys_of(int i, int rows) const {
    const Band all = keys_of(i);
    return {all.lo, i >= rows ? all.lo : all.hi};
  }
  FA_DEVICE Band rows_of(int j, int rows) const {
    const int at = j - shift, end = at + left + 1;
    return {at - right, j >= length ? at - right : end < rows ? end : rows};
  }
  // The keys that all rows of [i0, i1) see, and the rows that see all keys of [j0, j1).
  FA_DEVICE Band keys_of_all(int i0, int i1, int rows) const {
    const int lo = keys_of(i1 - 1).lo;
    return {lo, i1 > rows ? lo : keys_of(i0).hi};
  }
  FA_DEVICE Band rows_of_all(int j0, int j1, int rows) const {
    const int lo = rows_of(j1 - 1, rows).lo;
    return {lo, j1 > length ? lo : rows_of(j0, rows).hi};
  }
};

// The rows that see at least one key of [j0, j1).
FA_DEVICE KeyRange row_range(const FaParams& p, int64_t b, int64_t j0, int64_t j1) {
  const int64_t shift = diagonal(p, b), end = least(j1, key_length(p, b));
  if (j0 >= end) return {0, 0};
  return clip(j0 - p.right - shift, end - 1 + p.left - shift + 1, p.M);
}

// All that the scores of one head depend on besides q.k. p may be a packed batch, or an item of it:
// masks and slopes are by item, and a mask has room for the longest.
struct Head {
  const FaParams& p;
  int64_t b, h;
  int shift;
  float scale, softcap, slope, dropout_factor;
  uint32_t dropout_threshold, drawn_b, drawn_h;
  uint64_t seed;

  FA_DEVICE Head(const FaParams& p, int64_t b, int64_t h, int64_t shift)
      : p(p),
        b(b),
        h(h),
        shift(static_cast<int>(shift)),
        scale(static_cast<float>(p.scale)),
        softcap(static_cast<float>(p.softcap)),
        slope(0),
        dropout_factor(1),
        dropout_threshold(0),
        drawn_b(0),
        drawn_h(0),
        seed(0) {
    if (p.slopes.data) slope = read(p.slopes, b * p.slopes.stride[0] + h * p.slopes.stride[1]);
    if (p.dropout_p > 0) {
      const Dropout rule = dropout_rule(p.dropout_p);
      dropout_threshold = rule.threshold;
      dropout_factor = static_cast<float>(rule.factor);
      drawn_b = drawn(p.at_item, b, p.items_again);
      drawn_h = drawn(p.at_head, h, p.heads_again);
      seed = static_cast<uint64_t>(*p.seed);
    }
  }
};

// -- tiles ----------------------------------------------------------------------------------------
//
// A lane holds s[n][4] of a tile, as ptx::multiply makes it. Either rows stay at the left of the
// products and keys pass, or the other way about. Element e of the k-th group has a staying index,
// the lane's first or 8 further, and a passing one, 8 k from the lane's first or next to it.

template <bool keys_stay>
struct Places {
  static constexpr bool kKeysStay = keys_stay;
  const Head& one;
  int stays, passes;  // where s[0][0] is

  FA_DEVICE const Head& head(int) const { return one; }
  FA_DEVICE uint32_t drawn_h(int) const { return one.drawn_h; }
  FA_DEVICE int staying(int e) const { return stays + 8 * (e / 2); }
  FA_DEVICE int passing(int k, int e) const { return passes + 8 * k + e % 2; }
  FA_DEVICE int i(int k, int e) const { return keys_stay ? passing(k, e) : staying(e); }
  FA_DEVICE int j(int k, int e) const { return keys_stay ? staying(e) : passing(k, e); }
  // |i + shift - j| is |from + offset|, and offset is a constant.
  FA_DEVICE int from(int) const { return passes - stays + (keys_stay ? one.shift : -one.shift); }
  static FA_DEVICE int offset(int k, int e) { return 8 * k + e % 2 - 8 * (e / 2); }
};

// How gradients by the logits become gradients by the scaled products: none exist, in forward; or a
// tile of them.
struct NoGradient {
  FA_DEVICE void multiply(int, int, float) const {}
  FA_DEVICE void hide(int, int) const {}
};
template <int n>
struct Gradient {
  float (&dp)[n][4];
  FA_DEVICE void multiply(int k, int e, float derivative) const { dp[k][e] *= derivative; }
  FA_DEVICE void hide(int k, int e) const { dp[k][e] = 0.0f; }  // it may be NaN
};

template <int n, class Visit>
FA_DEVICE void each_of(const float (&)[n][4], Visit visit) {
#pragma unroll
  for (int k = 0; k < n; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) visit(k, e);
}

// tanh(x) from r = 1 / (1 + e^2x): 1 - 2 r, and near 0, where that cancels, the series to x^9.
FA_DEVICE float tanh_of(float x, float r) {
  const float z = x * x;
  const float series = fmaf(z, fmaf(z, fmaf(z, 62.0f / 2835, -17.0f / 315), 2.0f / 15), -1.0f / 3);
  return z < 0.0625f ? fmaf(x * z, series, x) : fmaf(-2.0f, r, 1.0f);
}

// Products become softcap tanh(scale product / softcap). Cancellation in 1 - 2 r costs softcap
// 2^-23 of a logit: nothing, unless the cap is far above the scores.
template <int n, class Gradient>
FA_DEVICE void cap(float (&s)[n][4], const Head& head, Gradient gradient) {
  constexpr float kWeak = 64.0f;
  const float inner = head.scale / head.softcap, to_log2 = 2 * kLog2e * inner;
  const auto fraction = [&](float x) { return ptx::reciprocal(1.0f + ptx::exp2(x * to_log2)); };
  if (head.softcap <= kWeak) {
    const float twice = -2.0f * head.softcap;
    each_of(s, [&](int k, int e) {
      const float r = fraction(s[k][e]);
      s[k][e] = fmaf(twice, r, head.softcap);
      gradient.multiply(k, e, 4.0f * fmaf(-r, r, r));
    });
  } else {
    each_of(s, [&](int k, int e) {
      const float t = tanh_of(s[k][e] * inner, fraction(s[k][e]));
      s[k][e] = head.softcap * t;
      gradient.multiply(k, e, fmaf(-t, t, 1.0f));
    });
  }
}

// Scores of keys that a row does not see become -inf.
template <int n, class Places, class Gradient>
FA_DEVICE void hide(float (&s)[n][4], const Places& at, const Visible& visible, int64_t rows,
                    Gradient gradient) {
  const int all = static_cast<int>(rows);
  each_of(s, [&](int k, int e) {
    if (visible.keys_of(at.i(k, e), all).holds(at.j(k, e))) return;
    s[k][e] = -INFINITY;
    gradient.hide(k, e);
  });
}

// Distances of a tile on one side of the diagonal have one sign: they need no absolute value, which
// no FMA takes. The rounding is another, and whether a row's tile is on one side depends on the other
// row of the lane: under row_invariant all tiles are alike.
template <int n, class Places>
FA_DEVICE void add_alibi(float (&s)[n][4], const Places& at, float unit) {
  const float from[2] = {static_cast<float>(at.from(0)), static_cast<float>(at.from(2))};
  const auto is_aside = [&](int e) { return at.from(e) >= 8 || at.from(e) <= -8 * n; };
  if (!at.head(0).p.row_invariant && is_aside(0) && is_aside(2)) {
    const auto slope = [&](int e) {
      return from[e / 2] > 0 ? -at.head(e).slope : at.head(e).slope;
    };
    const float first[2] = {slope(0) * from[0], slope(2) * from[1]};
    each_of(s, [&](int k, int e) {
      const float offset = static_cast<float>(Places::offset(k, e));
      s[k][e] = fmaf(s[k][e], unit, fmaf(slope(e), offset, first[e / 2]));
    });
    return;
  }
  each_of(s, [&](int k, int e) {
    const float distance = from[e / 2] + static_cast<float>(Places::offset(k, e));  // exact
    s[k][e] = fmaf(s[k][e], unit, -at.head(e).slope * fabsf(distance));
  });
}

}  // namespace fa
