// What a lane holds of 16 rows of a tile, as ptx::multiply and ptx::Products make it: how it becomes
// the left side of a product, and how it is stored.
#pragma once
#include "softmax_lse.cuh"

namespace fa {

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

// Weights as the left sides of products, 16 columns each.
template <int n>
using LeftSides = uint32_t[n / 2][4];

template <class Type, int n>
FA_DEVICE void pack_weights(LeftSides<n>& to, const float (&weights)[n][4]) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) pack_left(Type(), to[j], weights[2 * j], weights[2 * j + 1]);
}

// Dropped weights become 0. The factor of the others is applied when their sums are stored.
template <int n>
FA_DEVICE void drop(float (&weights)[n][4], const Kept<n>& kept) {
  each_of(weights, [&](int k, int e) {
    if (!kept.at(k, e)) weights[k][e] = 0.0f;
  });
}

}  // namespace fa
