// Decode on Hopper's tensor cores: few query rows, many keys. The cost is reading K and V, so the
// query heads that share them are rows of one tile, and the keys are split among blocks
// (Flash-Decoding, Dao et al. 2023). Blocks leave parts of softmaxes in the workspace, which the
// kernel of sm80/decode.cuh combines. One thread asks for boxes of Q, K and V, and one warpgroup
// multiplies: while it has the softmax of a tile, the next ones are on their way.
#pragma once
#include "../decode_parts.cuh"
#include "forward_tiles.cuh"

namespace fa {
namespace sm90 {

// A positive scale, band, lengths and sinks. Levels are in powers of two.
template <class Type, int d, int dv>
struct Decode : ForwardTiles<Type, d, dv, 1, decode_tile(d, dv)> {
  // Where shared memory holds two blocks, both together have all registers of a multiprocessor. Then
  // so many are for a thread of the producer and of the consumers.
  static constexpr int kBlocks = 2 * Decode::ForwardTiles::kSharedBytes <= kMostShared ? 2 : 1;
  static constexpr int kFewRegisters = 24, kRegisters = 232;
};

// How the rows of a key head are shared out to tiles, and its keys to blocks.
struct Shares {
  int splits, tiles, heads;  // tiles: of a key head's rows; heads: query heads of a tile
  int key_box;               // rows of a box of keys: those of a tile, or fewer in pages
};

// A block's share: some heads of an item, and a part of the keys that they see. Blocks that read the
// same keys are neighbours.
struct Share {
  int b, first_head, heads, split;

  FA_DEVICE Share(const FaParams& batch, const Shares& of) {
    const int block = static_cast<int>(blockIdx.x), group = static_cast<int>(batch.H / batch.Hk);
    const int below = block % of.tiles * of.heads, rest = block / of.tiles;
    const int hk = rest / of.splits % static_cast<int>(batch.Hk);
    split = rest % of.splits;
    b = rest / of.splits / static_cast<int>(batch.Hk);
    first_head = hk * group + below;
    heads = min(of.heads, group - below);
  }
  FA_DEVICE Task task() const { return {b, first_head, 0}; }

  // Its part of the tiles of keys that any row sees.
  template <class F>
  FA_DEVICE TileRange tiles(const Item& p, const Shares& of) const {
    TileRange all = TileRange::of<F>(p, b, 0);
    const int64_t count = most(0, all.end - all.begin);
    const int first = all.begin;
    all.begin = warp_uniform(first + static_cast<int>(count * split / of.splits));
    all.end = warp_uniform(first + static_cast<int>(count * (split + 1) / of.splits));
    return all;
  }
};

// Asks for all boxes of a block; one thread. A box of Q has all rows of the share's heads. Those of
// another key head, or of a packed batch's next sequence, are not stored.
template <class F>
FA_DEVICE void load_share(const ForwardMemory<F>& memory, const TensorMap* of_q,
                          const TensorMap* of_k, const TensorMap* of_v, const FaParams& batch,
                          const Item& p, const Shares& shares, const Share& share,
                          const TileRange& tiles) {
  if (tiles.empty()) return;
  const int rows = shares.heads * static_cast<int>(batch.M);
  ptx::mbarrier_expect("decode: rows are asked for", memory.q_full(0), F::kParts * rows * 128);
#pragma unroll
  for (int part = 0; part < F::kParts; ++part)
    ptx::load_box("decode: rows", memory.q(0) + part * F::kQPart, of_q,
                  row_box(batch.q, p, share.task(), part, 0), memory.q_full(0));
  const KeyBoxes boxes(batch, p, shares.key_box, share.task());
  Stage stage;
  stage.parity = 1;  // every stage is free at first
#pragma unroll 1
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    load_keys(memory, of_k, batch.k, boxes, tile, stage);
    load_values(memory, of_v, batch.v, boxes, tile, stage);
    stage = stage.next();
  }
}

// A lane's row, of the tile of Q: query i of head h. Past the last row, it does not exist.
struct Query {
  int h, i;
  bool exists;

  FA_DEVICE Query(const FaParams& batch, const Item& p, const Share& share, int row) {
    const int M = static_cast<int>(batch.M), head = row / M;
    i = row % M;
    h = share.first_head + head;
    exists = head < share.heads && i < p.M;
  }
};

// Stores the part of a row in the workspace.
template <int n>
FA_DEVICE void store_part(const Parts& to, int64_t at, int column, int width, int half,
                          const float (&out)[n][4], float level, float sum) {
  auto* const row = to.out + at * to.width + column;
#pragma unroll
  for (int k = 0; k < n; ++k)
    if (8 * k < width)
      *reinterpret_cast<float2*>(row + 8 * k) = {out[k][2 * half], out[k][2 * half + 1]};
  if (column) return;
  to.level[at] = level;
  to.sum[at] = sum;
}

// All that a thread does.
template <class F>
FA_DEVICE void decode_thread(const TensorMap& of_q, const TensorMap& of_k, const TensorMap& of_v,
                             const FaParams& batch, const Shares& shares) {
  using Type = typename F::Type;
  FA_SHARED_MEMORY(shared);
  const ForwardMemory<F> memory = {ptx::shared_address(shared)};
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const Share share(batch, shares);
  const Item p(batch, share.b);
  const TileRange tiles = share.tiles<F>(p, shares);
  if (threadIdx.x == 0) memory.init();
  ptx::block_sync("decode: mbarriers are initialised");
  if (group == 0) {
    if constexpr (F::kBlocks > 1)
      ptx::fewer_registers<F::kFewRegisters>("decode: registers for others");
    if (threadIdx.x == 0) load_share(memory, &of_q, &of_k, &of_v, batch, p, shares, share, tiles);
    return;
  }
  if constexpr (F::kBlocks > 1) ptx::more_registers<F::kRegisters>("decode: registers of others");

  const Consumer<F> consumer(memory, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, column = 2 * (lane % 4);
  const int row = consumer.thread() / 32 * 16 + lane / 4;  // and row + 8
  const Query query[2] = {{batch, p, share, row}, {batch, p, share, row + 8}};
  const Visible visible(p, share.b);
  const Band seen[2] = {visible.keys_of(query[0].i), visible.keys_of(query[1].i)};
  const float to_log2 = static_cast<float>(p.scale) * kLog2e;

  Softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  float out[F::kDv / 8][4] = {}, s[F::kKeys / 8][4];
  LeftSides<F::kKeys / 8> weights;
  // No box fills the rest, which products read.
  const int filled = shares.heads * static_cast<int>(batch.M);  // rows of the tile of Q
  if (filled < F::kRows) {
    clear_rows<F, F::kRows, F::kParts>(shared, filled);
    rows_are_cleared<F>(F::kGroups + 1);
  }
  if (!tiles.empty()) ptx::mbarrier_wait("decode: rows have landed", memory.q_full(0), 0);
  Stage stage;
#pragma unroll 1
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    ptx::mbarrier_wait("decode: keys have landed", memory.keys_full(stage.index), stage.parity);
    consumer.ask_scores(s, stage.index);
    ptx::products_wait<0>("decode: scores are there");
    ptx::fence_operand(s);
    if (consumer.leads())
      ptx::mbarrier_arrive("decode: keys are read", memory.keys_free(stage.index));
    if (tile < tiles.whole_begin || tile >= tiles.whole_end)
      hide_keys(s, seen, tile * F::kKeys + column, true);
    update<false>(state, s, out, to_log2);
    pack_weights<Type>(weights, s);
    ptx::mbarrier_wait("decode: values have landed", memory.values_full(stage.index), stage.parity);
    const int behind = visible.length - tile * F::kKeys;              // of this tile exist
    if (behind < F::kKeys && (batch.cu_q || visible.length < p.N)) {  // else zeros are behind them
      clear_rows<F, F::kKeys, F::kValueParts>(shared + F::kValuesAt + stage.index * F::kValueBytes,
                                              behind);
      rows_are_cleared<F>(F::kGroups + 1);
    }
    consumer.ask_values(out, weights, stage.index);
    ptx::products_wait<0>("decode: sums are there");
    ptx::fence_operand(out);
    if (consumer.leads())
      ptx::mbarrier_arrive("decode: values are read", memory.values_free(stage.index));
    stage = stage.next();
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float level = state.level[half], sum = row_sum(state.sum[half]);
    const auto [h, i, exists] = query[half];
    if (!exists) continue;
    if (shares.splits > 1) {
      const Parts parts = splits_of(batch, shares.splits);
      const int64_t at = share.split * parts.rows + (share.b * batch.H * batch.M + h * p.M + i);
      store_part(parts, at, column, static_cast<int>(p.Dv), half, out, level, sum);
      continue;
    }
    const float of_sink = count_sink<false>(p, share.b, h, level, sum);
    const float factor = sum == 0.0f ? 0.0f : of_sink / sum;
    const OutputRow<Type> to(p.out, share.b, h, i, p.Dv);
#pragma unroll
    for (int n = 0; n < F::kDv / 8; ++n)
      to.store(8 * n + column, out[n][2 * half] * factor, out[n][2 * half + 1] * factor);
    if (column == 0) Normalisers(p, share.b, h).store<false>(i, level, sum);
  }
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    decode_kernel(const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_k,
                  const __grid_constant__ TensorMap of_v, const __grid_constant__ FaParams batch,
                  const __grid_constant__ Shares shares) {
  FA_BODY(decode_thread<F>(of_q, of_k, of_v, batch, shares));
}

}  // namespace sm90
}  // namespace fa
