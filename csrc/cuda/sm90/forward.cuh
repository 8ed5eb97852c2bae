// Forward on Hopper's tensor cores: FlashAttention-3 (Shah et al. 2024, algorithms 1 and 2). One
// thread of the first warpgroup asks for boxes of Q, K and V. Each of the other warpgroups has 64
// rows. It asks for the next tile's scores before the product of weights and values, and computes
// its softmax while that product runs. The warpgroups take turns to ask for products, so that one
// has its softmax while another multiplies.
//
// Blocks are persistent: each computes one task after another, and the next task's boxes are loading
// while the last rows are stored.
#pragma once
#include "../softmax.cuh"
#include "schedule.cuh"

namespace fa {
namespace sm90 {

// kD and kDv are the padded head dims.
template <class Type_, int kD_, int kDv_, bool kGeneral_, bool kMasked_>
struct ForwardOf {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_, kMasked = kMasked_;
  static constexpr ForwardTile kTile = forward_tile(kD, kDv, kGeneral, kMasked);
  static constexpr int kGroups = kTile.groups, kKeys = kTile.keys, kRows = kGroupRows * kGroups;
  static constexpr int kThreads = kWarpgroup * (kGroups + 1), kConsumers = kWarpgroup * kGroups;
  static constexpr int kStages = 2;
  // Of a thread of the producer and of the consumers: together what a launch allocates, 168 for each
  // of three warpgroups or 128 for each of four.
  static constexpr int kFewRegisters = kGroups == 2 ? 24 : 32,
                       kRegisters = kGroups == 2 ? 240 : 160;
  // Tiles are stored in parts of 64 columns, a row of 128 bytes each.
  static constexpr int kParts = (kD + 63) / 64, kValueParts = (kDv + 63) / 64;
  static constexpr int kQPart = kGroupRows * 128, kPart = kKeys * 128;
  static constexpr int kQBytes = kParts * kQPart;  // of a warpgroup
  static constexpr int kKeyBytes = kParts * kPart, kValueBytes = kValueParts * kPart;
  static constexpr int kKeysAt = kGroups * kQBytes, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kSharedBytes = kBarriersAt + 8 * (2 * kGroups + 4 * kStages);
  // Where the sums take most registers, they are rescaled before the next product reads them. Their
  // factors are then not needed after it.
  static constexpr bool kScalesFirst = kDv > 128;
  static_assert(kStages == 2, "Stage counts to two");
  static_assert(kSharedBytes <= kMostShared, "a block has no room for these tiles");
  static_assert(kValueParts <= kParts, "outputs are stored from the memory of Q");
};

// A plain kernel supports a positive scale, band, lengths and sinks only, a general one all features.
template <class Type, int kD, int kDv, bool general>
struct Forward : ForwardOf<Type, kD, kDv, general, general> {};

// A general kernel but for masks: its levels are in powers of two (softmax_lse.cuh), and its tiles
// are larger.
template <class Type, int kD, int kDv>
struct UnmaskedForward : ForwardOf<Type, kD, kDv, true, false> {};

// Where tiles and mbarriers are in shared memory.
template <class F>
struct ForwardMemory {
  uint32_t base;
  FA_DEVICE uint32_t q(int group) const { return base + group * F::kQBytes; }
  FA_DEVICE uint32_t keys(int stage) const { return base + F::kKeysAt + stage * F::kKeyBytes; }
  FA_DEVICE uint32_t values(int stage) const {
    return base + F::kValuesAt + stage * F::kValueBytes;
  }
  FA_DEVICE uint32_t barrier(int i) const { return base + F::kBarriersAt + 8 * i; }
  FA_DEVICE uint32_t q_full(int group) const { return barrier(group); }
  FA_DEVICE uint32_t q_free(int group) const { return barrier(F::kGroups + group); }
  FA_DEVICE uint32_t keys_full(int stage) const { return barrier(2 * F::kGroups + stage); }
  FA_DEVICE uint32_t keys_free(int stage) const { return barrier(2 * F::kGroups + 2 + stage); }
  FA_DEVICE uint32_t values_full(int stage) const { return barrier(2 * F::kGroups + 4 + stage); }
  FA_DEVICE uint32_t values_free(int stage) const { return barrier(2 * F::kGroups + 6 + stage); }

  FA_DEVICE void init() const {
    constexpr int kWarps = kWarpgroup / 32;
    for (int i = 0; i < F::kGroups; ++i) {
      ptx::mbarrier_init("forward: rows full", q_full(i), 1);
      ptx::mbarrier_init("forward: rows free", q_free(i), kWarps);
    }
    for (int i = 0; i < F::kStages; ++i) {
      ptx::mbarrier_init("forward: keys full", keys_full(i), 1);
      ptx::mbarrier_init("forward: keys free", keys_free(i), F::kGroups);
      ptx::mbarrier_init("forward: values full", values_full(i), 1);
      ptx::mbarrier_init("forward: values free", values_free(i), F::kGroups);
    }
    ptx::mbarrier_init_fence();
  }
};

// A stage of a pipeline of two, and the parity of the phase in which it is full.
struct Stage {
  int index = 0;
  uint32_t parity = 0;
  FA_DEVICE Stage next() const { return {index ^ 1, parity ^ static_cast<uint32_t>(index)}; }
};

// The tiles of keys that a block's rows see: [begin, end), of which all rows see all keys of
// [whole_begin, whole_end), which is empty at `begin` if there are none.
struct TileRange {
  int begin, end, whole_begin, whole_end;
  FA_DEVICE bool empty() const { return begin >= end; }

  template <class F>
  static FA_DEVICE TileRange of(const FaParams& p, int b, int first_row) {
    const int64_t past = least(first_row + F::kRows, p.M);
    const KeyRange seen = key_range(p, b, first_row, past);
    const KeyRange by_all = common_range(p, b, first_row, past);
    const int begin = static_cast<int>(seen.lo) / F::kKeys;
    const int end = (static_cast<int>(seen.hi) + F::kKeys - 1) / F::kKeys;
    const int whole_begin = (static_cast<int>(by_all.lo) + F::kKeys - 1) / F::kKeys;
    const int whole_end = static_cast<int>(by_all.hi) / F::kKeys;
    const bool any = whole_begin < whole_end;
    return {warp_uniform(begin), warp_uniform(end), warp_uniform(any ? whole_begin : begin),
            warp_uniform(any ? whole_end : begin)};
  }
};

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
    const KeyBoxes boxes(batch, p, schedule, task);
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      ptx::mbarrier_wait("forward: a stage of keys is free", memory.keys_free(stage.index),
                         stage.parity);
      ptx::mbarrier_expect("forward: keys are asked for", memory.keys_full(stage.index),
                           F::kKeyBytes);
      boxes.load<F::kKeys, F::kParts>("forward: keys", memory.keys(stage.index), of_k, batch.k,
                                      tile, memory.keys_full(stage.index));
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
      ptx::mbarrier_wait("forward: a stage of values is free", memory.values_free(stage.index),
                         stage.parity);
      ptx::mbarrier_expect("forward: values are asked for", memory.values_full(stage.index),
                           F::kValueBytes);
      boxes.load<F::kKeys, F::kValueParts>("forward: values", memory.values(stage.index), of_v,
                                           batch.v, tile, memory.values_full(stage.index));
      stage = stage.next();
    }
  }
}

// -- a consumer -----------------------------------------------------------------------------------

// Zeros in the rows of a tile of values from `first` on, which are behind the item's last key: they
// may be NaN, and their weights of 0 would not hide that.
template <class F>
FA_DEVICE void clear_values(unsigned char* tile, int first) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int chunks = (F::kKeys - first) * 8;
  for (int part = 0; part < F::kValueParts; ++part)
    for (int i = thread; i < chunks; i += F::kConsumers)
      reinterpret_cast<uint4*>(tile + part * F::kPart + first * 128)[i] = {0, 0, 0, 0};
  ptx::async_proxy_fence("forward: products see the zeros");
  ptx::barrier_sync("forward: all have written zeros", F::kGroups + 1, F::kConsumers);
}

// Scores of keys that a row does not see become -inf. `first` is the lane's first key; past its
// rows' last keys, one comparison a score suffices.
template <int n>
FA_DEVICE void hide_keys(float (&s)[n][4], const Visible& visible, int row, int first, bool left) {
  const Band seen[2] = {visible.keys_of(row), visible.keys_of(row + 8)};
  const int end[2] = {seen[0].hi - first, seen[1].hi - first};
  each_of(s, [&](int k, int e) {
    if (8 * k + e % 2 >= end[e / 2]) s[k][e] = -INFINITY;
  });
  if (!left) return;
  const int begin[2] = {seen[0].lo - first, seen[1].lo - first};
  each_of(s, [&](int k, int e) {
    if (8 * k + e % 2 < begin[e / 2]) s[k][e] = -INFINITY;
  });
}

// A warpgroup's rows of one task.
template <class F>
struct Consumer {
  using Type = typename F::Type;
  using Scores = ptx::Products<F::kKeys>;
  using Sums = ptx::Products<F::kDv>;

  uint32_t q, keys, values;  // descriptors: of its rows, and of the first stages

  FA_DEVICE Consumer(const ForwardMemory<F>& memory, int mine)
      : q(kept(ptx::k_major(memory.q(mine)))),
        keys(kept(ptx::k_major(memory.keys(0)))),
        values(kept(ptx::mn_major(memory.values(0), F::kPart))) {}

  // x, which ptxas then does not compute again in each iteration.
  static FA_DEVICE uint32_t kept(uint32_t x) {
    return static_cast<uint32_t>(warp_uniform(static_cast<int>(x)));
  }
  FA_DEVICE int thread() const { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  FA_DEVICE bool leads() const { return thread() == 0; }

  // s = Q K^T
  FA_DEVICE void ask_scores(float (&s)[F::kKeys / 8][4], int stage) const {
    const uint32_t k = keys + stage * ptx::in_descriptor(F::kKeyBytes);
    ptx::products_fence("forward: registers of scores are free");
#pragma unroll
    for (int d = 0; d < F::kD / 16; ++d)
      Scores::template ss<false, false>(
          "forward: Q K^T", Type(), s, q + ptx::in_descriptor(d / 4 * F::kQPart + d % 4 * 32),
          k + ptx::in_descriptor(d / 4 * F::kPart + d % 4 * 32), d > 0);
    ptx::products_commit("forward: Q K^T is asked for");
  }

  // out += P V
  FA_DEVICE void ask_values(float (&out)[F::kDv / 8][4], const LeftSides<F::kKeys / 8>& p,
                            int stage) const {
    const uint32_t v = values + stage * ptx::in_descriptor(F::kValueBytes);
    ptx::fence_operand(out);
    ptx::products_fence("forward: sums and weights are ready");
#pragma unroll
    for (int j = 0; j < F::kKeys / 16; ++j)
      Sums::template rs<true>("forward: P V", Type(), out, p[j], v + ptx::in_descriptor(2048 * j),
                              true);
    ptx::products_commit("forward: P V is asked for");
  }
};

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
        hide_keys(s, visible, row, tile * kKeys + column,
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
        clear_values<F>(shared + F::kValuesAt + stage.index * F::kValueBytes, behind);
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
