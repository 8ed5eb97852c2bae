// Which tiles the blocks of a backward pass compute under a dense mask, and in which order blocks
// add to a tile of dq. A kernel that runs before the pass finds both from the mask's classes
// (../mask_tiles.cuh) and, for finfo.min, from what the rows of a tile have seen.
#pragma once
#include "../launch.h"
#include "../mask_tiles.cuh"
#include "row_states.cuh"

namespace fa {
namespace sm80 {

// Four bits for each tile of every head, eight tiles in a word, in the order in which they pass a
// block. The words precede the bytes of the mask's tiles, at the start of a workspace.
template <class B>
struct ShownTiles {
  // kToRead: the mask of a visible tile must be read. The tile's turn in the sum of dq: kAfterNext is
  // after the block of the next keys, kBegins is the first; without these bits it is after a block
  // that has to be searched for.
  enum : uint32_t { kShown = 1, kToRead = 2, kAfterNext = 4, kBegins = 8 };
  static constexpr int kOfWord = 8, kBits = 4, kThreads = 128;

  static FA_SHARED int64_t blocks(const FaParams& p) {
    return ((B::kKeysStay ? p.N : p.M) + B::kStaying - 1) / B::kStaying;
  }
  static FA_SHARED int64_t words_of_block(const FaParams& p) {
    constexpr int passing = kOfWord * B::kPassing;
    return ((B::kKeysStay ? p.M : p.N) + passing - 1) / passing;
  }
  static FA_SHARED int64_t words(const FaParams& p) {
    return p.B * p.H * blocks(p) * words_of_block(p);
  }
  static FA_SHARED int64_t word_bytes(const FaParams& p) { return (words(p) + 3) / 4 * 16; }
  static int64_t bytes(const FaParams& p) {
    return MaskTiling::suits(p) ? word_bytes(p) + (B::kTiling.bytes(p) + 15) / 16 * 16 : 0;
  }

  const FaParams& p;
  int b, block;
  uint32_t ahead, bits;  // the word with the next tile; the bits of the tile that was found last

  FA_DEVICE ShownTiles(const FaParams& p, int b, int block)
      : p(p), b(b), block(block), ahead(0), bits(kShown) {}

  FA_DEVICE uint32_t word(int64_t h, int of_block, int at) const {
    const auto of_head = static_cast<unsigned>(blocks(p));
    const auto of_each = static_cast<unsigned>(words_of_block(p));  // enough for 16 GB
    const unsigned head =
        static_cast<unsigned>(b) * static_cast<unsigned>(p.H) + static_cast<unsigned>(h);
    const unsigned line = head * of_head + static_cast<unsigned>(of_block);
    return static_cast<const uint32_t*>(
        p.workspace)[line * of_each + static_cast<unsigned>(at) / (B::kPassing * kOfWord)];
  }
  static FA_DEVICE int place(int at) {
    return static_cast<int>(static_cast<unsigned>(at) / B::kPassing % kOfWord);
  }
  FA_DEVICE bool visible_tile(int64_t h, int of_block, int at) const {
    return word(h, of_block, at) >> kBits * place(at) & kShown;
  }

  // The first visible tile from `at` on, or one past the end. `anew`: of another head.
  FA_DEVICE int next(int64_t h, int at, int end, bool anew) {
    while (at < end) {
      const int in = place(at);
      if (in == 0 || anew) ahead = word(h, block, at);
      anew = false;
      bits = ahead >> kBits * in;
      if (bits & kShown) break;
      at += (bits ? 1 : kOfWord - in) * B::kPassing;
    }
    return at;
  }

  // The block that adds to a tile of dq just before this one, from the tile's bits.
  FA_DEVICE int before(uint32_t of_tile, int64_t h, int at) const {
    int one = block + 1;
    if (!(of_tile & (kAfterNext | kBegins)))
      while (!visible_tile(h, ++one, at)) {
      }
    return one;
  }
};

// -- how it is found ------------------------------------------------------------------------------

// One tile of rows and the mask's classes there; the workspace of `p` has the mask's bytes.
template <class B>
struct RowsOfMask {
  const FaParams& p;
  MaskStripe stripe;
  RowStates states;
  int row;

  FA_DEVICE RowsOfMask(const FaParams& p, float* workspace, int64_t b, int64_t h, int row)
      : p(p),
        stripe(p, B::kTiling, b, h, row, false),
        states(Item(p, b), workspace, b, h),
        row(row) {}

  // True if a row has seen no score far above finfo.min. Rows that see nothing have level +inf.
  FA_DEVICE bool any_low() const {
    bool low = false;
    for (int i = row; i < row + B::kTiling.rows; ++i) low |= !(states.at(kLevel, i) > -0x1p126f);
    return low;
  }
  // TileOfMask, from the answer that these rows need.
  FA_DEVICE uint32_t classes_in(int key) const {
    const uint32_t at = stripe.first + static_cast<unsigned>(key) / B::kTiling.keys;
    const uint32_t first = stripe.tile(at);
    if (first < kSkip || !MaskTiling::may_hold_least(p)) return first;
    const uint32_t exact = stripe.tile(at + stripe.to_exact);
    return exact != first && any_low() ? exact : first;
  }
  // The first key from `from` on, at the start of a tile, that is visible; or one past the end.
  FA_DEVICE int shown_from(int from, int end) const {
    while (from < end) {
      const uint32_t one = classes_in(from);
      if (one < kSkip) break;
      from += static_cast<int>(one - kSkip + 1) * B::kTiling.keys;
    }
    return from;
  }
};

// A lane for each tile, and for the unused places of a word.
template <class B>
__global__ void __launch_bounds__(ShownTiles<B>::kThreads)
    shown_tiles_kernel(const FaParams p, uint32_t* words, float* workspace) {
  using To = ShownTiles<B>;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * To::kThreads + threadIdx.x;
  const int64_t word = task / To::kOfWord, line = word / To::words_of_block(p);
  const int in = static_cast<int>(task % To::kOfWord);
  const int64_t head = line / To::blocks(p), b = head / p.H, h = head % p.H;
  const int64_t stays = line % To::blocks(p) * B::kStaying;
  const int64_t passes = (word % To::words_of_block(p) * To::kOfWord + in) * B::kPassing;
  const int row = static_cast<int>(B::kKeysStay ? passes : stays);
  const int key = static_cast<int>(B::kKeysStay ? stays : passes);
  uint32_t bits = 0;
  if (word < To::words(p) && row < p.M && key < p.N) {
    const RowsOfMask<B> rows(p, workspace, b, h, row);
    const uint32_t held = rows.classes_in(key);
    if (held < kSkip) bits = To::kShown | (held == kRead ? To::kToRead : 0);
    if (B::kInTurn && bits) {
      const KeyRange seen = key_range(p, b, row, least(row + B::kPassing, p.M));
      const int end = static_cast<int>(seen.hi), next = key + B::kStaying;
      const int before = rows.shown_from(next, end);
      bits |= before >= end ? To::kBegins : before == next ? To::kAfterNext : 0;
    }
  }
  bits <<= To::kBits * in;
  for (int flip = To::kOfWord / 2; flip; flip /= 2) bits |= ptx::shuffle_xor(bits, flip);
  if (in == 0 && word < To::words(p)) words[word] = bits;
}

// Runs after the states of all rows are known.
template <class B>
int start_shown_tiles(const FaParams& p, float* workspace, void* stream) {
  using To = ShownTiles<B>;
  FaParams of_mask = p;
  of_mask.workspace = static_cast<char*>(p.workspace) + To::word_bytes(p);
  if (const int failed = start_mask_tiles(of_mask, B::kTiling, stream)) return failed;
  const int64_t blocks = (To::words(p) * To::kOfWord + To::kThreads - 1) / To::kThreads;
  return launch_blocks("shown_tiles_kernel", shown_tiles_kernel<B>, blocks, To::kThreads, 0, stream,
                       of_mask, static_cast<uint32_t*>(p.workspace), workspace);
}

}  // namespace sm80
}  // namespace fa
