// What blocks of a decode call leave in the workspace, each for its share of the keys, and how many
// shares there are. Kernels of sm80/ and sm90/ write it; one kernel combines it (sm80/decode.cuh).
#pragma once
#include "softmax_lse.cuh"
#include "splits.h"

namespace fa {

// Each is of some keys: for every row the level of its weights and their sum, and its values
// weighted by them. They are merged before the division, which then rounds once.
struct Parts {
  float *out, *level, *sum;  // [parts][rows][width], and two of [parts][rows]
  int64_t rows;
  int width;

  FA_SHARED Parts(void* memory, int64_t count, int64_t rows, int width)
      : out(static_cast<float*>(memory)),
        level(out + count * rows * width),
        sum(level + count * rows),
        rows(rows),
        width(width) {}

  // The factor of a part in the merged sum; `top` is the highest level of all parts.
  template <bool general>
  FA_DEVICE float weight(int part, int64_t row, float top) const {
    return rescale<general>(level[part * rows + row], top == -INFINITY ? 0.0f : top);
  }
  FA_DEVICE float4* columns(int part, int64_t row, int column) const {
    return reinterpret_cast<float4*>(out + (part * rows + row) * width + column);
  }
};

// The parts that blocks leave in the workspace.
FA_SHARED Parts splits_of(const FaParams& p, int64_t splits) {
  return Parts(p.workspace, splits, p.B * p.H * p.M, static_cast<int>((p.Dv + 3) / 4 * 4));
}
FA_SHARED int64_t splits_bytes(const FaParams& p, int64_t splits) {
  const Parts parts = splits_of(p, splits);
  return splits * parts.rows * (parts.width + 2) * static_cast<int64_t>(sizeof(float));
}

// Into how many shares the keys of a call are split, for `blocks` blocks with tiles of `tile` keys.
inline int64_t splits_of_keys(const FaParams& p, int64_t blocks, int64_t tile,
                              int64_t multiprocessors) {
  constexpr int64_t kFewKeys = 256;  // not worth a second kernel
  const int64_t keys = least(p.N, least(p.left, p.N) + least(p.right, p.N) + p.M);
  return keys <= kFewKeys ? 1 : splits(blocks, ceil_div(keys, tile), multiprocessors);
}

}  // namespace fa
