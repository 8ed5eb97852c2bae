// Products of a warp's 16 rows with a tile in shared memory.
#pragma once
#include "../fragment.cuh"
#include "../tile.cuh"

namespace fa {
namespace sm80 {

// s += a (16 rows, columns 16 d on) times these columns of the rows of a tile, those from 16 at on.
// With several `tiles` of 16 rows, what is read of the tile feeds the products of all.
template <class Type, class Tile, int tiles, int n>
FA_DEVICE void add_products(float (&s)[tiles][n][4], const uint32_t (&a)[tiles][4], uint32_t tile,
                            int d, int at = 0) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    uint32_t right[4];
    load_right_transposed<Tile>(right, tile, at + j, d);
#pragma unroll
    for (int r = 0; r < tiles; ++r) {
      ptx::multiply(Type(), s[r][2 * j], a[r], right[0], right[1]);
      ptx::multiply(Type(), s[r][2 * j + 1], a[r], right[2], right[3]);
    }
  }
}

// out += weights times the rows of a tile from 16 at on, in their columns from 16 column on.
template <class Type, class Tile, int tiles, int sixteens, int columns>
FA_DEVICE void multiply_values(float (&out)[tiles][columns][4],
                               const uint32_t (&weights)[tiles][sixteens][4], uint32_t tile,
                               int at = 0, int column = 0) {
#pragma unroll
  for (int j = 0; j < sixteens; ++j)
#pragma unroll
    for (int d = 0; d < columns / 2; ++d) {
      uint32_t right[4];
      load_right<Tile>(right, tile, at + j, column + d);
#pragma unroll
      for (int r = 0; r < tiles; ++r) {
        ptx::multiply(Type(), out[r][2 * d], weights[r][j], right[0], right[1]);
        ptx::multiply(Type(), out[r][2 * d + 1], weights[r][j], right[2], right[3]);
      }
    }
}

// x as an array of one.
template <class T>
FA_DEVICE T (&alone(T& x))[1] {
  return reinterpret_cast<T(&)[1]>(x);
}
template <class Type, class Tile, int n>
FA_DEVICE void add_products(float (&s)[n][4], const uint32_t (&a)[4], uint32_t tile, int d,
                            int at = 0) {
  add_products<Type, Tile>(alone(s), alone(a), tile, d, at);
}
template <class Type, class Tile, int n, int columns>
FA_DEVICE void multiply_values(float (&out)[columns][4], const float (&weights)[n][4],
                               uint32_t tile, int at = 0, int column = 0) {
  LeftSides<n> left;
  pack_weights<Type>(left, weights);
  multiply_values<Type, Tile>(alone(out), alone(left), tile, at, column);
}

}  // namespace sm80
}  // namespace fa
