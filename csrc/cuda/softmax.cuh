// The online softmax of a warp's 16 rows over tiles of keys, which forward and decode share.
#pragma once
#include <float.h>

#include "fragment.cuh"

namespace fa {

// The running maximum of two rows, as a level, and the sum of their weights relative to it, over
// this lane's columns alone.
struct Softmax {
  float level[2], sum[2];
};

// A lane's scores of one of its rows (half 0 or 1) become weights exp(s - level). Returns the factor
// of earlier sums of the row; the caller applies it to the row's values.
template <bool general, int n>
FA_DEVICE float update_row(Softmax& state, float (&s)[n][4], int half, float to_log2) {
  float max = s[0][2 * half];
#pragma unroll
  for (int j = 0; j < n; ++j) max = fmaxf(max, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
  // Levels are rounded alike: where the maximum stays, nothing is rescaled.
  float top = level_of<general>(max, to_log2);
  top = fmaxf(top, ptx::shuffle_xor(top, 1));
  top = fmaxf(top, ptx::shuffle_xor(top, 2));
  const float before = state.level[half];
  state.level[half] = fmaxf(before, top);
  // A row that has seen nothing: -inf - -inf would be NaN.
  const float level = fmaxf(state.level[half], -FLT_MAX);
  const float decay = rescale<general>(before, level);
  float sum = state.sum[half] * decay;
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      s[j][e] = exponential<general>(s[j][e], level, to_log2);
      sum += s[j][e];
    }
  state.sum[half] = sum;
  return decay;
}

template <bool general, int n>
FA_DEVICE void update(Softmax& state, float (&s)[n][4], float (&decay)[2], float to_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) decay[half] = update_row<general>(state, s, half, to_log2);
}

// Multiplies the rows of x by these factors.
template <int n>
FA_DEVICE void scale_rows(float (&x)[n][4], const float (&factor)[2]) {
  each_of(x, [&](int k, int e) { x[k][e] *= factor[e / 2]; });
}

// The same for values in registers. Each row's are rescaled at once: fewer factors are live.
template <bool general, int n, int columns>
FA_DEVICE void update(Softmax& state, float (&s)[n][4], float (&out)[columns][4], float to_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float decay = update_row<general>(state, s, half, to_log2);
#pragma unroll
    for (int d = 0; d < columns; ++d) {
      out[d][2 * half] *= decay;
      out[d][2 * half + 1] *= decay;
    }
  }
}

// A sink is one more logit, without a value. It is added to the level and the sum of a row's
// weights after all keys, outside of every loop. Returns the factor for the row's values.
template <bool general>
FA_DEVICE float count_sink(const FaParams& p, int64_t b, int64_t h, float& level, float& sum) {
  if (!p.sinks.data) return 1;
  const float sink = read(p.sinks, b * p.sinks.stride[0] + h * p.sinks.stride[1]);
  const float top = fmaxf(level, level_of<general>(sink, kLog2e));
  const float finite = top == -INFINITY ? 0.0f : top;
  const float decay = rescale<general>(level, finite);
  sum = sum * decay + exponential<general>(sink, finite, kLog2e);
  level = top;
  return decay;
}

}  // namespace fa
