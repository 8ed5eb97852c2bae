// Tiles of 16-bit elements in shared memory: where their chunks of 8 are, and how they are loaded.
#pragma once
#include "../common/band.h"
#include "ptx.cuh"

namespace fa {

constexpr int kLeastShared = 99 << 10;  // bytes that a block may have on sm_86 and sm_89

// Rows of kColumns elements, a multiple of 32. Chunks of 16 bytes are swizzled, so that the eight
// rows that ldmatrix reads at one chunk are in eight different groups of banks.
template <int rows, int columns>
struct Tile {  // at a multiple of 128 bytes
  static_assert(columns % 32 == 0, "a row of chunks must hold the swizzle");
  static constexpr int kRows = rows, kColumns = columns, kChunks = columns / 8;
  static constexpr int kBytes = rows * columns * 2;
  static constexpr int kSwizzled = columns % 64 == 0 ? 8 : 4;  // chunks that are permuted

  static FA_DEVICE uint32_t at(int row, int chunk) {
    const int flip = kSwizzled == 8 ? row & 7 : row >> 1 & 3;
    return static_cast<uint32_t>(row * kChunks + (chunk ^ flip)) * 16;
  }
};

// A matrix in global memory; elements past its rows and columns read as 0.
struct Matrix {
  static constexpr bool kEven = true;  // rows are row_stride apart
  const uint16_t* data;
  int64_t row_stride, column_stride;  // in elements
  int rows, columns;
  int chunked;  // rows of whole chunks of 8, each 16 bytes at a multiple of 16: all, or none

  FA_DEVICE const uint16_t* row(int r) const { return data + r * row_stride; }
  // The matrix that begins so many elements further on.
  FA_DEVICE Matrix further(int64_t elements) const {
    return {data + elements, row_stride, column_stride, rows, columns, elements % 8 ? 0 : chunked};
  }
};

FA_DEVICE Matrix matrix_of(const FaTensor& x, int64_t b, int64_t h, int64_t rows, int64_t columns) {
  Matrix own = {static_cast<const uint16_t*>(x.data) + (b * x.stride[0] + h * x.stride[1]),
                x.stride[2],
                x.stride[3],
                static_cast<int>(rows),
                static_cast<int>(columns),
                0};
  const bool whole = own.column_stride == 1 && own.columns % 8 == 0 && own.row_stride % 8 == 0 &&
                     reinterpret_cast<uintptr_t>(own.data) % 16 == 0;
  own.chunked = whole ? own.rows : 0;
  return own;
}

// Keys or values of a head: an item's own, or in pages, in the order of the item's row of the
// table. They are read by tiles of so many rows, from `first` on: if each is in one page, that is
// found once.
struct KeyRows : Matrix {
  const FaParams& batch;
  const FaTensor& pages;
  int item;

  FA_DEVICE KeyRows(const Matrix& own, const FaParams& batch, const FaTensor& pages, int64_t b,
                    int first, int tile)
      : Matrix(own), batch(batch), pages(pages), item(static_cast<int>(b)) {
    if (batch.page && chunked && (batch.page % tile || first % tile)) chunked = -1;  // one by one
    if (batch.page && pages.stride[0] % 8) chunked = 0;  // pages begin within chunks
  }
  FA_DEVICE const uint16_t* row(int r) const {
    if (!batch.page) return Matrix::row(r);
    const int at = min(r, rows - 1), page = static_cast<int>(batch.page);
    const int64_t number = batch.pages[item * batch.blocks + at / page];
    return data + most(0, least(number, batch.P - 1)) * pages.stride[0] + at % page * row_stride;
  }
};

// A thread's part of a tile that `threads` load: each kLanes-th chunk of every kStep-th row. All of
// them are swizzled alike, so that their addresses differ by constants.
template <class Tile, int threads>
struct Share {
  static constexpr int kLanes = Tile::kSwizzled, kStep = threads / kLanes;
  static constexpr int kAcross = Tile::kChunks / kLanes;
  static constexpr int kChunks = (Tile::kRows + kStep - 1) / kStep * kAcross;
  static_assert(kStep % 8 == 0, "rows of a thread would be swizzled in several ways");
  static_assert(Tile::kRows % kStep == 0 || Tile::kRows < kStep, "some threads would have more");

  const int row, chunk;  // of the first
  FA_DEVICE Share()
      : row(static_cast<int>(threadIdx.x) % threads / kLanes),
        chunk(static_cast<int>(threadIdx.x) % threads % kLanes) {}
  FA_DEVICE bool any() const { return Tile::kRows >= kStep || row < Tile::kRows; }
  static FA_DEVICE int below(int i) { return i / kAcross * kStep; }   // rows, to the i-th chunk
  static FA_DEVICE int right(int i) { return i % kAcross * kLanes; }  // and chunks
  FA_DEVICE uint32_t at(int i) const {
    return Tile::at(row, chunk) + static_cast<uint32_t>(below(i) * Tile::kChunks + right(i)) * 16;
  }
};

// Loads rows from `first` on into a tile at `to` in shared memory, by all threads of the block:
// copies whole chunks asynchronously, single elements at once. The caller commits and waits.
template <class Tile, int threads, class Rows>
FA_DEVICE void load_tile(unsigned char* to, const Rows& from, int first) {
  using Mine = Share<Tile, threads>;
  const Mine mine;
  if (!mine.any()) return;
  const uint32_t address = ptx::shared_address(to);
  // A whole tile needs no checks of bounds.
  if (Rows::kEven && from.columns == Tile::kColumns && first + Tile::kRows <= from.chunked) {
    const uint16_t* source = from.row(first + mine.row) + 8 * mine.chunk;
#pragma unroll
    for (int i = 0; i < Mine::kChunks; ++i) {
      if (i > 0 && Mine::right(i) == 0) source += Mine::kStep * from.row_stride;
      ptx::copy16(address + mine.at(i), source + 8 * Mine::right(i));
    }
    return;
  }
  const auto inside = [&](int row, int chunk) {
    return first + row < from.rows && 8 * chunk < from.columns;
  };
  if (from.chunked) {
#pragma unroll 2
    for (int i = 0; i < Mine::kChunks; ++i) {
      const int row = mine.row + Mine::below(i), chunk = mine.chunk + Mine::right(i);
      const uint16_t* source = from.row(first + row) + 8 * chunk;  // outside, it is not read
      ptx::copy16(address + mine.at(i), source, inside(row, chunk));
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < Mine::kChunks; ++i) {
    const int row = mine.row + Mine::below(i), chunk = mine.chunk + Mine::right(i);
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
    *reinterpret_cast<uint4*>(to + mine.at(i)) = {words[0], words[1], words[2], words[3]};
  }
}

// -- fragments, as ptx::multiply takes them -------------------------------------------------------

// From a lane's first address in a tile to the one 2 k chunks and 16 r rows further on. Only
// neighbouring chunks are permuted: few addresses are computed, the others differ by constants.
template <class Tile>
FA_DEVICE uint32_t along(uint32_t first, int k, int r) {
  constexpr int pairs = Tile::kSwizzled / 2;
  return (first ^ static_cast<uint32_t>(k % pairs * 32)) +
         static_cast<uint32_t>(k / pairs * pairs * 32 + r * 16 * Tile::kChunks * 16);
}

// a: rows 16 r to 16 r + 15, columns 16 k to 16 k + 15 of a tile.
template <class Tile>
FA_DEVICE void load_left(uint32_t (&a)[4], uint32_t tile, int r, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::load_matrices(a, along<Tile>(tile + Tile::at(lane % 16, lane / 16), k, r));
}

// The same for a transposed tile: its rows from 16 k on, columns from 16 r on.
template <class Tile>
FA_DEVICE void load_left_transposed(uint32_t (&a)[4], uint32_t tile, int r, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t first = tile + Tile::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  ptx::load_matrices_transposed(a, along<Tile>(first, r, k));
}

// b of two products with right sides from rows 16 n to 16 n + 7, and the next 8, of a tile, columns
// 16 k on, transposed: {b[0], b[1]} and {b[2], b[3]}.
template <class Tile>
FA_DEVICE void load_right_transposed(uint32_t (&b)[4], uint32_t tile, int n, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t first = tile + Tile::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  ptx::load_matrices(b, along<Tile>(first, k, n));
}

// The same for right sides that are rows 16 k on, columns 16 n to 16 n + 7 and the next 8.
template <class Tile>
FA_DEVICE void load_right(uint32_t (&b)[4], uint32_t tile, int k, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::load_matrices_transposed(b, along<Tile>(tile + Tile::at(lane % 16, lane / 16), n, k));
}

}  // namespace fa
