// Attention weights on Ampere-class tensor cores: the probabilities exp(s - normaliser) after
// dropout, for every head, or their mean. A block has one tile of rows and keys, a warp 16 rows of
// it. For the mean it adds up the heads in their order, the same on every run, and computes with
// one while the next is loading; only the mean is written to memory.
#pragma once
#include "product.cuh"

namespace fa {
namespace sm80 {

// kD is the padded head dim; a plain kernel supports scale and band only.
template <class Type_, int kD_, bool kGeneral_>
struct Weights {
  using Type = Type_;
  static constexpr int kD = kD_;
  static constexpr bool kGeneral = kGeneral_;
  // Two stages, of two heads, fit the 99 KB of sm_86 and sm_89.
  static constexpr int kWarps = kD <= 128 ? 8 : 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kKeys = kD <= 192 ? 64 : 32;
  using QTile = Tile<kRows, kD>;
  using KTile = Tile<kKeys, kD>;
  static constexpr int kStageBytes = QTile::kBytes + KTile::kBytes;
  static_assert(2 * kStageBytes <= kLeastShared, "a block has no room on sm_86 and sm_89");

  // The grid: key tiles within row tiles within planes (heads, unless averaged) within items.
  static FA_SHARED int64_t planes(const FaParams& p) { return p.average_heads ? 1 : p.H; }
  static FA_SHARED int64_t row_tiles(const FaParams& p) { return (p.M + kRows - 1) / kRows; }
  static FA_SHARED int64_t key_tiles(const FaParams& p) { return (p.N + kKeys - 1) / kKeys; }
};

// Starts to load a head's part of this tile: queries, and keys before `end`.
template <class W>
FA_DEVICE void load_head(unsigned char* stage, const FaParams& p, int64_t b, int64_t h,
                         int first_row, int first_key, int64_t end) {
  const Matrix q = matrix_of(p.q, b, h, p.M, p.D), k = matrix_of(p.k, b, key_head(p, h), end, p.D);
  load_tile<typename W::QTile, W::kThreads>(stage, q, first_row);
  load_tile<typename W::KTile, W::kThreads>(stage + W::QTile::kBytes, k, first_key);
}

// Scores become probabilities.
template <class W>
FA_DEVICE void probabilities(Accumulator<W::kKeys>& s, const Head& head, int row) {
  const float to_log2 = W::kGeneral ? kLog2e : head.scale * kLog2e;
  const Normalisers normalisers(head.p, head.b, head.h);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    Normaliser normaliser = {INFINITY, 0.0f};
    if (i < head.p.M) normaliser = normalisers.at<W::kGeneral>(i);
#pragma unroll
    for (int n = 0; n < W::kKeys / 8; ++n)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e)
        s[n][e] = probability<W::kGeneral>(s[n][e], normaliser, to_log2);
  }
}

// Stores a lane's part of the tile, times a factor; the tensor may have any strides.
template <class W>
FA_DEVICE void store(const FaParams& p, int64_t b, int64_t plane, int row, int first,
                     const Accumulator<W::kKeys>& weights, float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = row + 8 * half;
    if (i >= p.M) continue;
    const OutputRow<typename W::Type> to(p.weights, b, plane, i, p.N);
#pragma unroll
    for (int n = 0; n < W::kKeys / 8; ++n)
      to.store(first + 8 * n, weights[n][2 * half] * factor, weights[n][2 * half + 1] * factor);
  }
}

// Two blocks for a multiprocessor, if that spills no registers and their shared memory fits.
template <class W>
__global__ void __launch_bounds__(W::kThreads, W::kGeneral || W::kD == 32 || W::kD >= 128 ? 1 : 2)
    weights_kernel(const FaParams p) {
  FA_SHARED_MEMORY(memory);
  const int key_tiles = static_cast<int>(W::key_tiles(p)), planes = static_cast<int>(W::planes(p));
  const int row_tiles = static_cast<int>(W::row_tiles(p));
  const int at = static_cast<int>(blockIdx.x), above = at / key_tiles / row_tiles;
  const int first_key = at % key_tiles * W::kKeys;
  const int first_row = at / key_tiles % row_tiles * W::kRows;
  const int plane = above % planes, b = above / planes;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row + 16 * warp + lane / 4;  // and row + 8
  const int column = first_key + 2 * (lane % 4);

  const int64_t last_row = least(first_row + W::kRows, p.M), last_key = first_key + W::kKeys;
  const KeyRange seen = key_range(p, b, first_row, last_row);
  const KeyRange by_all = common_range(p, b, first_row, last_row);
  const bool whole = by_all.lo <= first_key && last_key <= by_all.hi;
  const Visible visible(p, b);
  const int heads = p.average_heads ? static_cast<int>(p.H) : 1, first = plane;
  const int last = seen.lo < last_key && first_key < seen.hi ? first + heads : first;

  float factor = 1.0f;  // of dropout: the same for all heads
  Accumulator<W::kKeys> sum = {};
  if (first < last) {
    load_head<W>(memory, p, b, first, first_row, first_key, seen.hi);
    ptx::copies_commit("weights: first head");
  }
  for (int h = first, stage = 0; h < last; ++h, stage ^= 1) {
    ptx::copies_wait<0>("weights: this head has landed");
    ptx::block_sync("weights: all see this head, and are done with the one before");
    if (h + 1 < last) {
      unsigned char* const next = memory + (stage ^ 1) * W::kStageBytes;
      load_head<W>(next, p, b, h + 1, first_row, first_key, seen.hi);
      ptx::copies_commit("weights: next head");
    }

    const uint32_t q_tile = ptx::shared_address(memory + stage * W::kStageBytes);
    const uint32_t k_tile = q_tile + W::QTile::kBytes;
    const Head head(p, b, h, diagonal(p, b));
    const Places<false> places = {head, row, column};
    const MaskLines mask(places);
    MaskPairs<W::kKeys / 8> pairs;
    if (W::kGeneral) load_mask(pairs, mask, places);
    Accumulator<W::kKeys> s = {};
#pragma unroll
    for (int d = 0; d < W::kD / 16; ++d) {
      uint32_t a[4];
      load_left<typename W::QTile>(a, q_tile, warp, d);
      add_products<typename W::Type, typename W::KTile>(s, a, k_tile, d);
    }
    if (W::kGeneral) logits(s, places, mask, pairs, NoGradient());
    if (!whole) hide(s, places, visible, p.M, NoGradient());
    probabilities<W>(s, head, row);
    if (W::kGeneral && p.dropout_p > 0) drop(s, draw<W::kKeys / 8>(places));
    factor = head.dropout_factor;
#pragma unroll
    for (int n = 0; n < W::kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] += s[n][e];
  }
  store<W>(p, b, plane, row, column, sum, factor / static_cast<float>(heads));
}

}  // namespace sm80
}  // namespace fa
