// From scores to weights: what is subtracted from a score before exp, during a softmax (a level)
// and after it (the normaliser).
#pragma once
#include "dropout.cuh"
#include "mask.cuh"

namespace fa {

// x y, rounded: the compiler does not make it a part of an FMA.
FA_DEVICE float rounded_product(float x, float y) {
  FA_EMULATED_OR(return x * y;, return __fmul_rn(x, y);)
}

// The level that is subtracted from scores. General kernels keep it as a logit and subtract first:
// a mask of finfo.min is finite, and times log2(e) it would be infinite. In plain ones scores are
// the products, and the level is in powers of two, so that one FMA does.
template <bool general>
FA_DEVICE float level_of(float score, float to_log2) {
  return general ? score : rounded_product(score, to_log2);
}

// exp(score - level), where to_log2 makes scores powers of two.
template <bool general>
FA_DEVICE float exponential(float score, float level, float to_log2) {
  return ptx::exp2(general ? (score - level) * to_log2 : fmaf(score, to_log2, -level));
}

// The factor that takes sums from one level to another: exactly 1 if the two are equal.
template <bool general>
FA_DEVICE float rescale(float from, float to) {
  return ptx::exp2(general ? (from - to) * kLog2e : from - to);
}

// A row's normaliser as a level, and what its rounding cut off: both are subtracted from scores.
// For rows that see nothing or do not exist they are +inf and 0, which makes weights 0.
struct Normaliser {
  float level, rest;
};

template <bool general>
FA_DEVICE Normaliser normaliser_of(float lse, float tail) {
  if (lse == -INFINITY) return {INFINITY, 0.0f};
  if (general) return {lse, tail};
  const float level = rounded_product(lse, kLog2e);
  return {level, fmaf(lse, kLog2e, -level) + (lse * kLog2eRest + tail * kLog2e)};
}

// exp(score - normaliser).
template <bool general>
FA_DEVICE float probability(float score, Normaliser from, float to_log2) {
  return ptx::exp2(general ? ((score - from.level) - from.rest) * to_log2
                           : fmaf(score, to_log2, -from.level) - from.rest);
}

// The normalisers of the rows of one query head, in global memory.
struct Normalisers {
  float* lse;
  int64_t step, to_tail;

  FA_DEVICE Normalisers(const FaParams& p, int64_t b, int64_t h)
      : lse(static_cast<float*>(p.lse.data) + b * p.lse.stride[0] + h * p.lse.stride[1]),
        step(p.lse.stride[2]),
        to_tail(p.lse.stride[3]) {}

  template <bool general>
  FA_DEVICE Normaliser at(int64_t i) const {
    return normaliser_of<general>(lse[i * step], lse[i * step + to_tail]);
  }

  // Stores the LSE of a row with this sum of weights above this level, and the tail that its
  // rounding cuts off. With levels in powers of two, the tail is what the rounded LSE leaves of the
  // level. The FMA that rounds it is explicit: the compiler must not take the product apart again.
  template <bool general>
  FA_DEVICE void store(int64_t i, float level, float sum) const {
    const float log2_sum = ptx::log2(sum), log_sum = log2_sum * kLn2;
    const float natural = general ? level + log_sum : fmaf(level, kLn2, log_sum);
    const float lost =
        general ? (level - natural) + log_sum
                : (fmaf(-natural, kLog2e, level) - natural * kLog2eRest + log2_sum) * kLn2;
    const bool finite = sum != 0.0f && fabsf(natural) < INFINITY;
    lse[i * step] = sum == 0.0f ? -INFINITY : natural;
    lse[i * step + to_tail] = finite ? lost : 0.0f;
  }
};

}  // namespace fa
