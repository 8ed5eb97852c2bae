// The small kernels before the backward kernel of this folder: those of ../sm80/bwd_preprocess.cuh,
// with states of rows in the form that this one reads.
#pragma once
#include "../sm80/bwd_preprocess.cuh"
#include "ptx.cuh"

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

template <class Type, bool general, class Form>
__global__ void __launch_bounds__(sm80::kRowThreads)
    delta_kernel(const __grid_constant__ FaParams batch, float* workspace) {
  FA_BODY(sm80::put_states<Type, general, Form>(batch, workspace));
}

template <class Form>
__global__ void __launch_bounds__(sm80::kRowThreads)
    sink_gradient_kernel(const __grid_constant__ FaParams batch, float* workspace) {
  FA_BODY(sm80::put_sink_gradient<sm80::kRowThreads, Form>(batch, workspace));
}

}  // namespace sm90
}  // namespace fa
