// Sums of products on Arm's vectors. FMLA multiplies a vector by one lane of another, on SVE by one
// lane of each 128 bits: so 128 bits of X are loaded at once, and need no instruction for each number
// to be broadcast.
#pragma once
#include "product.h"

namespace fa {
namespace FA_ISA {

// `load_quad` has 128 bits of X, on SVE repeated in both halves of a vector. `fma_lane` multiplies y
// by number L of them.
template <class R>
constexpr int kQuad = 16 / sizeof(R);
#if defined(FA_SVE256)
FA_INLINE Vec<float> load_quad(const float* x) { return svld1rq_f32(svptrue_b32(), x); }
FA_INLINE Vec<double> load_quad(const double* x) { return svld1rq_f64(svptrue_b64(), x); }
template <int L>
FA_INLINE Vec<float> fma_lane(Vec<float> acc, Vec<float> x, Vec<float> y) {
  return svmla_lane_f32(acc, y, x, L);
}
template <int L>
FA_INLINE Vec<double> fma_lane(Vec<double> acc, Vec<double> x, Vec<double> y) {
  return svmla_lane_f64(acc, y, x, L);
}
#else
template <class R>
FA_INLINE Vec<R> load_quad(const R* x) {
  return load(x);
}
template <int L>
FA_INLINE Vec<float> fma_lane(Vec<float> acc, Vec<float> x, Vec<float> y) {
  return (Vec<float>)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)y, (float32x4_t)x, L);
}
template <int L>
FA_INLINE Vec<double> fma_lane(Vec<double> acc, Vec<double> x, Vec<double> y) {
  return (Vec<double>)vfmaq_laneq_f64((float64x2_t)acc, (float64x2_t)y, (float64x2_t)x, L);
}
#endif
// The first N numbers, zeros after them.
template <int N, class R>
FA_INLINE Vec<R> load_quad_of(const R* x) {
  if constexpr (N == kQuad<R>) return load_quad(x);
  R some[kQuad<R>] = {};
  std::memcpy(some, x, N * sizeof(R));
  return load_quad(some);
}

// By 128 bits of X along k; one by one for what is left.
template <class R>
struct RegisterSums<Plain<R>, Unit::along_k> {
  template <int L, int MR, int NV>
  static FA_INLINE void step(const Vec<R> (&x)[MR], const R* y, Vec<R> (&sums)[MR][NV]) {
    Vec<R> row[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) row[v] = load(y + v * kLanes<R>);
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
    constexpr int quad = kQuad<R>;
    clear<R>(sums);
    int64_t k = 0;
    for (; k + quad <= n; k += quad, x.data += quad) {
      Vec<R> here[MR];
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) here[r] = load_quad(x.data + r * x.stride);
      steps(here, y, ldy, sums, std::make_integer_sequence<int, quad>{});
    }
    for (; k < n; ++k, ++x.data, y += ldy)
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          sums[r][v] = Plain<R>::fma(sums[r][v], x.data + r * x.stride, load(y + v * kLanes<R>));
  }
};
template <class R>
struct RegisterSums<Plain<R>, Unit::along_r> {
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
    constexpr int lanes = MR < kQuad<R> ? MR : kQuad<R>;
    clear<R>(sums);
#pragma GCC unroll 4
    for (int64_t k = 0; k < n; ++k) {
      Vec<R> row[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) row[v] = load(y + k * ldy + v * kLanes<R>);
      const R* at = x.data + k * x.stride;
#pragma GCC unroll 4
      for (int r = 0; r < MR; r += lanes)
        rows(load_quad_of<lanes>(at + r), row, r, sums, std::make_integer_sequence<int, lanes>{});
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa
