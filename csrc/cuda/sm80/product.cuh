// What every pass over scores does with a warp's 16 rows in registers.
#pragma once
#include "../score.cuh"
#include "../tile.cuh"

namespace fa {
namespace sm80 {

// What a lane holds of a warp's 16 rows: of rows g and g + 8 columns 2 t and 2 t + 1 of every 8.
template <int columns>
using Accumulator = float[columns / 8][4];

// Adds a (16 rows, columns 16 d on) times these columns of every row of a tile.
template <class Type, class Tile>
FA_DEVICE void add_products(Accumulator<Tile::kRows>& s, const uint32_t (&a)[4], uint32_t tile,
                            int d) {
#pragma unroll
  for (int n = 0; n < Tile::kRows / 16; ++n) {
    uint32_t right[4];
    load_right_transposed<Tile>(right, tile, n, d);
    ptx::multiply(Type(), s[2 * n], a, right[0], right[1]);
    ptx::multiply(Type(), s[2 * n + 1], a, right[2], right[3]);
  }
}

// Two neighbouring 16 x 8 parts of an accumulator are what the left side of a product takes.
template <class Type>
FA_DEVICE void pack_left(Type type, uint32_t (&a)[4], const float (&low)[4],
                         const float (&high)[4]) {
  a[0] = ptx::pack(type, low[0], low[1]);
  a[1] = ptx::pack(type, low[2], low[3]);
  a[2] = ptx::pack(type, high[0], high[1]);
  a[3] = ptx::pack(type, high[2], high[3]);
}

template <class F>
FA_DEVICE void drop(Accumulator<F::kKeys>& weights, const Head& head, int row, int first) {
#pragma unroll
  for (int n = 0; n < F::kKeys / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 factor = head.dropped(row + 8 * half, first + 8 * n);
      weights[n][2 * half] *= factor.x;
      weights[n][2 * half + 1] *= factor.y;
    }
}

}  // namespace sm80
}  // namespace fa
