// Tiles of Q, K and V in shared memory, which forward.cuh and decode.cuh share: one thread of the
// first warpgroup asks for their boxes, and the other warpgroups multiply them.
#pragma once
#include "../softmax.cuh"
#include "clear_rows.cuh"
#include "schedule.cuh"

namespace fa {
namespace sm90 {

// Where a block of `groups` warpgroups with rows has its tiles of `keys` keys. kD and kDv are the
// padded head dims.
template <class Type_, int kD_, int kDv_, int groups, int keys>
struct ForwardTiles {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr int kGroups = groups, kKeys = keys, kRows = kGroupRows * kGroups;
  static constexpr int kThreads = kWarpgroup * (kGroups + 1), kConsumers = kWarpgroup * kGroups;
  static constexpr int kStages = 2;
  // Tiles are stored in parts of 64 columns, a row of 128 bytes each.
  static constexpr int kParts = (kD + 63) / 64, kValueParts = (kDv + 63) / 64;
  static constexpr int kQPart = kGroupRows * 128, kPart = kKeys * 128;
  static constexpr int kQBytes = kParts * kQPart;  // of a warpgroup
  static constexpr int kKeyBytes = kParts * kPart, kValueBytes = kValueParts * kPart;
  static constexpr int kKeysAt = kGroups * kQBytes, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kSharedBytes = kBarriersAt + 8 * (2 * kGroups + 4 * kStages);
  static_assert(kStages == 2, "Stage counts to two");
  static_assert(kSharedBytes <= kMostShared, "a block has no room for these tiles");
  static_assert(kValueParts <= kParts, "outputs are stored from the memory of Q");
};

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

// Asks for a tile of keys, or of values, as soon as its stage is free; one thread.
template <class F>
FA_DEVICE void load_keys(const ForwardMemory<F>& memory, const TensorMap* map, const FaTensor& k,
                         const KeyBoxes& boxes, int tile, Stage stage) {
  ptx::mbarrier_wait("forward: a stage of keys is free", memory.keys_free(stage.index),
                     stage.parity);
  ptx::mbarrier_expect("forward: keys are asked for", memory.keys_full(stage.index), F::kKeyBytes);
  boxes.load<F::kKeys, F::kParts>("forward: keys", memory.keys(stage.index), map, k, tile,
                                  memory.keys_full(stage.index));
}
template <class F>
FA_DEVICE void load_values(const ForwardMemory<F>& memory, const TensorMap* map, const FaTensor& v,
                           const KeyBoxes& boxes, int tile, Stage stage) {
  ptx::mbarrier_wait("forward: a stage of values is free", memory.values_free(stage.index),
                     stage.parity);
  ptx::mbarrier_expect("forward: values are asked for", memory.values_full(stage.index),
                       F::kValueBytes);
  boxes.load<F::kKeys, F::kValueParts>("forward: values", memory.values(stage.index), map, v, tile,
                                       memory.values_full(stage.index));
}

// -- a consumer -----------------------------------------------------------------------------------

// Scores of keys that a lane's two rows do not see become -inf. `first` is the lane's first key;
// past its rows' last keys, one comparison a score suffices.
template <int n>
FA_DEVICE void hide_keys(float (&s)[n][4], const Band (&seen)[2], int first, bool left) {
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

}  // namespace sm90
}  // namespace fa
