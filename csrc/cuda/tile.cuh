// Tiles of 16-bit elements in shared memory: where their chunks of 8 lie, and how they get there.
#pragma once
#include "ptx.cuh"

namespace fa {

// Rows of kColumns elements, a multiple of 32. Chunks of 16 bytes are swizzled, so that the eight
// rows that ldmatrix reads at one chunk lie in eight different groups of banks.
template <int rows, int columns>
struct Tile {
  static_assert(columns % 32 == 0, "a row of chunks must hold the swizzle");
  static constexpr int kRows = rows, kColumns = columns, kChunks = columns / 8;
  static constexpr int kBytes = rows * columns * 2;

  static FA_DEVICE uint32_t at(int row, int chunk) {
    const int flip = columns % 64 == 0 ? row & 7 : row >> 1 & 3;
    return static_cast<uint32_t>(row * kChunks + (chunk ^ flip)) * 16;
  }
};

// A matrix in global memory; what lies past its rows and columns reads as 0.
struct Matrix {
  const uint16_t* data;
  int64_t row_stride, column_stride;  // in elements
  int rows, columns;
  bool chunked;  // whole chunks of 8, each 16 bytes at a multiple of 16

  FA_DEVICE const uint16_t* row(int r) const { return data + r * row_stride; }
};

FA_DEVICE Matrix matrix_of(const FaTensor& x, int64_t b, int64_t h, int64_t rows, int64_t columns) {
  const auto* data = static_cast<const uint16_t*>(x.data) + b * x.stride[0] + h * x.stride[1];
  const bool chunked = x.stride[3] == 1 && columns % 8 == 0 && x.stride[2] % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {data, x.stride[2], x.stride[3], static_cast<int>(rows), static_cast<int>(columns),
          chunked};
}

// Rows from `first` on into a tile at `to` in shared memory, by all threads of the block: begun
// where chunks can be copied by themselves, done where they cannot. The caller commits and waits.
template <class Tile, int threads, class Rows>
FA_DEVICE void load_tile(unsigned char* to, const Rows& from, int first) {
  constexpr int chunks = Tile::kRows * Tile::kChunks;
  const uint32_t address = ptx::shared_address(to);
  const auto inside = [&](int row, int chunk) {
    return first + row < from.rows && 8 * chunk < from.columns;
  };
  const int thread = static_cast<int>(threadIdx.x % threads);  // tells the compiler its range
  if (from.chunked) {  // few instructions for each: where memory is the limit, so is their number
#pragma unroll 2
    for (int turn = 0; turn < (chunks + threads - 1) / threads; ++turn) {
      const int i = thread + turn * threads, row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      if (chunks % threads && i >= chunks) break;
      const uint16_t* source = from.row(first + row) + 8 * chunk;  // outside, it is not read
      ptx::copy16(address + Tile::at(row, chunk), source, inside(row, chunk));
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < chunks; i += threads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const uint16_t* source = inside(row, chunk) ? from.row(first + row) : from.data;
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int column = 8 * chunk + 2 * k;
      const bool low = inside(row, chunk) && column < from.columns;
      const bool high = inside(row, chunk) && column + 1 < from.columns;
      words[k] = (low ? source[column * from.column_stride] : 0u) |
                 (high ? source[(column + 1) * from.column_stride] : 0u) << 16;
    }
    *reinterpret_cast<uint4*>(to + Tile::at(row, chunk)) = {words[0], words[1], words[2], words[3]};
  }
}

// -- fragments, as ptx::multiply takes them -------------------------------------------------------

// a: rows 16 r to 16 r + 15, columns 16 k to 16 k + 15 of a tile.
template <class Tile>
FA_DEVICE void load_left(uint32_t (&a)[4], uint32_t tile, int r, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::load_matrices(a, tile + Tile::at(16 * r + lane % 16, 2 * k + lane / 16));
}

// b of two products whose right sides are rows 16 n to 16 n + 7, and the next 8, of a tile,
// columns 16 k on, transposed: {b[0], b[1]} and {b[2], b[3]}.
template <class Tile>
FA_DEVICE void load_right_transposed(uint32_t (&b)[4], uint32_t tile, int n, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::load_matrices(b, tile + Tile::at(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
}

// The same of right sides that are rows 16 k on, columns 16 n to 16 n + 7 and the next 8.
template <class Tile>
FA_DEVICE void load_right(uint32_t (&b)[4], uint32_t tile, int k, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::load_matrices_transposed(b, tile + Tile::at(16 * k + lane % 16, 2 * n + lane / 16));
}

}  // namespace fa
