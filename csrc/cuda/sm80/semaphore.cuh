// A fixed order for blocks that add to one sum, so that it is the same every time. Each block waits
// for its turn, at a word in the workspace of a backward pass.
//
// This cannot deadlock. A block takes its task by a ticket when it begins, and waits only for tasks
// of lower tickets, which running blocks hold. The lowest of those that run waits for none, and
// ends; then the next is the lowest. So it does not matter in which order blocks begin, how many
// fit, or what else runs on the device.
#pragma once
#include "row_states.cuh"

namespace fa {
namespace sm80 {

// The words: [0] the next ticket, [1] whether offsets decrease; from kTaskWords on, for each
// kRowsATurn rows of all heads, the number of the task that added last (0: none).
struct Turns {
  uint32_t* words;

  FA_DEVICE explicit Turns(float* workspace) : words(reinterpret_cast<uint32_t*>(workspace)) {}

  // Clears the first two words, on the lanes of one warp of the kernel before the backward pass.
  // Sequences that overlap, by offsets that decrease, would wait for each other's turns for ever:
  // such a batch is marked, and blocks return at once.
  FA_DEVICE void clear(const FaParams& batch) const {
    uint32_t falls = 0;
    if (batch.cu_q)
      for (int64_t b = threadIdx.x % 32; b < batch.B; b += 32)
        falls |= batch.cu_q[b + 1] < batch.cu_q[b];
    for (int flip = 16; flip; flip /= 2) falls |= ptx::shuffle_xor(falls, flip);
    if (threadIdx.x % 32 == 0) words[0] = 0, words[1] = falls;
  }
  // Clears the turn of the row `at`, counted over all heads.
  FA_DEVICE void clear(int64_t at) const {
    if (at % kRowsATurn == 0) words[kTaskWords + at / kRowsATurn] = 0;
  }
  FA_DEVICE bool fall(const FaParams& batch) const { return batch.cu_q && words[1]; }
  FA_DEVICE unsigned next_ticket() const { return ptx::fetch_add(words, 1); }
  // The task of the calling block, for all of its threads; `shared` has room for it.
  FA_DEVICE unsigned begin(unsigned* shared) const {
    if (threadIdx.x == 0) *shared = next_ticket();
    ptx::block_sync("turns: all know their task");
    return *shared;
  }
  // A warp's word for the tile at this row, counted over all heads.
  FA_DEVICE uint32_t* of(int64_t at, int warp) const {
    return words + kTaskWords + at / kRowsATurn + warp;
  }
};

// For all lanes of a warp: waits until the word has the number `before`, that of the task
// before this one. They then see what that task wrote.
FA_DEVICE void wait_for_turn(const uint32_t* word, int before) {
  if (threadIdx.x % 32 == 0)
    ptx::wait_until("turns: the one before has added", word, static_cast<uint32_t>(before));
  ptx::warp_sync("turns: all lanes know of it");
}

FA_DEVICE void pass_turn_on(uint32_t* word, int turn) {
  ptx::warp_sync("turns: all lanes have added");
  if (threadIdx.x % 32 == 0)
    ptx::publish("turns: the next one sees it", word, static_cast<uint32_t>(turn));
}

}  // namespace sm80
}  // namespace fa
