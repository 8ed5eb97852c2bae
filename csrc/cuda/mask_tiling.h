// How the planes of a dense mask are cut into tiles, and which masks are. This header has no kernel:
// kernels of both classes may include it (mask_tiles.cuh has those that find the answers).
#pragma once
#include "../abi.h"
#include "../common/host_device.h"

namespace fa {

// A byte for each tile: its mask must be read; its mask hides nothing and is not read; or the tile
// is skipped. kSkip skips it alone, kSkip + n skips it and the n tiles after it. If finfo.min hides
// a tile there are two answers: for rows that see a score elsewhere, and for rows that do not.
enum TileOfMask : uint32_t { kRead, kNotRead, kSkip };

// How the planes of a mask are cut into tiles; heads and items that share a plane share its bytes.
struct MaskTiling {
  int rows, keys;  // of a tile

  // Packed sequences and pages have no tiles here. Below 128 x 128 scores there is too little to
  // skip.
  static FA_SHARED bool suits(const FaParams& p) {
    return p.mask.data && !p.cu_q && p.M * p.N >= 1 << 14;
  }
  static FA_SHARED bool may_hold_least(const FaParams& p) {
    return p.mask.dtype == FA_BF16 || p.mask.dtype == FA_F32;
  }
  static FA_SHARED int64_t heads(const FaParams& p) { return p.mask.stride[1] ? p.H : 1; }
  FA_SHARED int64_t stripes(const FaParams& p) const {
    return p.mask.stride[2] ? (p.M + rows - 1) / rows : 1;
  }
  FA_SHARED int64_t of_stripe(const FaParams& p) const { return (p.N + keys - 1) / keys; }
  FA_SHARED int64_t all_stripes(const FaParams& p) const {
    return (p.mask.stride[0] ? p.B : 1) * heads(p) * stripes(p);
  }
  // The number of first answers, one for each tile. The second ones follow them.
  FA_SHARED int64_t answers(const FaParams& p) const { return all_stripes(p) * of_stripe(p); }
  FA_SHARED int64_t bytes(const FaParams& p) const {
    return suits(p) ? answers(p) * (1 + may_hold_least(p)) : 0;
  }
};

}  // namespace fa
