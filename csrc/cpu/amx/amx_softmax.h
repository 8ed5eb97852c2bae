// The online softmax of the AMX kernels. Its probabilities become planes of bfloat16. The pivot,
// which is subtracted before exponentiation, moves only if an exponential would exceed 2^8. That is
// rare after a row's first keys, so earlier sums are seldom rescaled. Each lane decides alone: a
// row's result does not depend on the rows beside it.
#pragma once
#include "../base/exp_tanh.h"
#include "amx_operand.h"

namespace fa {
namespace FA_ISA {

template <int P, int NV>
struct AmxSoftmax {
  using T = Tile<float, NV>;
  using V = Vec<float>;
  static constexpr int64_t W = T::W, lanes = T::lanes;
  static constexpr float kLog2e = kLog2eHigh<float>, kRise = 8 / kLog2e;

  // e^x for x to about 2^8, 0 below 2^-100, NaN at NaN. With fewer than three planes P has too few
  // bits to show the rounding of x log2(e), or the error of a polynomial (2e-7, minimax on [0, 1)).
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

  // Moves the pivots m where these scores require it, and rescales l. Returns true if earlier sums
  // must be multiplied by `rescale`.
  static bool move(int64_t keys, const float* s, float factor, float* m, float* l, float* rescale) {
    const auto pivot = [&](int v) { return load(m + v * W); };
    V top[NV];
    largest(keys, s, top);
    __mmask16 up[NV], any = 0;
    for (int v = 0; v < NV; ++v) {
      top[v] = rounded_product(top[v], factor);
      up[v] = _mm512_cmp_ps_mask(top[v], pivot(v) + kRise, _CMP_GT_OQ);
      any |= up[v];
    }
    if (!any) return false;
    bool moved = false;
    for (int v = 0; v < NV; ++v) {
      const V old = pivot(v), now = _mm512_mask_mov_ps(old, up[v], top[v]);
      const __mmask16 summed = _mm512_cmp_ps_mask(old, splat(-kInf<float>), _CMP_NEQ_OQ) & up[v];
      const V change = _mm512_mask_mov_ps(splat(1.0f), summed, exp(V(old - now)));
      store(m + v * W, now);
      store(l + v * W, V(load(l + v * W) * change));
      store(rescale + v * W, change);
      moved |= summed != 0;
    }
    return moved;
  }
  // The maximum of each lane. A maximum takes four cycles; four independent ones overlap.
  static FA_INLINE void largest(int64_t keys, const float* s, V* top) {
    V of[4][NV];
    for (int i = 0; i < 4; ++i)
      for (int v = 0; v < NV; ++v) of[i][v] = splat(-kInf<float>);
    const auto take = [&](int64_t j, int i) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) of[i][v] = max_or_second(load(s + j * lanes + v * W), of[i][v]);
    };
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) take(j + i, i);
    for (; j < keys; ++j) take(j, 0);
    for (int v = 0; v < NV; ++v)
      top[v] = max_or_second(max_or_second(of[0][v], of[1][v]), max_or_second(of[2][v], of[3][v]));
  }

  // P = exp(score - m) of some keys, in pairs for the right side of a product: to[keys /
  // 2][planes][lanes], 0 past the last key; or, without `to`, in place of the scores. S has room
  // for whole steps. P is computed a little at a time, so that vectors work while tiles multiply
  // something else; `rest` completes it and adds its sum to l.
  class Probabilities {
   public:
    Probabilities() = default;  // of no keys
    Probabilities(int64_t keys, float* s, float factor, const float* m, float* l, Planes<P>* to)
        : s_(s),
          l_(l),
          pairs_(reinterpret_cast<int32_t*>(to)),
          factor_(factor),
          end_(round_up(keys, kStep) / 2) {
      for (int64_t at = keys * lanes; at < round_up(keys, kStep) * lanes; at += W)
        store(s + at, splat(-kInf<float>));
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        // A row that has seen nothing has 0 for its pivot: -inf - (-inf) is NaN.
        const V pivot = load(m + v * W);
        shift_[v] = pivot == -kInf<float> ? V{} : pivot;
        sum_[0][v] = sum_[1][v] = V{};
      }
    }
    // Computes one pair of keys, if one is left.
    FA_INLINE void some() {
      if (next_ < end_) make(next_++);
    }
    FA_INLINE void rest() {
      if (end_ == 0) return;
      Probabilities here = *this;  // a copy keeps its sums in registers
      while (here.next_ < here.end_) here.make(here.next_++);
      for (int v = 0; v < NV; ++v)
        store(l_ + v * W, V(load(l_ + v * W) + (here.sum_[0][v] + here.sum_[1][v])));
      end_ = 0;
    }

   private:
    // Keys i and 16 + i of a step are a pair.
    FA_INLINE void make(int64_t pair) {
      float* at = s_ + (pair / 16 * kStep + pair % 16) * lanes;
      int32_t* to = pairs_ + pair * P * lanes;
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v, at += W, to += W) {
        // A score is the same number here, in `move` and in gradients, however far from zero.
        const V first = power(V(rounded_product(load(at), factor_) - shift_[v]));
        const V second = power(V(rounded_product(load(at + 16 * lanes), factor_) - shift_[v]));
        sum_[0][v] += first;
        sum_[1][v] += second;
        if (!pairs_) {
          store(at, first);
          store(at + 16 * lanes, second);
        } else if constexpr (P == 1) {  // a NaN is in l as well, and makes the whole row NaN
          store(to, pair_up(upper_halves(first), upper_halves(second)));
        } else {
          each_plane<P, false>(first, second,
                               [&](int x, Vec<int32_t> y) { store(to + x * lanes, y); });
        }
      }
    }

    float *s_ = nullptr, *l_ = nullptr;
    int32_t* pairs_ = nullptr;
    float factor_ = 1;
    int64_t next_ = 0, end_ = 0;
    V shift_[NV], sum_[2][NV];
  };

  // The same at once, after dropout: `drop` is called with P in s.
  template <class Drop>
  static void probabilities_after(int64_t keys, float* s, float factor, const float* m, float* l,
                                  Planes<P>* to, Drop drop) {
    Probabilities(keys, s, factor, m, l, nullptr).rest();
    drop();
    Operand<Amx<P>>::template tile_across<NV>(s, keys, to);
  }
};

}  // namespace FA_ISA
}  // namespace fa
