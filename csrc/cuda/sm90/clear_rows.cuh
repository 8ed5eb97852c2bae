// Zeros in the rows of a tile that are not of its item: behind the last key or row, in another
// sequence of a packed batch. They may be NaN, and weights of 0 would not hide that.
#pragma once
#include "ptx.cuh"
#include "tiles.h"

namespace fa {
namespace sm90 {

// Clears rows [first, rows) of a tile, which is stored in parts of 64 columns, a row of 128 bytes
// each. All consumers of `Tiles` call this.
template <class Tiles, int rows, int parts>
FA_DEVICE void clear_rows(unsigned char* tile, int first) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int chunks = (rows - first) * 8;
  for (int part = 0; part < parts; ++part)
    for (int i = thread; i < chunks; i += Tiles::kConsumers)
      reinterpret_cast<uint4*>(tile + (part * rows + first) * 128)[i] = {0, 0, 0, 0};
}

// Products that are asked for after this see the zeros of all consumers.
template <class Tiles>
FA_DEVICE void rows_are_cleared(int barrier) {
  ptx::async_proxy_fence("clear_rows: products see the zeros");
  ptx::barrier_sync("clear_rows: all have written zeros", barrier, Tiles::kConsumers);
}

}  // namespace sm90
}  // namespace fa
