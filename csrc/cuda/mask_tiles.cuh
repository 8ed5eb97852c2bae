// Classifies a dense mask by the tiles of a pass. A kernel that runs before the pass writes a byte
// for each tile to the beginning of the workspace. The pass skips tiles that are hidden, and does
// not read the mask where it hides nothing.
#pragma once
#include "../common/band.h"
#include "../common/mask_bits.h"
#include "launch.h"
#include "mask_tiling.h"
#include "ptx.cuh"

namespace fa {

FA_DEVICE uint32_t union_of_warp(uint32_t bits) {
  for (int flip = 16; flip; flip /= 2) bits |= ptx::shuffle_xor(bits, flip);
  return bits;
}

// -- what a pass reads ----------------------------------------------------------------------------

// The answers for the rows of a block; with `exact` the second ones.
struct MaskStripe {
  const FaParams& p;
  uint32_t first, to_exact;  // where they begin, and how far the second answers are from the first

  FA_DEVICE MaskStripe(const FaParams& p, MaskTiling tiling, int64_t b, int64_t h, int row,
                       bool exact)
      : p(p), to_exact(static_cast<uint32_t>(tiling.answers(p))) {
    const int64_t* stride = p.mask.stride;
    const int64_t plane = (stride[0] ? b * tiling.heads(p) : 0) + (stride[1] ? h : 0);
    const int64_t stripe = plane * tiling.stripes(p) + (stride[2] ? row / tiling.rows : 0);
    first = static_cast<uint32_t>(stripe * tiling.of_stripe(p)) + (exact ? to_exact : 0);
  }
  FA_DEVICE uint32_t tile(uint32_t at) const {
    return static_cast<const uint8_t*>(p.workspace)[at];
  }

  // The first key from `from` on, at the start of a tile, that is not skipped; or one past the end.
  // `read`: true if the mask of that tile must be read.
  template <int keys>
  FA_DEVICE int visible_tile(int from, int end, bool& read) const {
    while (from < end) {
      const uint32_t contents = tile(first + static_cast<unsigned>(from) / keys);
      read = contents == kRead;
      if (contents < kSkip) break;
      from += static_cast<int>(contents - kSkip + 1) * keys;
    }
    return from;
  }

  // For all threads of a block: true if there are keys of finfo.min in this range, which the first
  // answers skip, and one of the threads is `low`. The first argument is shared memory of no other
  // use.
  template <int keys, int threads>
  FA_DEVICE bool needs_least(uint32_t* said, int from, int end, bool low) const {
    const unsigned thread = threadIdx.x, tiles = static_cast<unsigned>(end + keys - 1) / keys;
    uint32_t needs = low ? 1 : 0;
    for (unsigned x = static_cast<unsigned>(from) / keys + thread; x < tiles; x += threads)
      if (tile(first + x) != tile(first + x - to_exact)) needs |= 2;
    needs = union_of_warp(needs);
    if (thread % 32 == 0) said[thread / 32] = needs;
    ptx::block_sync("mask: every warp has said what it needs");
    needs = 0;
    for (int warp = 0; warp < threads / 32; ++warp) needs |= said[warp];
    return needs == 3;
  }
};

// -- how it is found ------------------------------------------------------------------------------

constexpr int kMaskWarps = 8;  // of a block, each with a tile; the tiles are adjacent

// The class of `rows` rows, found by all lanes of a warp, `together` rows at a time: read(i), for
// the row i of this lane. Several are loaded ahead, until the result is known.
template <class Read>
FA_DEVICE uint32_t held_by_rows(int rows, int together, int own, Read read) {
  constexpr int kAhead = 8;
  uint32_t all = 0;
  for (int i = own; i - own < rows && !mixed(static_cast<uint8_t>(all)); i += kAhead * together) {
#pragma unroll
    for (int x = 0; x < kAhead; ++x) all |= read(min(i + x * together, rows - 1));
    all = union_of_warp(all);
  }
  return all;
}

template <class Of>
__global__ void __launch_bounds__(32 * kMaskWarps)
    mask_tiles_kernel(const FaParams p, const MaskTiling tiling) {
  using Bits = typename Of::Bits;
  constexpr int kSize = sizeof(Bits), kOfWord = 4 / kSize;
  FA_SHARED_MEMORY(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t tiles = tiling.of_stripe(p), across = (tiles + kMaskWarps - 1) / kMaskWarps;
  const int64_t stripe = blockIdx.x / across, plane = stripe / tiling.stripes(p);
  const int64_t tile = blockIdx.x % across * kMaskWarps + warp;
  const int64_t* stride = p.mask.stride;
  const int64_t i0 = stripe % tiling.stripes(p) * tiling.rows, j0 = tile * tiling.keys;
  const int rows = stride[2] ? static_cast<int>(least(tiling.rows, p.M - i0)) : 1;
  const int keys = static_cast<int>(most(0, least(tiling.keys, p.N - j0)));
  const Bits* const from = static_cast<const Bits*>(p.mask.data) +
                           plane / tiling.heads(p) * stride[0] +
                           plane % tiling.heads(p) * stride[1] + i0 * stride[2] + j0 * stride[3];

  uint32_t all = 0;  // past the last key
  const bool chunked = stride[3] == 1 && keys == tiling.keys && stride[2] * kSize % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(from) % 16 == 0;
  if (chunked) {
    const int chunks = keys * kSize / 16;  // of a row: a power of two, at most 16
    all = held_by_rows(rows, 32 / chunks, lane / chunks, [&](int i) {
      const auto four = reinterpret_cast<const uint4*>(from + i * stride[2])[lane % chunks];
      uint32_t held = 0;
      for (const uint32_t word : {four.x, four.y, four.z, four.w})
#pragma unroll
        for (int x = 0; x < kOfWord; ++x)
          held |= Of::classes_in(static_cast<Bits>(word >> 8 * kSize * x));
      return held;
    });
  } else if (keys > 0) {
    all = held_by_rows(rows, 1, 0, [&](int i) {
      uint32_t held = 0;
      for (int j = lane; j < keys; j += 32)
        held |= Of::classes_in(from[i * stride[2] + j * stride[3]]);
      return held;
    });
  }

  auto* const held = reinterpret_cast<uint32_t*>(memory);
  if (lane == 0) held[warp] = all;
  ptx::block_sync("mask: every warp knows its tile");
  if (lane != 0 || keys == 0) return;
  const auto answer = [&](uint32_t hides) {
    int skipped = warp;
    while (skipped < kMaskWarps && !(held[skipped] & ~hides)) ++skipped;
    return skipped > warp ? kSkip + (skipped - warp - 1) : all == kVisible ? kNotRead : kRead;
  };
  auto* const to = static_cast<uint8_t*>(p.workspace) + stripe * tiles + tile;
  to[0] = static_cast<uint8_t>(answer(kHidden | kLeast));
  if (tiling.may_hold_least(p)) to[tiling.answers(p)] = static_cast<uint8_t>(answer(kHidden));
}

inline int start_mask_tiles(const FaParams& p, MaskTiling tiling, void* stream) {
  const auto start = [&](auto kernel) {
    const int64_t across = (tiling.of_stripe(p) + kMaskWarps - 1) / kMaskWarps;
    return launch_blocks("mask_tiles_kernel", kernel, tiling.all_stripes(p) * across,
                         32 * kMaskWarps, sizeof(uint32_t) * kMaskWarps, stream, p, tiling);
  };
  switch (p.mask.dtype) {
    case FA_BOOL:
      return start(mask_tiles_kernel<OfBool>);
    case FA_BF16:
      return start(mask_tiles_kernel<OfBF16>);
    case FA_F16:
      return start(mask_tiles_kernel<OfF16>);
    default:
      return start(mask_tiles_kernel<OfF32>);
  }
}

}  // namespace fa
