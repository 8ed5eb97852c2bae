// What a block of the backward kernel holds in shared memory, and how it gets there (backward.cuh).
#pragma once
#include "bwd_preprocess.cuh"
#include "key_blocks.cuh"

namespace fa {
namespace sm90 {

// kD is the padded head dim, of values, too. Without a band, all rows see all keys up to a length.
template <class Type_, int kD_, bool kBanded_, bool kGeneral_>
struct Backward {
  using Type = Type_;
  static constexpr int kD = kD_, kKeys = kBlockKeys;
  static constexpr bool kBanded = kBanded_, kGeneral = kGeneral_;
  // Plain kernels with a band may take keys and rows in the reversed order (key_blocks.cuh).
  static constexpr bool kReversible = kBanded && !kGeneral;
  static constexpr bool kOnto = !kGeneral;  // products are accumulated onto states of rows
  // What ../sm80/score_gradient.cuh asks of a kernel.
  static constexpr bool kKeysStay = true, kDeltaFirst = false, kMakesSums = true, kSecond = true;
  static constexpr int kRows = backward_rows(kD, kBanded, kGeneral);
  using Form = StateForm<kRows, kGeneral>;
  static constexpr int kGroups = 2, kStages = 2;
  static constexpr int kThreads = kWarpgroup * (kGroups + 1), kConsumers = kWarpgroup * kGroups;
  static constexpr int kFewRegisters = 24, kRegisters = 240;
  // A warpgroup has of dq^T 64 of 128 columns, or all columns and half of the rows.
  static constexpr bool kHalvesColumns = kD == 128;
  static constexpr int kQueryRows = kHalvesColumns ? kRows : kRows / 2;
  // Tiles are stored in parts of 64 columns, a row of 128 bytes each.
  static constexpr int kParts = kD / 64, kKeyPart = kKeys * 128, kRowPart = kRows * 128;
  static constexpr int kKeyBytes = kParts * kKeyPart, kRowBytes = kParts * kRowPart;
  static constexpr int kScoreBytes = kGroups * kRowPart, kHalfBytes = kRows * kD * 2;  // of dq
  static constexpr int kStateBytes = sm80::StateTile<kRows>::kBytes;
  static constexpr int kRowsAt = kGroups * kKeyBytes;  // after keys and values
  static constexpr int kScoresAt = kRowsAt + 2 * kStages * kRowBytes;
  static constexpr int kQueriesAt = kScoresAt + kStages * kScoreBytes;
  static constexpr int kStatesAt = kQueriesAt + kGroups * kHalfBytes;
  static constexpr int kBarriersAt = kStatesAt + kStages * kStateBytes;
  static constexpr int kTaskAt = kBarriersAt + 8 * (1 + 4 * kStages);
  static constexpr int kSharedBytes = kTaskAt + static_cast<int>(sizeof(KeyTask));
  static_assert(kD == 64 || kD == 128, "no such warpgroups share dq");
  static_assert(kSharedBytes <= kMostShared, "a block has no room for these tiles");
};

// Barriers of threads. Those of dq are two, for its halves.
enum BackwardBarrier {
  kScoresThere = 1,
  kRowsCleared,
  kHalfThere,
  kHalfFree = kHalfThere + 2,
};

// Where tiles and mbarriers are in shared memory.
template <class B>
struct BackwardMemory {
  unsigned char* shared;
  uint32_t base;

  FA_DEVICE explicit BackwardMemory(unsigned char* shared)
      : shared(shared), base(ptx::shared_address(shared)) {}
  FA_DEVICE uint32_t keys() const { return base; }
  FA_DEVICE uint32_t values() const { return base + B::kKeyBytes; }
  FA_DEVICE uint32_t q(int stage) const { return base + B::kRowsAt + stage * B::kRowBytes; }
  FA_DEVICE uint32_t dout(int stage) const { return q(B::kStages + stage); }
  FA_DEVICE uint32_t scores(int stage) const {
    return base + B::kScoresAt + stage * B::kScoreBytes;
  }
  FA_DEVICE uint32_t half(int of) const { return base + B::kQueriesAt + of * B::kHalfBytes; }
  FA_DEVICE float* states(int stage) const {
    return reinterpret_cast<float*>(shared + B::kStatesAt + stage * B::kStateBytes);
  }
  FA_DEVICE KeyTask& task() const { return *reinterpret_cast<KeyTask*>(shared + B::kTaskAt); }
  FA_DEVICE uint32_t barrier(int i) const { return base + B::kBarriersAt + 8 * i; }
  FA_DEVICE uint32_t keys_full() const { return barrier(0); }
  FA_DEVICE uint32_t q_full(int stage) const { return barrier(1 + stage); }
  FA_DEVICE uint32_t q_free(int stage) const { return barrier(1 + B::kStages + stage); }
  FA_DEVICE uint32_t dout_full(int stage) const { return barrier(1 + 2 * B::kStages + stage); }
  FA_DEVICE uint32_t dout_free(int stage) const { return barrier(1 + 3 * B::kStages + stage); }

  FA_DEVICE void init() const {
    ptx::mbarrier_init("backward: keys full", keys_full(), 2);
    for (int i = 0; i < B::kStages; ++i) {
      ptx::mbarrier_init("backward: rows of q full", q_full(i), 1);
      ptx::mbarrier_init("backward: rows of q free", q_free(i), B::kGroups);
      ptx::mbarrier_init("backward: rows of dout full", dout_full(i), 1);
      ptx::mbarrier_init("backward: rows of dout free", dout_free(i), B::kGroups);
    }
    ptx::mbarrier_init_fence();
  }
};

// A tile's place among all that pass: its stage, and the parity of the phase in which that is full.
struct Passed {
  unsigned tiles = 0;
  FA_DEVICE int stage() const { return static_cast<int>(tiles % 2); }
  FA_DEVICE uint32_t parity() const { return tiles / 2 % 2; }
};

// -- the producer ---------------------------------------------------------------------------------

// Asks for the boxes of a block: its keys, and the rows of q of all tiles with their states; or its
// values, and the rows of dout. One thread.
template <class B, bool of_q>
FA_DEVICE void load_boxes(const BackwardMemory<B>& memory, const TensorMap* of_rows,
                          const TensorMap* of_keys, const FaParams& batch, const Item& p,
                          const KeySchedule& schedule, const KeyTask& task, const RowTiles& tiles,
                          float* workspace) {
  const FaTensor& keys = of_q ? batch.k : batch.v;
  const FaTensor& rows = of_q ? batch.q : batch.dout;
  const uint32_t keys_to = of_q ? memory.keys() : memory.values();
  ptx::mbarrier_expect("backward: keys are asked for", memory.keys_full(), B::kKeyBytes);
#pragma unroll
  for (int part = 0; part < B::kParts; ++part)
    ptx::load_box("backward: keys", keys_to + part * B::kKeyPart, of_keys,
                  key_box(keys, batch, task, part), memory.keys_full());
  const float* const states = workspace + sm80::turn_words(batch, B::kRows);
  const int first_head = task.hk * schedule.group;
  auto row = static_cast<unsigned>(sm80::item_begins(p, task.b, first_head, B::kRows));
  Passed passed;
  for (int h = first_head; h < first_head + schedule.group; ++h) {
#pragma unroll 1
    for (int i = 0; i < tiles.count(); ++i, ++passed.tiles) {
      const int tile = tiles.at<B>(i, schedule.reversed);
      const int stage = passed.stage();
      const uint32_t free = of_q ? memory.q_free(stage) : memory.dout_free(stage);
      const uint32_t full = of_q ? memory.q_full(stage) : memory.dout_full(stage);
      const uint32_t to = of_q ? memory.q(stage) : memory.dout(stage);
      ptx::mbarrier_wait(of_q ? "backward: a stage of q is free" : "backward: one of dout is free",
                         free, passed.parity() ^ 1);  // every stage is free at first
      ptx::mbarrier_expect(of_q ? "backward: q is asked for" : "backward: dout is asked for", full,
                           B::kRowBytes + (of_q ? B::kStateBytes : 0));
#pragma unroll
      for (int part = 0; part < B::kParts; ++part)
        ptx::load_box("backward: rows", to + part * B::kRowPart, of_rows,
                      row_box(rows, p, {task.b, h, tile * B::kRows}, part, 0), full);
      if (of_q)
        ptx::load_bytes("backward: states", ptx::shared_address(memory.states(stage)),
                        states + int64_t{row + tile * B::kRows} * sm80::kParts, B::kStateBytes,
                        full);
    }
    row += static_cast<unsigned>(sm80::rows_of_head(p, B::kRows));
  }
}

}  // namespace sm90
}  // namespace fa
