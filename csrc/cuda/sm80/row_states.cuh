// Three numbers of each row in the workspace of a backward pass, by which weights and gradients are
// computed: its level, what the level's rounding cut off (softmax_lse.cuh), and - delta
// (backward.cuh). The rows of a query head are padded to a whole tile; padding has weight 0. The
// kernels of sm90 have tiles of other rows, and states of their own (../sm90/bwd_preprocess.cuh).
#pragma once
#include "../softmax_lse.cuh"

namespace fa {
namespace sm80 {

struct RowState {
  float level, rest, minus_delta;
};

enum Part { kLevel, kRest, kMinusDelta, kParts };
constexpr int kRowsOfTiles = 128;  // a multiple of the rows of every tile of these kernels
constexpr int kTogether = 16;      // rows: their levels are adjacent, then their rests and deltas

// At least a tile: a head's turns begin at its first row (semaphore.cuh), even if it has no rows.
FA_SHARED int64_t padded_rows(const FaParams& p, int64_t tile = kRowsOfTiles) {
  return (most(p.M, 1) + tile - 1) / tile * tile;
}
// The rows of a head in all items, and where those of one item begin. Sequences of a packed batch
// begin at whole tiles, one further on with each.
FA_SHARED int64_t rows_of_head(const FaParams& p, int64_t tile = kRowsOfTiles) {
  return p.cu_q ? (p.T / tile + p.B) * tile : p.B * padded_rows(p, tile);
}
FA_DEVICE int64_t item_begins(const Item& p, int64_t b, int64_t h, int tile = kRowsOfTiles) {
  const int64_t before = h * rows_of_head(p, tile);
  if (!p.cu_q) return before + b * padded_rows(p, tile);
  return before + (p.first_row / tile + b) * tile;
}

// The workspace begins with the words by which blocks wait (semaphore.cuh): kTaskWords for the
// next task, and one for every kRowsATurn rows. What follows is at a multiple of 16 bytes.
constexpr int kTaskWords = 4, kRowsATurn = 8;
FA_SHARED int64_t turn_words(const FaParams& p, int64_t tile = kRowsOfTiles) {
  return (kTaskWords + p.H * rows_of_head(p, tile) / kRowsATurn + 3) / 4 * 4;
}
// The words at the start of a workspace: turns, and the states of all rows.
FA_SHARED int64_t state_words(const FaParams& p, int64_t tile = kRowsOfTiles) {
  return turn_words(p, tile) + p.H * rows_of_head(p, tile) * kParts;
}

// The states of the rows of one query head.
struct RowStates {
  float* data;

  FA_DEVICE RowStates(const Item& p, float* workspace, int64_t b, int64_t h,
                      int tile = kRowsOfTiles)
      : data(workspace + turn_words(p, tile) + item_begins(p, b, h, tile) * kParts) {}

  static FA_DEVICE int place(Part part, int i) {
    return (i / kTogether * kParts + part) * kTogether + i % kTogether;
  }
  FA_DEVICE float& at(Part part, int64_t i) const { return data[place(part, static_cast<int>(i))]; }
  FA_DEVICE RowState at(int64_t i) const {
    return {at(kLevel, i), at(kRest, i), at(kMinusDelta, i)};
  }
  FA_DEVICE void set(int64_t i, RowState state) const {
    at(kLevel, i) = state.level;
    at(kRest, i) = state.rest;
    at(kMinusDelta, i) = state.minus_delta;
  }
};

// The states of so many rows, in shared memory.
template <int kRows>
struct StateTile {
  static constexpr int kBytes = kParts * kRows * static_cast<int>(sizeof(float));

  // Rows from `first` on, at which a tile begins. The caller commits and waits.
  static FA_DEVICE void load(unsigned char* to, const RowStates& from, int first) {
    const unsigned thread = threadIdx.x;
    if (thread < kBytes / 16)
      ptx::copy16(ptx::shared_address(to) + thread * 16, from.data + first * kParts + thread * 4);
  }

  // The states of rows i and i + 1; i is even.
  static FA_DEVICE void read(RowState (&two)[2], const unsigned char* tile, int i) {
    const auto* data = reinterpret_cast<const float*>(tile);
    const auto pair = [&](Part part) {
      return *reinterpret_cast<const float2*>(data + RowStates::place(part, i));
    };
    const float2 level = pair(kLevel), rest = pair(kRest), minus_delta = pair(kMinusDelta);
    two[0] = {level.x, rest.x, minus_delta.x};
    two[1] = {level.y, rest.y, minus_delta.y};
  }
};

}  // namespace sm80
}  // namespace fa
