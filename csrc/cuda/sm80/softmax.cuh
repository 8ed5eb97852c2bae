// The online softmax of a warp's 16 rows over tiles of keys, which forward and decode share.
#pragma once
#include "product.cuh"

namespace fa {
namespace sm80 {

// The running maximum of two rows, and the sum of their weights relative to its level, over this
// lane's columns alone.
struct Softmax {
  float max[2], sum[2];
};

// A lane's scores of a tile become weights exp(s - level), and earlier sums are rescaled.
template <bool general, int n, int columns>
FA_DEVICE void update(Softmax& state, float (&s)[n][4], float (&out)[columns][4], float to_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = state.max[half];
#pragma unroll
    for (int j = 0; j < n; ++j) max = fmaxf(max, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    max = fmaxf(max, ptx::shuffle_xor(max, 1));
    max = fmaxf(max, ptx::shuffle_xor(max, 2));
    // A row that has seen nothing: -inf - -inf would be NaN.
    const float level = level_of<general>(max == -INFINITY ? 0.0f : max, to_log2);
    // Both are rounded alike: where the maximum stays, nothing is rescaled.
    const float decay = rescale<general>(level_of<general>(state.max[half], to_log2), level);
    float sum = state.sum[half] * decay;
#pragma unroll
    for (int j = 0; j < n; ++j)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[j][e] = exponential<general>(s[j][e], level, to_log2);
        sum += s[j][e];
      }
#pragma unroll
    for (int d = 0; d < columns; ++d) {
      out[d][2 * half] *= decay;
      out[d][2 * half + 1] *= decay;
    }
    state.max[half] = max;
    state.sum[half] = sum;
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

}  // namespace sm80
}  // namespace fa
