// Tiles of csrc/cuda/tile.cuh, loaded and read as in the kernels, and other accesses to the banks
// of shared memory.
#include "cuda/launch.h"
#include "cuda/tile.cuh"

namespace fa {

// A warp reads all of a tile in each of the three ways.
template <class Tile>
__global__ void read_tile(const uint16_t* from, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  const Matrix all = {from, Tile::kColumns, 1, Tile::kRows, Tile::kColumns, Tile::kRows};
  load_tile<Tile, 128>(memory, all, 0);
  ptx::copies_commit("a tile");
  ptx::copies_wait<0>("it has landed");
  ptx::block_sync("all see it");
  const uint32_t tile = ptx::shared_address(memory);
  uint32_t any = 0;
  for (int r = 0; r < Tile::kRows / 16; ++r)
    for (int c = 0; c < Tile::kColumns / 16; ++c) {
      uint32_t a[4], b[4], d[4];
      load_left<Tile>(a, tile, r, c);
      load_right<Tile>(b, tile, r, c);
      load_right_transposed<Tile>(d, tile, r, c);
      for (int i = 0; i < 4; ++i) any ^= a[i] ^ b[i] ^ d[i];
    }
  out[threadIdx.x] = any;
}

// Words, pairs or chunks of 16 bytes, `step` of them apart, each stored and loaded.
template <class T>
__global__ void step_through(int step, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  auto* all = reinterpret_cast<T*>(memory);
  const T x = {};
  all[threadIdx.x * step] = x;
  const T y = all[threadIdx.x * step];
  uint32_t first;
  memcpy(&first, &y, 4);
  out[threadIdx.x] = first;
}

template <int columns>
int read_tile_of(const uint16_t* from, uint32_t* out) {
  using T = Tile<32, columns>;
  return launch("read_tile", read_tile<T>, dim3(1), dim3(128), T::kBytes, nullptr, from, out);
}

template <class T>
int step_through_with(int step, uint32_t* out) {
  return launch("step_through", step_through<T>, dim3(1), dim3(32), 32 * step * sizeof(T), nullptr,
                step, out);
}

}  // namespace fa

extern "C" int tile_of(int columns, const uint16_t* from, uint32_t* out) {
  switch (columns) {
    case 32: return fa::read_tile_of<32>(from, out);
    case 64: return fa::read_tile_of<64>(from, out);
    case 96: return fa::read_tile_of<96>(from, out);
    case 128: return fa::read_tile_of<128>(from, out);
    case 192: return fa::read_tile_of<192>(from, out);
    case 256: return fa::read_tile_of<256>(from, out);
  }
  return 1;
}

extern "C" int steps_of(int bytes, int step, uint32_t* out) {
  if (bytes == 4) return fa::step_through_with<uint32_t>(step, out);
  return fa::step_through_with<uint64_t>(step, out);
}
