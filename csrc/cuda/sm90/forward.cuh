// Forward on Hopper's tensor cores: FlashAttention-3 (Shah et al. 2024, algorithms 1 and 2). One
// thread of the first warpgroup asks for boxes of Q, K and V. Each of the other warpgroups has 64
// rows. It asks for the next tile's scores before the product of weights and values, and computes
// its softmax while that product runs. The warpgroups take turns to ask for products, so that one
// has its softmax while another multiplies.
//
// Blocks are persistent: each computes one task after another, and the next task's boxes are loading
// while the last rows are stored.
#pragma once
#include "forward_tiles.cuh"

namespace fa {
namespace sm90 {

template <class Type, int d, int dv, bool kGeneral_, bool kMasked_>
struct ForwardOf : ForwardTiles<Type, d, dv, forward_tile(d, dv, kGeneral_, kMasked_).groups,
                                forward_tile(d, dv, kGeneral_, kMasked_).keys> {
  static constexpr bool kGeneral = kGeneral_, kMasked = kMasked_;
  // Of a thread of the producer and of the consumers: together what a launch allocates, 168 for each
  // of three warpgroups or 128 for each of four.
  static constexpr bool kTwo = forward_tile(d, dv, kGeneral, kMasked).groups == 2;
  static constexpr int kFewRegisters = kTwo ? 24 : 32, kRegisters = kTwo ? 240 : 160;
  // Where the sums take most registers, they are rescaled before the next product reads them. Their
  // factors are then not needed after it.
  static constexpr bool kScalesFirst = dv > 128;
};

// A plain kernel supports a positive scale, band, lengths and sinks only, a general one all features.
template <class Type, int kD, int kDv, bool general>
struct Forward : ForwardOf<Type, kD, kDv, general, general> {};

// A general kernel but for masks: its levels are in powers of two (softmax_lse.cuh), and its tiles
// are larger.
template <class Type, int kD, int kDv>
struct UnmaskedForward : ForwardOf<Type, kD, kDv, true, false> {};

// -- the producer ---------------------------------------------------------------------------------

// Asks for the boxes of all tasks of a block; one thread.
template <class F>
FA_DEVICE void load_tasks(const ForwardMemory<F>& memory, const TensorMap* of_q,
                          const TensorMap* of_k, const TensorMap* of_v, const FaParams& batch,
                          const Schedule& schedule) {
  Stage stage;
  stage.parity = 1;  // every stage is free at first
  uint32_t q_parity = 1;
  for (int turn = 0; schedule.has(turn); ++turn) {
    const Task task = schedule.task(turn, F::kRows, batch.H);
    const Item p(batch, task.b);
    if (task.first_row >= p.M) continue;  // another item is longer
    const TileRange tiles = TileRange::of<F>(p, task.b, task.first_row);
    if (tiles.empty()) continue;
    const KeyBoxes boxes(batch, p, schedule.key_box, task);
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      load_keys(memory, of_k, batch.k, boxes, tile, stage);
      if (tile == tiles.end - 1) {
        for (int group = 0; group < F::kGroups; ++group) {
          ptx::mbarrier_wait("forward: the memory of rows is free", memory.q_free(group), q_parity);
          ptx::mbarrier_expect("forward: rows are asked for", memory.q_full(group), F::kQBytes);
          for (int part = 0; part < F::kParts; ++part)
            ptx::load_box("forward: rows", memory.q(group) + part * F::kQPart, of_q,
                          row_box(batch.q, p, task, part, group * kGroupRows),
                          memory.q_full(group));
        }
        q_parity ^= 1;
      }
      load_values(memory, of_v, batch.v, boxes, tile, stage);
      stage = stage.next();
    }
  }
}

// -- a consumer -----------------------------------------------------------------------------------

// Stores the outputs of a warp's 16 rows from shared memory, where whole boxes may be stored, else
// from registers.
template <class F>
FA_DEVICE void store_rows(const ForwardMemory<F>& memory, const TensorMap* of_out, const Item& p,
                          const FaParams& batch, const Task& task, int mine, bool by_boxes,
                          float (&out)[F::kDv / 8][4]) {
  using Type = typename F::Type;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
  const int below = kGroupRows * mine + 16 * warp, row = task.first_row + below;
  if (!by_boxes || (batch.cu_q && row + 16 > p.M)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + lane / 4 + 8 * half;
      if (i >= p.M) continue;
      const OutputRow<Type> to(p.out, task.b, task.h, i, p.Dv);
#pragma unroll
      for (int n = 0; n < F::kDv / 8; ++n)
        to.store(8 * n + 2 * (lane % 4), out[n][2 * half], out[n][2 * half + 1]);
    }
    return;
  }
  // Through the memory of Q, of which these rows are the warp's own.
  const uint32_t at = memory.q(mine) + 16 * warp * 128;
#pragma unroll
  for (int j = 0; j < F::kDv / 16; ++j) {
    uint32_t four[4];
    pack_left(Type(), four, out[2 * j], out[2 * j + 1]);
    const uint32_t column = static_cast<uint32_t>(j % 4 * 32 + lane / 16 * 16) ^ (lane % 8 * 16);
    ptx::store_matrices("forward: outputs", at + j / 4 * F::kQPart + lane % 16 * 128 + column,
                        four);
  }
  ptx::async_proxy_fence("forward: boxes have these outputs");
  ptx::warp_sync("forward: all lanes have written outputs");
  if (lane == 0) {
    for (int part = 0; part < F::kValueParts; ++part)
      ptx::store_box("forward: boxes of outputs", of_out, row_box(batch.out, p, task, part, below),
                     at + part * F::kQPart);
    ptx::bulk_commit("forward: boxes of outputs are on their way");
    ptx::bulk_wait_read<0>("forward: boxes of outputs are read");
  }
}

// All that a thread does.
template <class F>
FA_DEVICE void forward_thread(const TensorMap& of_q, const TensorMap& of_k, const TensorMap& of_v,
                              const TensorMap& of_out, const FaParams& batch,
                              const Schedule& schedule) {
  using Type = typename F::Type;
  constexpr int kKeys = F::kKeys;
  FA_SHARED_MEMORY(shared);
  const ForwardMemory<F> memory = {ptx::shared_address(shared)};
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  if (threadIdx.x == 0) memory.init();
  ptx::block_sync("forward: mbarriers are initialised");
  if (group == 0) {
    ptx::fewer_registers<F::kFewRegisters>("forward: registers for others");
    if (threadIdx.x == 0) load_tasks<F>(memory, &of_q, &of_k, &of_v, batch, schedule);
    return;
  }
  ptx::more_registers<F::kRegisters>("forward: registers of others");

  const int mine = group - 1, lane = static_cast<int>(threadIdx.x) % 32;
  const Consumer<F> consumer(memory, mine);
  const int column = 2 * (lane % 4);
  const int row_below = kGroupRows * mine + consumer.thread() / 32 * 16 + lane / 4;  // and + 8
  // Warpgroup g waits at barrier 1 + g for its turn. The first begins.
  const auto await_turn = [&] {
    ptx::barrier_sync("forward: my turn to ask for products", 1 + mine, 2 * kWarpgroup);
  };
  const auto pass_turn = [&] {
    ptx::barrier_arrive("forward: the next one's turn", 1 + (mine + 1) % F::kGroups,
                        2 * kWarpgroup);
  };
  if (mine == F::kGroups - 1) pass_turn();

  Stage stage;
  uint32_t q_parity = 0;
  for (int turn = 0; schedule.has(turn); ++turn) {
    const Task task = schedule.task(turn, F::kRows, batch.H);
    const Item p(batch, task.b);
    if (warp_uniform(task.first_row >= p.M)) continue;  // another item is longer
    const TileRange tiles = TileRange::of<F>(p, task.b, task.first_row);
    const int row = task.first_row + row_below;
    Visible visible(p, task.b);
    for (int* x : {&visible.shift, &visible.left, &visible.right, &visible.length})
      *x = warp_uniform(*x);
    const Head head(F::kGeneral ? batch : p, task.b, task.h, visible.shift);
    const float to_log2 = F::kGeneral ? kLog2e : head.scale * kLog2e;
    const auto places = [&](int tile) { return Places<false>{head, row, tile * kKeys + column}; };
    MaskLines lines;
    if constexpr (F::kMasked) lines = MaskLines(places(0));

    Softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    float out[F::kDv / 8][4] = {}, s[kKeys / 8][4], decay[2] = {1.0f, 1.0f};
    LeftSides<kKeys / 8> weights;
    MaskPairs<kKeys / 8> pairs;
    // From products to weights, for one tile.
    const auto softmax = [&](int tile, auto hides) {
      if (F::kGeneral) logits(s, places(tile), lines, pairs, NoGradient(), F::kMasked);
      if (decltype(hides)::value)
        hide_keys(s, {visible.keys_of(row), visible.keys_of(row + 8)}, tile * kKeys + column,
                  tile < tiles.whole_begin || tiles.whole_end == tiles.begin);
      update<F::kMasked>(state, s, decay, to_log2);
      if (F::kGeneral && head.p.dropout_p > 0) drop(s, draw<kKeys / 8>(places(tile)));
    };
    const auto ask_mask = [&](int tile) {
      if (F::kMasked && head.p.mask.data) load_mask(pairs, lines, places(tile));
    };

    if (!tiles.empty()) {
      int tile = tiles.end - 1;
      ptx::mbarrier_wait("forward: rows have landed", memory.q_full(mine), q_parity);
      ptx::mbarrier_wait("forward: the first keys have landed", memory.keys_full(stage.index),
                         stage.parity);
      await_turn();
      consumer.ask_scores(s, stage.index);
      pass_turn();
      ask_mask(tile);
      const int behind = visible.length - tile * kKeys;              // of this tile exist
      if (behind < kKeys && (batch.cu_q || visible.length < p.N)) {  // else zeros are behind them
        ptx::mbarrier_wait("forward: the first values have landed", memory.values_full(stage.index),
                           stage.parity);
        clear_rows<F, kKeys, F::kValueParts>(shared + F::kValuesAt + stage.index * F::kValueBytes,
                                             behind);
        rows_are_cleared<F>(F::kGroups + 1);
      }
      ptx::products_wait<0>("forward: the first scores are there");
      ptx::fence_operand(s);
      if (consumer.leads())
        ptx::mbarrier_arrive("forward: the first keys are read", memory.keys_free(stage.index));
      softmax(tile, Known<true>());
      pack_weights<Type>(weights, s);

      const auto step = [&](auto hides) {
        const Stage before = stage;
        stage = stage.next();
        await_turn();
        consumer.ask_scores(s, stage.index);
        ask_mask(tile);
        if (F::kScalesFirst) scale_rows(out, decay);
        ptx::mbarrier_wait("forward: values have landed", memory.values_full(before.index),
                           before.parity);
        consumer.ask_values(out, weights, before.index);
        pass_turn();
        ptx::products_wait<1>("forward: scores are there");
        ptx::fence_operand(s);
        if (consumer.leads())
          ptx::mbarrier_arrive("forward: keys are read", memory.keys_free(stage.index));
        softmax(tile, hides);
        // The wait for the next keys is here, because ptxas then leaves all exponentials before it,
        // under the product.
        const Stage after = stage.next();
        if (tile > tiles.begin)
          ptx::mbarrier_wait("forward: keys have landed", memory.keys_full(after.index),
                             after.parity);
        ptx::products_wait<0>("forward: sums are there");
        ptx::fence_operand(out);
        if (consumer.leads())
          ptx::mbarrier_arrive("forward: values are read", memory.values_free(before.index));
        pack_weights<Type>(weights, s);
        if (!F::kScalesFirst) scale_rows(out, decay);
      };
      --tile;
      if (tile >= tiles.begin) {
        const Stage after = stage.next();
        ptx::mbarrier_wait("forward: the second keys have landed", memory.keys_full(after.index),
                           after.parity);
      }
      // Tiles that some rows see in part, whole ones, and those at the left edge of a band.
#pragma unroll 1
      for (bool left = false;; left = true) {
        const int end = left ? tiles.begin : tiles.whole_end;
#pragma unroll 1
        for (; tile >= end; --tile) step(Known<true>());
        if (left) break;
#pragma unroll 1
        for (; tile >= tiles.whole_begin; --tile) step(Known<false>());
      }
      if (F::kScalesFirst) scale_rows(out, decay);
      ptx::mbarrier_wait("forward: the last values have landed", memory.values_full(stage.index),
                         stage.parity);
      consumer.ask_values(out, weights, stage.index);
      ptx::products_wait<0>("forward: the last sums are there");
      ptx::fence_operand(out);
      if (consumer.leads())
        ptx::mbarrier_arrive("forward: the last values are read", memory.values_free(stage.index));
      stage = stage.next();
      q_parity ^= 1;
    }

    const Item again(batch, ptx::anew(task.b));
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float level = state.level[half];
      float sum = row_sum(state.sum[half]);
      const float of_sink = count_sink<F::kMasked>(again, task.b, task.h, level, sum);
      factor[half] = sum == 0.0f ? 0.0f : head.dropout_factor * of_sink / sum;
      const int i = row + 8 * half;
      if (column == 0 && i < again.M)
        Normalisers(again, task.b, task.h).template store<F::kMasked>(i, level, sum);
    }
    scale_rows(out, factor);
    store_rows<F>(memory, &of_out, again, batch, task, mine, !tiles.empty(), out);
    if (!tiles.empty()) {
      ptx::warp_sync("forward: all lanes are done with the memory of rows");
      if (lane == 0)
        ptx::mbarrier_arrive("forward: the memory of rows is free again", memory.q_free(mine));
    }
  }
  if (mine == 0) await_turn();  // the last turn that was passed on
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    forward_kernel(const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_k,
                   const __grid_constant__ TensorMap of_v, const __grid_constant__ TensorMap of_out,
                   const __grid_constant__ FaParams batch,
                   const __grid_constant__ Schedule schedule) {
  FA_BODY(forward_thread<F>(of_q, of_k, of_v, of_out, batch, schedule));
}

}  // namespace sm90
}  // namespace fa
