// Forward on Ampere-class tensor cores (mma.sync, cp.async): FlashAttention-2 (Dao 2023, algorithm
// 1). A block has 64 rows, a warp 16 of them; keys and values of one tile are computed with while
// those of the next are on their way.
#pragma once
#include "softmax.cuh"

namespace fa {
namespace sm80 {

// kD and kDv are what the head dims are padded to; a plain kernel knows scale, band and sinks only.
template <class Type_, int kD_, int kDv_, bool kGeneral_>
struct Forward {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kKeys = kD <= 128 ? 64 : 32;  // two stages fit the 99 KB of sm_86 and sm_89
  static constexpr bool kKeepQ = kD <= 128;          // in registers, else read again for each tile
  using QTile = Tile<kRows, kD>;
  using KTile = Tile<kKeys, kD>;
  using VTile = Tile<kKeys, kDv>;
  static constexpr int kStageBytes = KTile::kBytes + VTile::kBytes;
  static constexpr int kSharedBytes = QTile::kBytes + 2 * kStageBytes;
};

// The rows' outputs, times what dropout asks for, and normalisers, from lanes to global memory.
template <class F>
FA_DEVICE void store(const FaParams& p, int64_t b, int64_t h, int row, int column, Softmax& state,
                     Accumulator<F::kDv>& out, float to_log2, float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float level = level_of<F::kGeneral>(state.max[half], to_log2), sum = row_sum(state.sum[half]);
    const int64_t i = row + 8 * half;
    if (i >= p.M) continue;
    const float decay = count_sink<F::kGeneral>(p, b, h, level, sum);
    const float inverse = sum == 0.0f ? 0.0f : factor * decay / sum;
    const OutputRow<typename F::Type> to(p.out, b, h, i, p.Dv);
#pragma unroll
    for (int n = 0; n < F::kDv / 8; ++n)
      to.store(8 * n + column, out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
    if (column == 0) Normalisers(p, b, h).template store<F::kGeneral>(i, level, sum);
  }
}

// A block for 64 rows of a head, the last rows first: with a causal band those have most to do.
template <class F>
__global__ void __launch_bounds__(F::kThreads, 1) forward_kernel(const FaParams p) {
  using Type = typename F::Type;
  FA_SHARED_MEMORY(memory);
  const int64_t blocks = (p.M + F::kRows - 1) / F::kRows;
  const int64_t head_at = blockIdx.x / blocks;
  const int64_t b = head_at / p.H, h = head_at % p.H, hk = key_head(p, h);
  const int first_row = static_cast<int>(blocks - 1 - blockIdx.x % blocks) * F::kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row + 16 * warp + lane / 4, column = 2 * (lane % 4);  // and row + 8

  const Head head(p, b, h);
  const float to_log2 = F::kGeneral ? kLog2e : head.scale * kLog2e;
  const int64_t last_row = least(first_row + F::kRows, p.M);
  const KeyRange seen = key_range(p, b, first_row, last_row);
  const KeyRange by_all = common_range(p, b, first_row, last_row);
  const Band band[2] = {band_of(p, b, row), band_of(p, b, row + 8)};
  const int start = static_cast<int>(seen.lo) / F::kKeys * F::kKeys;
  const int end = static_cast<int>(seen.hi);

  const Matrix q = matrix_of(p.q, b, h, p.M, p.D);
  const Matrix k = matrix_of(p.k, b, hk, end, p.D), v = matrix_of(p.v, b, hk, end, p.Dv);
  const MaskLines mask(Places<false>{head, row, 0});
  unsigned char* const stages = memory + F::QTile::kBytes;
  const uint32_t q_tile = ptx::shared_address(memory);

  Softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  Accumulator<F::kDv> out = {};
  uint32_t left[F::kKeepQ ? F::kD / 16 : 1][4];

  load_tile<typename F::QTile, F::kThreads>(memory, q, first_row);
  load_tile<typename F::KTile, F::kThreads>(stages, k, start);
  load_tile<typename F::VTile, F::kThreads>(stages + F::KTile::kBytes, v, start);
  ptx::copies_commit("forward: first tile");
  for (int first = start, stage = 0; first < end; first += F::kKeys, stage ^= 1) {
    unsigned char* const now = stages + stage * F::kStageBytes;
    unsigned char* const next = stages + (stage ^ 1) * F::kStageBytes;
    if (first + F::kKeys < end) {
      load_tile<typename F::KTile, F::kThreads>(next, k, first + F::kKeys);
      load_tile<typename F::VTile, F::kThreads>(next + F::KTile::kBytes, v, first + F::kKeys);
    }
    ptx::copies_commit("forward: next tile");
    ptx::copies_wait<1>("forward: this tile has landed");
    ptx::block_sync("forward: all see this tile");

    const uint32_t k_tile = ptx::shared_address(now), v_tile = k_tile + F::KTile::kBytes;
    if (F::kKeepQ && first == start)
#pragma unroll
      for (int d = 0; d < F::kD / 16; ++d) load_left<typename F::QTile>(left[d], q_tile, warp, d);
    const Places<false> places = {head, row, first + column};
    MaskPairs<F::kKeys / 8> pairs;
    if (F::kGeneral) load_mask(pairs, mask, places);
    Accumulator<F::kKeys> s = {};
    multiply_keys<Type, typename F::KTile>(s, k_tile, 0, [&](int d) -> uint32_t(&)[4] {
      uint32_t(&a)[4] = left[F::kKeepQ ? d : 0];
      if (!F::kKeepQ) load_left<typename F::QTile>(a, q_tile, warp, d);
      return a;
    });

    const bool whole = by_all.lo <= first && first + F::kKeys <= by_all.hi;
    if (F::kGeneral) logits(s, places, mask, pairs, NoGradient());
    if (!whole) hide(s, band, first + column);
    update<F::kGeneral>(state, s, out, to_log2);
    if (F::kGeneral && p.dropout_p > 0) drop(s, draw<F::kKeys / 8>(places));
    multiply_values<Type, typename F::VTile>(out, s, v_tile, 0);
    ptx::block_sync("forward: all are done with this tile");
  }
  ptx::copies_wait<0>("forward: nothing is on its way");
  store<F>(p, b, h, row, column, state, out, to_log2, head.dropout_factor);
}

}  // namespace sm80
}  // namespace fa
