// Products of a warp's 16 rows with a tile, and operations on them, all of it in registers.
#pragma once
#include "../softmax_lse.cuh"
#include "../tile.cuh"

namespace fa {
namespace sm80 {

// The part of 16 rows in lane 4 g + t: of rows g and g + 8 the columns 2 t and 2 t + 1 of every 8.
template <int columns>
using Accumulator = float[columns / 8][4];

// The sum over the four lanes that hold a row.
FA_DEVICE float row_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}

// A row in global memory, which is stored in pairs of neighbours from an even element on: as one
// word where its layout allows.
template <class Type>
struct OutputRow {
  uint16_t* data;
  int64_t step, width;  // in elements
  bool in_words;

  FA_DEVICE OutputRow(const FaTensor& x, int64_t b, int64_t h, int64_t i, int64_t width)
      : data(static_cast<uint16_t*>(x.data) + b * x.stride[0] + h * x.stride[1] + i * x.stride[2]),
        step(x.stride[3]),
        width(width),
        in_words(step == 1 && reinterpret_cast<uintptr_t>(data) % 4 == 0) {}

  // Elements j and j + 1, as far as they exist.
  FA_DEVICE void store(int64_t j, float low, float high) const {
    const uint32_t pair = ptx::pack(Type(), low, high);
    if (in_words && j + 1 < width) {
      *reinterpret_cast<uint32_t*>(data + j) = pair;
      return;
    }
    if (j < width) data[j * step] = static_cast<uint16_t>(pair);
    if (j + 1 < width) data[(j + 1) * step] = static_cast<uint16_t>(pair >> 16);
  }
};

template <class Type, int strips, int n>
FA_DEVICE void store_gradient(const FaTensor& to, int64_t b, int64_t h, int row, int column,
                              int64_t rows, int64_t width, float (&x)[strips][n][4], float factor) {
  if (!to.data) return;  // not wanted
#pragma unroll
  for (int strip = 0; strip < strips; ++strip)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = row + 16 * strip + 8 * half;
      if (i >= rows) continue;
      const OutputRow<Type> at(to, b, h, i, width);
#pragma unroll
      for (int k = 0; k < n; ++k)
        at.store(8 * k + column, x[strip][k][2 * half] * factor,
                 x[strip][k][2 * half + 1] * factor);
    }
}

// Two neighbouring 16 x 8 parts of an accumulator become the left side of a product.
template <class Type>
FA_DEVICE void pack_left(Type type, uint32_t (&a)[4], const float (&low)[4],
                         const float (&high)[4]) {
  a[0] = ptx::pack(type, low[0], low[1]);
  a[1] = ptx::pack(type, low[2], low[3]);
  a[2] = ptx::pack(type, high[0], high[1]);
  a[3] = ptx::pack(type, high[2], high[3]);
}

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

// Weights as the left sides of products, 16 columns each.
template <int n>
using LeftSides = uint32_t[n / 2][4];

template <class Type, int n>
FA_DEVICE void pack_weights(LeftSides<n>& to, const float (&weights)[n][4]) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) pack_left(Type(), to[j], weights[2 * j], weights[2 * j + 1]);
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

// Dropped weights become 0. The factor of the others is applied when their sums are stored.
template <int n>
FA_DEVICE void drop(float (&weights)[n][4], const Kept<n>& kept) {
  each_of(weights, [&](int k, int e) {
    if (!kept.at(k, e)) weights[k][e] = 0.0f;
  });
}

}  // namespace sm80
}  // namespace fa
