// Forward on Ampere-class tensor cores (mma.sync, cp.async): FlashAttention-2 (Dao 2023, algorithm
// 1). A block has 128 rows, a warp 32 of them (half as many for D > 128); a tile's keys, then its
// values are computed with while the next ones are loading. Calls of few rows go to decode.
#pragma once
#include "../mask_tiles.cuh"
#include "../softmax.cuh"
#include "product.cuh"

namespace fa {
namespace sm80 {

// kD and kDv are the padded head dims; a plain kernel supports scale, band and sinks only.
template <class Type_, int kD_, int kDv_, bool kGeneral_>
struct Forward {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_;
  // Tiles of 16 rows of a warp. Two halve the reads of shared memory, which otherwise cost as much
  // as the products; the registers of a lane hold their outputs up to 128 columns.
  static constexpr int kTiles = kD <= 128 ? 2 : 1;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kTiles * kWarps;
  // Beside outputs of 128 columns, registers have room for the mask of 32 keys.
  static constexpr int kKeys = kD <= (kGeneral ? 96 : 128) ? 64 : 32;
  static constexpr bool kKeepQ = kD <= 64 && !kGeneral;  // in registers, else read for each tile
  using QTile = Tile<kRows, kD>;
  using KTile = Tile<kKeys, kD>;
  using VTile = Tile<kKeys, kDv>;
  // One is computed with while two are loading. All leaves room for two blocks in the 164 KB of
  // sm_80, and fits the 99 KB of sm_86 and sm_89.
  static constexpr int kBuffers = 3;
  static constexpr int kBufferBytes = KTile::kBytes > VTile::kBytes ? KTile::kBytes : VTile::kBytes;
  static constexpr int kSharedBytes = QTile::kBytes + kBuffers * kBufferBytes;
  static_assert(kSharedBytes <= kLeastShared, "a block has no room on sm_86 and sm_89");
  static constexpr bool kPaged = false, kTiled = false;
  static constexpr MaskTiling kTiling = {kRows, kKeys};
};

// The same over pages, as a separate kernel: finding pages takes registers.
template <class Type, int kD, int kDv, bool kGeneral>
struct PagedForward : Forward<Type, kD, kDv, kGeneral> {
  static constexpr bool kPaged = true;
};

// For masks with known tiles (mask_tiles.cuh): finding the next tile takes registers, too.
template <class Type, int kD, int kDv>
struct MaskedForward : Forward<Type, kD, kDv, true> {
  static constexpr bool kTiled = true;
};

// Stores 16 rows' outputs, times dropout's factor, and normalisers to global memory.
template <class F>
FA_DEVICE void store(const FaParams& p, const Head& head, int row, int column, Softmax& state,
                     Accumulator<F::kDv>& out, float to_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float level = state.level[half], sum = row_sum(state.sum[half]);
    const int64_t i = row + 8 * half;
    if (i >= p.M) continue;
    const float decay = count_sink<F::kGeneral>(p, head.b, head.h, level, sum);
    const float factor = sum == 0.0f ? 0.0f : head.dropout_factor * decay / sum;
    const OutputRow<typename F::Type> to(p.out, head.b, head.h, i, p.Dv);
#pragma unroll
    for (int n = 0; n < F::kDv / 8; ++n)
      to.store(8 * n + column, out[n][2 * half] * factor, out[n][2 * half + 1] * factor);
    if (column == 0) Normalisers(p, head.b, head.h).template store<F::kGeneral>(i, level, sum);
  }
}

// For all threads: true if keys of finfo.min were skipped for a row with no score far above them.
template <class F>
FA_DEVICE bool needs_least(const MaskStripe& mask, const FaParams& p, int64_t b, int64_t h,
                           int first_row, int begin, int end, unsigned char* memory) {
  const int thread = static_cast<int>(threadIdx.x), row = first_row + thread;
  const bool low = thread < F::kRows && row < p.M &&
                   !(Normalisers(p, b, h).lse[row * p.lse.stride[2]] > -0x1p126f);
  constexpr int kLast = F::QTile::kBytes + (F::kBuffers - 1) * F::kBufferBytes;
  auto* const said = reinterpret_cast<uint32_t*>(memory + kLast);  // not loaded to soon
  return mask.needs_least<F::kKeys, F::kThreads>(said, begin, end, low);
}

// A block for some rows of a head, the last rows first: with a causal band those have most to do.
// If keys of finfo.min may have been skipped, the kernel runs once more, `again`, for blocks with a
// row that has seen nothing else.
template <class F>
__global__ void __launch_bounds__(F::kThreads, 1) forward_kernel(const FaParams batch, bool again) {
  using Type = typename F::Type;
  FA_SHARED_MEMORY(memory);
  const int64_t blocks = (batch.M + F::kRows - 1) / F::kRows;
  const int64_t head_at = blockIdx.x / blocks;
  const int64_t b = head_at / batch.H, h = head_at % batch.H, hk = key_head(batch, h);
  const Item p(batch, b);
  const int first_row = static_cast<int>(blocks - 1 - blockIdx.x % blocks) * F::kRows;
  if (first_row >= p.M) return;  // another item is longer
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = first_row + 16 * F::kTiles * warp;
  const int row = warp_row + lane / 4, column = 2 * (lane % 4);  // and row + 8, + 16, + 24

  const FaParams all = batch;  // with an item ptxas would keep more in registers
  const Head head(F::kGeneral ? all : p, b, h, diagonal(p, b));
  const float to_log2 = F::kGeneral ? kLog2e : head.scale * kLog2e;
  const KeyRange seen = key_range(p, b, first_row, least(first_row + F::kRows, p.M));
  const int begin = static_cast<int>(seen.lo) / F::kKeys * F::kKeys;
  const int end = static_cast<int>(seen.hi);
  const MaskStripe mask(batch, F::kTiling, b, h, first_row, again);
  if constexpr (F::kTiled)
    if (again && !needs_least<F>(mask, p, b, h, first_row, begin, end, memory)) return;
  bool read_next = false;  // must the mask of the next tile be read?
  const auto visible_tile = [&](int from) {
    if constexpr (F::kTiled)
      return mask.template visible_tile<F::kKeys>(from, end, read_next);
    else
      return from;
  };
  const int start = visible_tile(begin);
  const KeyRange by_all = common_range(p, b, warp_row, least(warp_row + 16 * F::kTiles, p.M));
  const int all_from = static_cast<int>(by_all.lo), all_to = static_cast<int>(by_all.hi);
  const Visible visible(p, b);
  const auto places = [&](int r, int key) { return Places<false>{head, row + 16 * r, key}; };
  const MaskLines lines[2] = {MaskLines(places(0, 0)), MaskLines(places(F::kTiles - 1, 0))};

  const Matrix q = matrix_of(p.q, b, h, p.M, p.D);
  const auto keys_of = [&](const FaTensor& own, const FaTensor& pages, int64_t columns) {
    const Matrix rows = matrix_of(own, b, hk, end, columns);
    if constexpr (F::kPaged)
      return KeyRows(rows, batch, pages, b, begin, F::kKeys);
    else
      return rows;
  };
  const auto k = keys_of(p.k, batch.k, p.D), v = keys_of(p.v, batch.v, p.Dv);
  // Keys and values are loaded alternately, each to the buffer after the previous one's.
  const auto buffer = [&](int i) { return memory + F::QTile::kBytes + i * F::kBufferBytes; };
  const auto after = [](int i) { return i == F::kBuffers - 1 ? 0 : i + 1; };
  const auto before = [](int i) { return i == 0 ? F::kBuffers - 1 : i - 1; };
  const auto load_keys = [&](int first, int to) {
    if (first < end) load_tile<typename F::KTile, F::kThreads>(buffer(to), k, first);
    ptx::copies_commit("forward: keys");
  };
  const auto load_values = [&](int first, int to) {
    if (first < end) load_tile<typename F::VTile, F::kThreads>(buffer(to), v, first);
    ptx::copies_commit("forward: values");
  };

  Softmax state[F::kTiles];
#pragma unroll
  for (Softmax& one : state) one = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  float out[F::kTiles][F::kDv / 8][4] = {};
  uint32_t left[F::kKeepQ ? F::kD / 16 : 1][F::kTiles][4];

  load_tile<typename F::QTile, F::kThreads>(memory, q, first_row);
  load_keys(start, 0);
  load_values(start, 1);
  if (F::kKeepQ) {
    ptx::copies_wait<1>("forward: the rows have landed");
    ptx::block_sync("forward: all see the rows");
#pragma unroll
    for (int d = 0; d < F::kD / 16; ++d)
#pragma unroll
      for (int r = 0; r < F::kTiles; ++r)
        load_left<typename F::QTile>(left[d][r], ptx::shared_address(memory), F::kTiles * warp + r,
                                     d);
  }
  for (int first = start, next, now = 0; first < end; first = next, now = after(now)) {
    ptx::copies_wait<1>("forward: the keys have landed");
    ptx::block_sync("forward: all see the keys, and are done with the values before");
    const bool read = F::kTiled ? read_next : F::kGeneral;
    next = visible_tile(first + F::kKeys);
    load_keys(next, before(now));  // to where those values were

    MaskPairs<F::kKeys / 8> pairs;
    const auto ask = [&](int r) { load_mask(pairs, lines[r], places(r, first + column)); };
    if (read) ask(0);
    float s[F::kTiles][F::kKeys / 8][4] = {};
    const uint32_t q_tile = ptx::shared_address(memory), k_tile = ptx::shared_address(buffer(now));
    // Fully unrolled, ptxas would compute more addresses ahead than there are registers.
    constexpr bool k90 = ptx::kArch >= 90, kMore = F::kPaged || F::kTiled;
    constexpr int kSteps = F::kD == 128 && k90                                 ? (F::kPaged ? 4 : 2)
                           : F::kD == 96 && F::kGeneral && (F::kTiled || !k90) ? 3
                           : F::kD == 256 && F::kGeneral && kMore              ? 8
                                                                               : F::kD / 16;
#pragma unroll(kSteps)
    for (int d = 0; d < F::kD / 16; ++d) {
      uint32_t (&a)[F::kTiles][4] = left[F::kKeepQ ? d : 0];
      if (!F::kKeepQ)
#pragma unroll
        for (int r = 0; r < F::kTiles; ++r)
          load_left<typename F::QTile>(a[r], q_tile, F::kTiles * warp + r, d);
      add_products<Type, typename F::KTile>(s, a, k_tile, d);
    }

    LeftSides<F::kKeys / 8> weights[F::kTiles];
    const bool whole = all_from <= first && first + F::kKeys <= all_to;
#pragma unroll
    for (int r = 0; r < F::kTiles; ++r) {
      const Places<false> at = places(r, first + column);
      if (F::kGeneral) logits(s[r], at, lines[r], pairs, NoGradient(), read);
      if (read && r + 1 < F::kTiles) ask(r + 1);
      if (!whole) hide(s[r], at, visible, p.M, NoGradient());
      update<F::kGeneral>(state[r], s[r], out[r], to_log2);
      if (F::kGeneral && p.dropout_p > 0) drop(s[r], draw<F::kKeys / 8>(at));
      pack_weights<Type>(weights[r], s[r]);
    }

    ptx::copies_wait<1>("forward: the values have landed");
    ptx::block_sync("forward: all see the values, and are done with the keys");
    load_values(next, now);
    now = after(now);
    multiply_values<Type, typename F::VTile>(out, weights, ptx::shared_address(buffer(now)));
  }
  ptx::copies_wait<0>("forward: nothing is on its way");
#pragma unroll
  for (int r = 0; r < F::kTiles; ++r)
    store<F>(p, head, row + 16 * r, column, state[r], out[r], to_log2);
}

}  // namespace sm80
}  // namespace fa
