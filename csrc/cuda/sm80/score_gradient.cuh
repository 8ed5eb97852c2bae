// Computes the weights and ds of one tile from its products, in the registers of a warp. Every
// backward pass uses this.
#pragma once
#include <type_traits>

#include "../dropout.cuh"
#include "../mask.cuh"
#include "product.cuh"
#include "row_states.cuh"

namespace fa {
namespace sm80 {

// What a warp holds: the rows that stay, in strips of 16, by columns that pass.
template <int strips, int columns>
using Strips = Accumulator<columns>[strips];

// A warp's staying rows as the left side of a product: held in registers, or read for each. They
// begin `below` strips after the start of the tile.
template <class Tile, int strips, bool held, int below = 0>
struct Left {
  uint32_t tile;  // from the warp's rows on
  uint32_t a[held ? strips : 1][held ? Tile::kColumns / 16 : 1][4];

  FA_DEVICE Left(const unsigned char* memory, int warp)
      : tile(ptx::shared_address(memory + warp * strips * 32 * Tile::kColumns)) {}
  FA_DEVICE void load() {
    if constexpr (held)
#pragma unroll
      for (int strip = 0; strip < strips; ++strip)
#pragma unroll
        for (int d = 0; d < Tile::kColumns / 16; ++d)
          load_left<Tile>(a[strip][d], tile, below + strip, d);
  }
  FA_DEVICE void get(uint32_t (&to)[4], int strip, int d) const {
    if constexpr (held)
#pragma unroll
      for (int k = 0; k < 4; ++k) to[k] = a[strip][d][k];
    else
      load_left<Tile>(to, tile, below + strip, d);
  }
};

// s += L R^T, R the rows of a tile from 16 at on.
template <class Type, class Right, class Left, int strips, int n>
FA_DEVICE void product(float (&s)[strips][n][4], const Left& left, uint32_t right, int at) {
#pragma unroll
  for (int d = 0; d < Right::kColumns / 16; ++d) {
    uint32_t a[strips][4];
#pragma unroll
    for (int strip = 0; strip < strips; ++strip) left.get(a[strip], strip, d);
    add_products<Type, Right>(s, a, right, d, at);
  }
}

// out += x R, R the same rows. `a` receives x as left sides.
template <class Type, class Right, int strips, int n, int columns>
FA_DEVICE void accumulate(float (&out)[strips][columns][4], LeftSides<n> (&a)[strips],
                          const float (&x)[strips][n][4], uint32_t right, int at) {
#pragma unroll
  for (int strip = 0; strip < strips; ++strip) pack_weights<Type>(a[strip], x[strip]);
  multiply_values<Type, Right>(out, a, right, at);
}

// The staying and the passing index of a lane's first element.
struct Corner {
  int stays, passes;
};

// dp -= delta. passing(two, at): the states of two passing rows, a lane's first and the next, both
// `at` further on.
template <class B, int strips, int n, class Passing>
FA_DEVICE void subtract_deltas(float (&dp)[strips][n][4], const RowState (&staying)[strips][2],
                               Passing passing) {
#pragma unroll
  for (int k = 0; k < n; ++k) {
    RowState two[2] = {};
    if constexpr (B::kKeysStay) passing(two, 8 * k);
#pragma unroll
    for (int strip = 0; strip < strips; ++strip)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dp[strip][k][e] += (B::kKeysStay ? two[e % 2] : staying[strip][e / 2]).minus_delta;
  }
}

// For ds by the mask: the mask is added after softcap, so softcap's derivative does not apply.
template <int n>
struct MaskGradient : Gradient<n> {
  FA_DEVICE void multiply(int, int, float) const {}
};

// Logits become weights, and dp less delta becomes ds. In a whole tile all rows see all keys.
template <class B, bool whole, int strips, int n, class Passing>
FA_DEVICE void weigh(float (&s)[strips][n][4], float (&dp)[strips][n][4], float to_log2,
                     const Visible& visible, int rows, const RowState (&staying)[strips][2],
                     Passing passing, Corner corner) {
  Band band[strips][2] = {};
#pragma unroll
  for (int x = 0; x < (whole ? 0 : 2 * strips); ++x)
    band[x / 2][x % 2] = B::kKeysStay ? visible.rows_of(corner.stays + 8 * x, rows)
                                      : visible.keys_of(corner.stays + 8 * x, rows);
#pragma unroll
  for (int k = 0; k < n; ++k) {
    RowState two[2] = {};
    if constexpr (B::kKeysStay) passing(two, 8 * k);
#pragma unroll
    for (int strip = 0; strip < strips; ++strip)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowState& state = B::kKeysStay ? two[e % 2] : staying[strip][e / 2];
        float &x = s[strip][k][e], &y = dp[strip][k][e];
        if (!B::kGeneral && !B::kDeltaFirst) y += state.minus_delta;
        const float weight = probability<B::kGeneral>(x, {state.level, state.rest}, to_log2);
        const bool seen = whole || band[strip][e / 2].holds(corner.passes + 8 * k + e % 2);
        x = seen ? weight : 0.0f;
        y = seen ? weight * y : 0.0f;
      }
  }
}

// The whole step for one tile, or columns of one: from its products and dp to ds, and to weights
// after dropout, without its factor. `whole`: all rows see all keys. `read`: the mask is needed.
template <class B, int strips, int n, class Passing>
FA_DEVICE void differentiate(float (&s)[strips][n][4], float (&dp)[strips][n][4], const Head& head,
                             const Visible& visible, int rows, bool whole,
                             const RowState (&staying)[strips][2], Passing passing,
                             const MaskLines (&mask)[strips], const MaskPairs<n> (&pairs)[strips],
                             Corner corner, bool read = true) {
  const FaParams& p = head.p;
  Kept<n> kept[strips];
  if constexpr (B::kGeneral) {
    using Of = std::conditional_t<B::kMakesSums, Gradient<n>, MaskGradient<n>>;
    if (p.dropout_p > 0)
#pragma unroll
      for (int x = 0; x < strips; ++x) {
        kept[x] = draw<n>(Places<B::kKeysStay>{head, corner.stays + 16 * x, corner.passes});
        each_of(dp[x], [&](int k, int e) {
          dp[x][k][e] = kept[x].at(k, e) ? dp[x][k][e] * head.dropout_factor : 0.0f;
        });
      }
    subtract_deltas<B>(dp, staying, passing);
#pragma unroll
    for (int x = 0; x < strips; ++x)
      logits(s[x], Places<B::kKeysStay>{head, corner.stays + 16 * x, corner.passes}, mask[x],
             pairs[x], Of{dp[x]}, read);
  }
  const float to_log2 = B::kGeneral ? kLog2e : head.scale * kLog2e;
  if (whole)
    weigh<B, true>(s, dp, to_log2, visible, rows, staying, passing, corner);
  else
    weigh<B, false>(s, dp, to_log2, visible, rows, staying, passing, corner);
  if (B::kGeneral && B::kSecond && p.dropout_p > 0)
#pragma unroll
    for (int x = 0; x < strips; ++x) drop(s[x], kept[x]);
}

// dp of a tile, if it is an input: a head's own, or its share of the mean's.
template <class B, int strips, int n>
FA_DEVICE void read_given(float (&dp)[strips][n][4], const FaParams& p, int64_t b, int64_t h,
                          Corner corner) {
  const int64_t* stride = p.dweights.stride;
  const auto* data = static_cast<const uint16_t*>(p.dweights.data) + b * stride[0] + h * stride[1];
  const float share = p.average_heads ? 1.0f / static_cast<float>(p.H) : 1.0f;
#pragma unroll
  for (int strip = 0; strip < strips; ++strip)
#pragma unroll
    for (int k = 0; k < n; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int stays = corner.stays + 16 * strip + e / 2 * 8;
        const int passes = corner.passes + 8 * k + e % 2;
        const int64_t i = B::kKeysStay ? passes : stays, j = B::kKeysStay ? stays : passes;
        if (i < p.M && j < p.N)
          dp[strip][k][e] =
              share * ptx::widen(typename B::Type(), data[i * stride[2] + j * stride[3]]);
      }
}

}  // namespace sm80
}  // namespace fa
