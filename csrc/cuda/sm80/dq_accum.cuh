// The accumulation of dQ in the kernel where keys stay (backward.cuh). ds goes through shared
// memory, so that each warp sums over all keys of its block, for a part of a tile's rows and
// columns. The blocks of a head add their sums in turn (semaphore.cuh), in float32, in the
// workspace. A later kernel rounds them to dq.
//
// The last keys have the first turn. With a causal band, or a window, a block begins with rows that
// see no later keys, and then reaches rows that the block of the next keys has just left: no block
// waits. If rows see all keys, each block begins one tile after the one before.
#pragma once
#include "../launch.h"
#include "block_sparsity.cuh"
#include "score_gradient.cuh"
#include "semaphore.cuh"

namespace fa {
namespace sm80 {

// How the warps of a block share a passing tile, and where a warp's part of the sums of a query
// head is stored: in the order of lanes, so that each loads and stores 16 bytes.
template <class B>
struct QuerySums {
  static constexpr int kAcross = B::kPassing <= 32 && B::kD % 64 == 0 ? 4 : 2;
  static constexpr int kStrips = B::kPassing / 16 * kAcross / B::kWarps;
  static constexpr int kColumns = B::kD / kAcross;
  using Scores = Tile<B::kStaying, B::kPassing>;  // ds, transposed
  using Sums = Strips<kStrips, kColumns>;

  // The sums of this lane and the turn of its warp for the first tile of all; the head's first row.
  float4* sums;
  uint32_t* turn;
  unsigned row;  // 32 bits suffice: a row has kD floats of workspace

  static FA_DEVICE int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static FA_DEVICE int strip() { return warp() / kAcross * kStrips; }
  static FA_DEVICE int column() { return warp() % kAcross * kColumns; }

  FA_DEVICE QuerySums(const Item& p, float* workspace, int64_t b, int64_t h) {
    row = static_cast<unsigned>(item_begins(p, b, h));
    turn = Turns(workspace).of(0, warp());
    float* const all = workspace + state_words(p);
    sums = reinterpret_cast<float4*>(all + warp() * kStrips * 16 * kColumns) + threadIdx.x % 32;
  }

  FA_DEVICE void next_head(const FaParams& p) { row += static_cast<unsigned>(rows_of_head(p)); }

  // sum += ds K
  static FA_DEVICE void multiply(Sums& sum, uint32_t scores, uint32_t keys) {
    static_assert(kColumns % 16 == 0 && B::kPassing >= kRowsATurn * B::kWarps, "no such tile");
    uint32_t left[kStrips][B::kStaying / 16][4];
#pragma unroll
    for (int x = 0; x < kStrips; ++x)
#pragma unroll
      for (int j = 0; j < B::kStaying / 16; ++j)
        load_left_transposed<Scores>(left[x][j], scores, strip() + x, j);
    multiply_values<typename B::Type, typename B::Left1>(sum, left, keys, 0, column() / 16);
  }

  // visit(four of a lane's sums of the tile at row `first`, where they are stored) for all of them.
  template <class Visit>
  FA_DEVICE void each(Sums& sum, int first, Visit visit) const {
    const int64_t above = row + static_cast<unsigned>(first);
    float4* const from = sums + above * (B::kD / 4);
#pragma unroll
    for (int x = 0; x < kStrips; ++x)
#pragma unroll
      for (int k = 0; k < kColumns / 8; ++k) visit(sum[x][k], from[(x * kColumns / 8 + k) * 32]);
  }
  FA_DEVICE void add(Sums& sum, int first) const {
    each(sum, first, [](float (&x)[4], const float4& from) {
      const float4 y = from;
      x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
    });
  }

  // Adds the product of a tile's rows with this block's keys to the sums of the blocks up to
  // `before`. With `begins` this block starts the sums.
  FA_DEVICE void add_in_turn(uint32_t scores, uint32_t keys, int first, int block, int before,
                             bool begins) const {
    Sums sum = {};
    multiply(sum, scores, keys);
    uint32_t* const word = turn + (row + static_cast<unsigned>(first)) / kRowsATurn;
    if (!begins) {
      wait_for_turn(word, before);
      add(sum, first);
    }
    each(sum, first, [](float (&x)[4], float4& to) { to = {x[0], x[1], x[2], x[3]}; });
    pass_turn_on(word, block);
  }
};

// Stores a warp's ds into the tile that all warps read, from its columns 16 at on.
template <class Scores, int strips, int sixteens>
FA_DEVICE void put_scores(unsigned char* tile, const uint32_t (&ds)[strips][sixteens][4], int at) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = 16 * strips * warp + lane / 4;
  const uint32_t first[2] = {Scores::at(row, 0) + lane % 4 * 4, Scores::at(row, 1) + lane % 4 * 4};
#pragma unroll
  for (int x = 0; x < strips; ++x)
#pragma unroll
    for (int j = 0; j < sixteens; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t to =
            along<Scores>(first[k / 2], at + j, x) + k % 2 * 8 * Scores::kChunks * 16;
        *reinterpret_cast<uint32_t*>(tile + to) = ds[x][j][k];
      }
}

// A block for each tile. Rows that see no key have no sums.
template <class B>
__global__ void __launch_bounds__(B::kThreads)
    query_gradient_kernel(const FaParams batch, float* workspace) {
  const int64_t tiles = (batch.M + B::kPassing - 1) / B::kPassing;
  const int64_t h = blockIdx.x / tiles % batch.H, b = blockIdx.x / tiles / batch.H;
  const int first = static_cast<int>(blockIdx.x % tiles) * B::kPassing;
  const Item p(batch, b);
  if (first >= p.M) return;  // another item is longer
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const QuerySums<B> sums(p, workspace, b, h);
  typename QuerySums<B>::Sums sum = {};
  const KeyRange seen = key_range(p, b, first, least(first + B::kPassing, p.M));
  bool any = !seen.empty();
  if constexpr (B::kTiled) {
    const ShownTiles<B> tiles(batch, static_cast<int>(b), 0);
    int block = static_cast<int>(seen.lo) / B::kStaying;
    const int end = static_cast<int>(seen.hi + B::kStaying - 1) / B::kStaying;
    while (block < end && !tiles.visible_tile(h, block, first)) ++block;
    any = block < end;
  }
  if (any) sums.add(sum, first);
  store_gradient<typename B::Type>(p.dq, b, h, first + 16 * sums.strip() + lane / 4,
                                   sums.column() + 2 * (lane % 4), p.M, p.D, sum,
                                   static_cast<float>(p.scale));
}

template <class B>
int start_query_gradient(const FaParams& p, float* workspace, void* stream) {
  const int64_t blocks = (p.M + B::kPassing - 1) / B::kPassing * p.H * p.B;
  return launch_blocks("query_gradient_kernel", query_gradient_kernel<B>, blocks, B::kThreads, 0,
                       stream, p, workspace);
}

}  // namespace sm80
}  // namespace fa
