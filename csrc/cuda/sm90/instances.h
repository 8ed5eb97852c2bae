// Which calls these kernels serve, with which instance, and the tensor maps of a call.
#pragma once
#include "../../common/band.h"
#include "../kernel_choice.h"
#include "../splits.h"
#include "ptx.cuh"
#include "tiles.h"

namespace fa {
namespace sm90 {

// Kernels exist for these head dims; others are padded to the next.
constexpr int64_t kWidest = 256, kWidestGeneral = 192, kWidestBackward = 128;

template <int d, int dv>
struct Dims {
  static constexpr int kD = d, kDv = dv;
  // Is there a general kernel without masks, too? Only for those that are used most: it costs as
  // much time to compile.
  static constexpr bool kUnmasked = d == dv && (d == 64 || d == 128);
};

// Calls `use` with the smallest Dims that hold this call's.
template <class Use>
int with_dims(const FaParams& p, Use use) {
  const int64_t d = most(p.D, p.Dv);
  if (d <= 64) return use(Dims<64, 64>());
  if (d <= 96) return use(Dims<96, 96>());
  if (d <= 128) return use(Dims<128, 128>());
  if (d <= 192 && p.Dv <= 128) return use(Dims<192, 128>());
  if (d <= 192) return use(Dims<192, 192>());
  return use(Dims<256, 256>());
}

// A forward pass of few rows, with parts of the keys in the workspace if there are several splits.
int decode(const FaParams& p, int64_t splits, void* stream);

// Why there is no kernel for this backward pass, or null.
const char* declines_backward(const FaParams& p);

// How decode's tiles have the rows of a key head: all rows of as many query heads as fit.
struct DecodeRows {
  int64_t heads, tiles;

  explicit DecodeRows(const FaParams& p)
      : heads(least(p.H / p.Hk, kGroupRows / p.M)), tiles(ceil_div(p.H / p.Hk, heads)) {}
  int64_t blocks(const FaParams& p) const { return tiles * p.Hk * p.B; }
};
static_assert(kDecodeRows <= kGroupRows, "a tile has all rows of a head");

// Rows of a box of keys: those of a tile, or as many of a page as divide both.
inline int64_t box_rows(const FaParams& p, int64_t tile) {
  if (!p.page) return tile;
  int64_t a = tile, b = p.page;
  while (b) {
    const int64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}

// The sizes of tensors with rows of queries, and of keys. A packed batch is one item, and pages are
// items.
inline Sizes rows_of(const FaParams& p, int64_t columns) {
  return p.cu_q ? Sizes{{1, p.H, p.T, columns}} : Sizes{{p.B, p.H, p.M, columns}};
}
inline Sizes keys_of(const FaParams& p, int64_t columns) {
  if (p.page) return {{p.P, p.Hk, p.page, columns}};
  return p.cu_q ? Sizes{{1, p.Hk, p.S, columns}} : Sizes{{p.B, p.Hk, p.N, columns}};
}

}  // namespace sm90
}  // namespace fa
