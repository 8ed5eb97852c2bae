// The online softmax for probabilities that become planes of bfloat16. The pivot that exponentials
// are measured from moves only where one would exceed 2^8, which is rare after a row's first keys:
// sums made under the old one are seldom touched. Each lane decides alone, so what a row gets does
// not depend on the rows beside it.
#pragma once
#include "amx_operand.h"

namespace fa {
namespace FA_ISA {

template <int P, int NV>
struct AmxSoftmax {
  using T = Tile<float, NV>;
  using V = Vec<float>;
  static constexpr int64_t W = T::W, lanes = T::lanes;
  static constexpr float kLog2e = kLog2eHigh<float>, kRise = 8 / kLog2e;

  // e^x for x to about 2^8, 0 below 2^-100, NaN at NaN. P of fewer than three planes has not the
  // bits to tell the rounding of x log2(e), and a polynomial within 2e-7 (minimax on [0, 1)), from
  // better.
  static FA_INLINE V power(V of_e) {
    if (P == 3) return exp(of_e);
    const V x = of_e * kLog2e;
    const __mmask16 counts = _mm512_cmp_ps_mask(x, splat(-100.0f), _CMP_NLT_UQ);
    const V r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    V p = r * 0.001877576675f + 0.008989340091f;
    p = p * r + 0.05582631805f;
    p = p * r + 0.240153617f;
    p = p * r + 0.6931530732f;
    p = p * r + 0.9999999251f;
    return _mm512_maskz_scalef_ps(counts, p, x);
  }

  // Moves the pivots m where these scores ask for it, and l with them. True if sums made before are
  // to be multiplied by `rescale`.
  static bool move(int64_t keys, const float* s, float factor, float* m, float* l,
                   float* rescale) {
    V top[NV];
    for (int v = 0; v < NV; ++v) top[v] = splat(-kInf<float>);
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) top[v] = max_or_second(load(s + j * lanes + v * W), top[v]);
    bool moved = false;
    for (int v = 0; v < NV; ++v) {
      const V old = load(m + v * W), best = rounded_product(top[v], factor);
      const __mmask16 up = _mm512_cmp_ps_mask(best, old + kRise, _CMP_GT_OQ);
      const __mmask16 summed = _mm512_cmp_ps_mask(old, splat(-kInf<float>), _CMP_NEQ_OQ) & up;
      const V now = _mm512_mask_mov_ps(old, up, best);
      const V change = _mm512_mask_mov_ps(splat(1.0f), summed, exp(V(old - now)));
      store(m + v * W, now);
      store(l + v * W, V(load(l + v * W) * change));
      store(rescale + v * W, change);
      moved |= summed != 0;
    }
    return moved;
  }

  // P = exp(score - m), and l grows by its sum. Calls out(step, pair, vector, two of them): of keys
  // `pair` and 16 + `pair` of a step; 0 past the last key, for which S must have room.
  template <class Out>
  static FA_INLINE void exponentials(int64_t keys, float* s, float factor, const float* m,
                                     float* l, Out out) {
    for (int64_t at = keys * lanes; at < round_up(keys, kStep) * lanes; at += W)
      store(s + at, splat(-kInf<float>));
    V shift[NV], sum[2][NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      // A row that has seen nothing has 0 for its pivot: -inf - (-inf) is NaN.
      const V pivot = load(m + v * W);
      shift[v] = pivot == -kInf<float> ? V{} : pivot;
      sum[0][v] = sum[1][v] = V{};
    }
    const auto all = [&](auto exponent) {
      for (int64_t j = 0; j < keys; j += kStep)
        for (int i = 0; i < 16; ++i) {
          const float* at = s + (j + i) * lanes;
#pragma GCC unroll 2
          for (int v = 0; v < NV; ++v, at += W) {
            const V first = power(exponent(load(at), v));
            const V second = power(exponent(load(at + 16 * lanes), v));
            sum[0][v] += first;
            sum[1][v] += second;
            out(j, i, v, first, second);
          }
        }
    };
    // A score is the same number here, in `move` and in gradients, however far from zero.
    if (factor != 1)
      all([&](V x, int v) -> V { return rounded_product(x, factor) - shift[v]; });
    else
      all([&](V x, int v) -> V { return x - shift[v]; });
    for (int v = 0; v < NV; ++v) store(l + v * W, V(load(l + v * W) + (sum[0][v] + sum[1][v])));
  }

  // P in pairs of keys for the right side of a product: to[keys / 2][planes][lanes]. `drop` is
  // called with P in s, where there is dropout.
  template <class Drop>
  static FA_INLINE void probabilities(int64_t keys, float* s, float factor, const float* m,
                                      float* l, bool dropout, Planes<P>* to, Drop drop) {
    int32_t* pairs = reinterpret_cast<int32_t*>(to);
    if (!dropout)
      return exponentials(keys, s, factor, m, l, [&](int64_t j, int i, int v, V a, V b) {
        int32_t* at = pairs + (j / 2 + i) * P * lanes + v * W;
        if constexpr (P == 1)  // a NaN is in l as well, and makes the whole row one
          store(at, pair_up(upper_halves(a), upper_halves(b)));
        else
          each_plane<P, false>(a, b, [&](int x, Vec<int32_t> y) { store(at + x * lanes, y); });
      });
    exponentials(keys, s, factor, m, l, [&](int64_t j, int i, int v, V a, V b) {
      store(s + (j + i) * lanes + v * W, a);
      store(s + (j + 16 + i) * lanes + v * W, b);
    });
    drop();
    Operand<Amx<P>>::template tile_across<NV>(s, keys, to);
  }
};

}  // namespace FA_ISA
}  // namespace fa
