// Sums of products on Arm's vectors. FMLA multiplies a vector by one lane of another: so numbers of X
// are loaded as vectors, and need no instruction each to be broadcast.
#pragma once
#include "product.h"

namespace fa {
namespace FA_ISA {

template <int L>
FA_INLINE Vec<float> fma_lane(Vec<float> acc, Vec<float> x, Vec<float> y) {
  return (Vec<float>)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)y, (float32x4_t)x, L);
}
template <int L>
FA_INLINE Vec<double> fma_lane(Vec<double> acc, Vec<double> x, Vec<double> y) {
  return (Vec<double>)vfmaq_laneq_f64((float64x2_t)acc, (float64x2_t)y, (float64x2_t)x, L);
}

// For whole vectors of numbers of X; one by one for what is left.
template <class R>
struct RegisterSums<Plain<R>, Unit::along_k> {
  static constexpr int W = kLanes<R>;
  template <int L, int MR, int NV>
  static FA_INLINE void step(const Vec<R> (&x)[MR], const R* y, Vec<R> (&sums)[MR][NV]) {
    Vec<R> row[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) row[v] = load(y + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = fma_lane<L>(sums[r][v], x[r], row[v]);
  }
  template <int MR, int NV, int... L>
  static FA_INLINE void steps(const Vec<R> (&x)[MR], const R*& y, int64_t ldy,
                              Vec<R> (&sums)[MR][NV], std::integer_sequence<int, L...>) {
    ((step<L>(x, y, sums), y += ldy), ...);
  }
  template <int MR, int NV>
  static FA_INLINE void find(Broadcast<R> x, const R* y, int64_t ldy, int64_t n,
                             Vec<R> (&sums)[MR][NV]) {
    clear<R>(sums);
    int64_t k = 0;
    for (; k + W <= n; k += W, x.data += W) {
      Vec<R> here[MR];
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) here[r] = load(x.data + r * x.stride);
      steps(here, y, ldy, sums, std::make_integer_sequence<int, W>{});
    }
    for (; k < n; ++k, ++x.data, y += ldy)
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          sums[r][v] = Plain<R>::fma(sums[r][v], x.data + r * x.stride, load(y + v * W));
  }
};
template <class R>
struct RegisterSums<Plain<R>, Unit::along_r> {
  static constexpr int W = kLanes<R>;
  template <int MR, int NV, int... L>
  static FA_INLINE void rows(Vec<R> x, const Vec<R> (&row)[NV], int r0, Vec<R> (&sums)[MR][NV],
                             std::integer_sequence<int, L...>) {
    const auto one = [&](auto lane) {
      constexpr int l = decltype(lane)::value;
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r0 + l][v] = fma_lane<l>(sums[r0 + l][v], x, row[v]);
    };
    (one(std::integral_constant<int, L>{}), ...);
  }
  template <int MR, int NV>
  static FA_INLINE void find(Broadcast<R> x, const R* y, int64_t ldy, int64_t n,
                             Vec<R> (&sums)[MR][NV]) {
    clear<R>(sums);
    constexpr int lanes = MR < W ? MR : W;
#pragma GCC unroll 4
    for (int64_t k = 0; k < n; ++k) {
      Vec<R> row[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) row[v] = load(y + k * ldy + v * W);
      const R* at = x.data + k * x.stride;
#pragma GCC unroll 4
      for (int r = 0; r < MR; r += lanes) {
        Vec<R> some{};
        std::memcpy(&some, at + r, lanes * sizeof(R));
        rows(some, row, r, sums, std::make_integer_sequence<int, lanes>{});
      }
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa
