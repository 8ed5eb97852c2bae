// The states of rows as the backward kernels of this folder read them, in the places of
// ../sm80/row_states.cuh.
#pragma once
#include "../sm80/bwd_preprocess.cuh"

namespace fa {
namespace sm90 {

// Plain kernels accumulate products onto minus the level, which is divided by the factor that makes
// products powers of two. What is left of the normaliser is added after that factor, in one FMA with
// it. So a level of infinity makes weights 0, whatever the finite product is.
template <int tile, bool general>
struct StateForm {
  static constexpr int kTile = tile;
  static FA_DEVICE sm80::RowState of(const FaParams& p, Normaliser from, float minus_delta) {
    if (general) return {from.level, from.rest, minus_delta};
    if (from.level == INFINITY) return {-INFINITY, 0.0f, minus_delta};
    const float to_log2 = static_cast<float>(p.scale) * kLog2e;
    const float level = from.level / to_log2;
    return {-level, fmaf(level, to_log2, -from.level) - from.rest, minus_delta};
  }
};

}  // namespace sm90
}  // namespace fa
