// The accumulation of dQ in the backward pass (backward.cuh). A tile's sums are in shared memory in
// the order of threads, and bulk copies add them to those in the workspace, in float32. A
// deterministic call's blocks add in turn, as in ../sm80/dq_accum.cuh; those of others in any order,
// once the first one has stored its own. A later kernel rounds the sums to dq.
#pragma once
#include "backward_tiles.cuh"
#include "bwd_preprocess.cuh"

namespace fa {
namespace sm90 {

constexpr uint32_t kAnyBlock = ~0u;

// The sums of dq in the workspace: for each tile of a query head first one warpgroup's half, then
// the other's, four adjacent numbers of each thread at a time.
template <class B>
struct QueryHalf {
  float* sums;
  uint32_t* turn;
  unsigned row;  // the head's first; 32 bits suffice: a row has kD floats of workspace

  FA_DEVICE QueryHalf(const Item& p, float* workspace, int64_t b, int64_t h, int half)
      : sums(workspace + sm80::state_words(p, B::kRows) + half * B::kHalfBytes / 4),
        turn(sm80::Turns(workspace).of(0, half)),
        row(static_cast<unsigned>(sm80::item_begins(p, b, h, B::kRows))) {}
  FA_DEVICE void next_head(const FaParams& p) {
    row += static_cast<unsigned>(sm80::rows_of_head(p, B::kRows));
  }
  FA_DEVICE float* of(int tile) const {
    return sums + static_cast<int64_t>(row + static_cast<unsigned>(tile * B::kRows)) * B::kD;
  }
  FA_DEVICE uint32_t* turn_of(int tile) const {
    return turn + (row + static_cast<unsigned>(tile * B::kRows)) / sm80::kRowsATurn;
  }
};

// Adds one half of a block's dq to the sums of the blocks before it, tile by tile; one warp. The word
// of a tile says which block has added last, or, in any order, that there are sums.
template <class B>
FA_DEVICE void add_half(uint32_t from, const FaParams& batch, const Item& p,
                        const KeySchedule& schedule, const KeyTask& task, const RowTiles& tiles,
                        float* workspace, int half) {
  const bool leads = threadIdx.x % 32 == 0;
  const bool in_turn = schedule.in_turn;
  const FirstTiles first = FirstTiles::of<B::kRows>(p, task, tiles, schedule.reversed);
  const auto block = static_cast<uint32_t>(task.first_key / kBlockKeys);
  const uint32_t mine = in_turn ? block : kAnyBlock, before = in_turn ? block + 1 : kAnyBlock;
  QueryHalf<B> to(p, workspace, task.b, task.hk * schedule.group, half);
  const auto free = [half] {
    ptx::barrier_arrive("backward: the memory of dq is free", kHalfFree + half, kWarpgroup + 32);
  };
  free();
  for (int left = schedule.group; left > 0; --left, to.next_head(batch))
#pragma unroll 1
    for (int i = 0; i < tiles.count(); ++i) {
      const int tile = tiles.at<B>(i, schedule.reversed);
      const bool is_first = first.has(tile);
      ptx::barrier_sync("backward: dq is there", kHalfThere + half, kWarpgroup + 32);
      if (leads) {
        if (is_first) {
          ptx::store_bytes("backward: first sums of dq", to.of(tile), from, B::kHalfBytes);
        } else {
          ptx::wait_until("backward: the block before has added", to.turn_of(tile), before);
          ptx::async_proxy_fence_of_all("backward: bulk copies see its sums");
          ptx::add_bytes("backward: sums of dq", to.of(tile), from, B::kHalfBytes);
        }
        ptx::bulk_commit("backward: dq is on its way");
        ptx::bulk_wait_read<0>("backward: dq is read");
      }
      ptx::warp_sync("backward: all lanes know that dq is read");
      if (left > 1 || i + 1 < tiles.count()) free();  // the next dq is written meanwhile
      if (leads && (in_turn || is_first)) {
        ptx::bulk_wait<0>("backward: dq is added");
        ptx::async_proxy_fence_of_all("backward: the next block sees these sums");
        ptx::publish("backward: the next block's turn", to.turn_of(tile), mine);
      }
    }
}

// Rounds a tile's sums; a block. Rows that see no key have no sums.
template <class B>
FA_DEVICE void round_queries(const FaParams& batch, float* workspace) {
  constexpr int kWidth = B::kD + 4;  // of a row in shared memory
  FA_SHARED_MEMORY(shared);
  auto* const memory = reinterpret_cast<float*>(shared);
  const int64_t tiles = (batch.M + B::kRows - 1) / B::kRows;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int64_t h = blockIdx.x / tiles % batch.H, b = blockIdx.x / tiles / batch.H;
  const Item p(batch, b);
  const int first = tile * B::kRows, thread = static_cast<int>(threadIdx.x);
  if (first >= p.M) return;  // another item is longer
  if (!key_range(p, b, first, least(first + B::kRows, p.M)).empty()) {
    const int half = thread / kWarpgroup, own = thread % kWarpgroup, lane = own % 32;
    const QueryHalf<B> from(p, workspace, b, h, half);
    const auto* sums = reinterpret_cast<const float4*>(from.of(tile)) + own;
    const int column = own / 32 * 16 + lane / 4 + (B::kHalvesColumns ? half * 64 : 0);
    const int row = 2 * (lane % 4) + (B::kHalvesColumns ? 0 : half * B::kQueryRows);
#pragma unroll
    for (int j = 0; j < B::kQueryRows / 8; ++j) {
      const float4 x = sums[kWarpgroup * j];
      float* const to = memory + (row + 8 * j) * kWidth + column;
      to[0] = x.x, to[kWidth] = x.y, to[8] = x.z, to[kWidth + 8] = x.w;
    }
  } else {
    for (int i = thread; i < B::kRows * kWidth; i += B::kConsumers) memory[i] = 0.0f;
  }
  ptx::block_sync("dq: all sums are there");
  const auto scale = static_cast<float>(p.scale);
  for (int i = thread; i < B::kRows * B::kD / 2; i += B::kConsumers) {
    const int row = i / (B::kD / 2), column = i % (B::kD / 2) * 2;
    if (first + row >= p.M) continue;
    const auto two = *reinterpret_cast<const float2*>(memory + row * kWidth + column);
    OutputRow<typename B::Type>(p.dq, b, h, first + row, p.D)
        .store(column, two.x * scale, two.y * scale);
  }
}

template <class B>
__global__ void __launch_bounds__(B::kConsumers)
    query_gradient_kernel(const __grid_constant__ FaParams batch, float* workspace) {
  FA_BODY(round_queries<B>(batch, workspace));
}

template <class B>
int start_query_gradient(const FaParams& p, float* workspace, void* stream) {
  const int64_t blocks = (p.M + B::kRows - 1) / B::kRows * p.H * p.B;
  return launch_blocks("query_gradient_kernel", query_gradient_kernel<B>, blocks, B::kConsumers,
                       sizeof(float) * B::kRows * (B::kD + 4), stream, p, workspace);
}

}  // namespace sm90
}  // namespace fa
