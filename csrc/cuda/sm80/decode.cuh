// Decode on Ampere-class tensor cores: few query rows, many keys. The cost is reading K and V, so
// the query heads that share them are rows of one tile, and the keys are split among blocks. A
// second kernel combines the blocks' softmaxes (Flash-Decoding, Dao et al. 2023).
#pragma once
#include "../decode_parts.cuh"
#include "../softmax.cuh"
#include "product.cuh"

namespace fa {
namespace sm80 {

// How many keys a tile has: K and V of one have at most 32 KB.
constexpr int decode_keys(int64_t d) { return d <= 64 ? 128 : d <= 128 ? 64 : 32; }

// kD and kDv are the padded head dims; a plain kernel supports scale, band and sinks only. A block
// has one tile of 16 rows, and its warps share the keys; or several tiles, and a warp for each.
template <class Type_, int kD_, int kDv_, int row_tiles, bool kGeneral_>
struct Decode {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kRows = 16 * row_tiles, kKeys = decode_keys(kD);
  static constexpr int kKeyWarps = row_tiles > 1 ? 1 : kKeys < 64 ? kKeys / 16 : 4;
  // More than 128 columns of values are too many for the registers of one warp: two have a half
  // each, and both compute the scores.
  static constexpr int kColumnWarps = kDv > 128 ? 2 : 1;
  static constexpr int kWarps = row_tiles * kKeyWarps * kColumnWarps, kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = kKeys / kKeyWarps, kWarpColumns = kDv / kColumnWarps;
  using QTile = Tile<kRows, kD>;
  using KTile = Tile<kKeys, kD>;
  using VTile = Tile<kKeys, kDv>;
  // One stage is computed with while the others are loading. Q is loaded first, to the place of the
  // last stage. All fits the 99 KB of sm_86 and sm_89.
  static constexpr int kStages = 3, kStageBytes = KTile::kBytes + VTile::kBytes;
  static constexpr int kLastBytes = QTile::kBytes > kStageBytes ? QTile::kBytes : kStageBytes;
  static constexpr int kSharedBytes = (kStages - 1) * kStageBytes + kLastBytes;
  static_assert(kSharedBytes <= kLeastShared, "a block has no room on sm_86 and sm_89");
  // The warps' results take the place of the stages, and fit as well: see Parts.
  static constexpr int kPartWidth = kDv + 8;  // spreads rows over the banks
  static_assert(kKeyWarps * kRows * (kPartWidth + 2) * 4 <= kSharedBytes, "no room for the parts");
};

// -- rows -----------------------------------------------------------------------------------------

// Row r of a key head is query i of head h: first the queries of its first head, then of its
// second, and so on. Past the last row, i is M.
struct Query {
  int64_t h, i;
};

FA_DEVICE Query query_of(const FaParams& p, int64_t hk, int r) {
  const int64_t group = p.H / p.Hk;
  const int M = static_cast<int>(p.M);
  if (r >= group * M) return {hk * group, M};
  return {hk * group + r / M, r % M};
}

// Where a lane's scores are: as Places with rows that stay, which may be of two heads.
struct QueryPlaces {
  static constexpr bool kKeysStay = false;
  const Head (&heads)[2];
  const Query (&queries)[2];
  int passes;

  // The compiler may not know `e` of drawn_h and i: an index would force both values into memory.
  FA_DEVICE const Head& head(int e) const { return heads[e / 2]; }
  FA_DEVICE uint32_t drawn_h(int e) const { return e < 2 ? heads[0].drawn_h : heads[1].drawn_h; }
  FA_DEVICE int passing(int k, int e) const { return passes + 8 * k + e % 2; }
  FA_DEVICE int i(int, int e) const {
    return static_cast<int>(e < 2 ? queries[0].i : queries[1].i);
  }
  FA_DEVICE int j(int k, int e) const { return passing(k, e); }
  FA_DEVICE int from(int e) const { return passes - i(0, e) - head(e).shift; }
  static FA_DEVICE int offset(int k, int e) { return 8 * k + e % 2; }
};

struct QueryRows : Matrix {
  static constexpr bool kEven = false;
  int64_t head_stride;
  int per_head;
  FA_DEVICE const uint16_t* row(int r) const {
    return data + r / per_head * head_stride + r % per_head * row_stride;
  }
};

FA_DEVICE QueryRows queries_of(const FaParams& p, int64_t b, int64_t hk) {
  const int64_t group = p.H / p.Hk;
  QueryRows q = {matrix_of(p.q, b, hk * group, group * p.M, p.D), p.q.stride[1],
                 static_cast<int>(p.M)};
  q.chunked = q.chunked && q.head_stride % 8 == 0;
  return q;
}

// -- parts of softmaxes ---------------------------------------------------------------------------

// Four columns of a row.
struct Merged {
  float level, sum;
  float4 out;

  FA_DEVICE void add(float weight, const float4& x) {
    out.x = fmaf(weight, x.x, out.x);
    out.y = fmaf(weight, x.y, out.y);
    out.z = fmaf(weight, x.z, out.z);
    out.w = fmaf(weight, x.w, out.w);
  }
};

template <bool general, int count>
FA_DEVICE Merged merge(const Parts& parts, int64_t row, int column) {
  Merged all = {-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
  for (int part = 0; part < count; ++part)
    all.level = fmaxf(all.level, parts.level[part * parts.rows + row]);
#pragma unroll
  for (int part = 0; part < count; ++part) {
    const float weight = parts.weight<general>(part, row, all.level);
    all.sum = fmaf(weight, parts.sum[part * parts.rows + row], all.sum);
    all.add(weight, *parts.columns(part, row, column));
  }
  return all;
}

// Writes the output of these columns, and with the first of them the normaliser.
template <class Type, bool general>
FA_DEVICE void finish(const FaParams& p, int64_t b, Query query, int column, Merged all) {
  const auto [h, i] = query;
  const float decay = count_sink<general>(p, b, h, all.level, all.sum);
  const float factor = all.sum == 0.0f ? 0.0f : decay / all.sum;
  const OutputRow<Type> to(p.out, b, h, i, p.Dv);
  to.store(column, all.out.x * factor, all.out.y * factor);
  to.store(column + 2, all.out.z * factor, all.out.w * factor);
  if (column == 0) Normalisers(p, b, h).template store<general>(i, all.level, all.sum);
}

// -- kernels --------------------------------------------------------------------------------------

// A block for some rows of a key head and one of `splits` shares of the keys that they see. Blocks
// that read the same keys are neighbours. Shared memory limits a multiprocessor before registers
// do: one block may have them all.
template <class F>
__global__ void __launch_bounds__(F::kThreads, 1) decode_kernel(const FaParams batch, int splits) {
  using Type = typename F::Type;
  FA_SHARED_MEMORY(memory);
  const int64_t group = batch.H / batch.Hk;
  const int blocks = (static_cast<int>(group * batch.M) + F::kRows - 1) / F::kRows;
  const int first_row = static_cast<int>(blockIdx.x) % blocks * F::kRows;
  const int share = static_cast<int>(blockIdx.x) / blocks, split = share % splits;
  const int64_t hk = share / splits % batch.Hk, b = share / splits / batch.Hk;
  const Item p(batch, b);
  const int rows = static_cast<int>(group * p.M);
  if (first_row >= rows) return;  // another item has more

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32, row_tile = warp / (F::kKeyWarps * F::kColumnWarps);
  const int key_warp = warp / F::kColumnWarps % F::kKeyWarps;
  const int first_column = warp % F::kColumnWarps * F::kWarpColumns;
  const int row = 16 * row_tile + lane / 4, column = 2 * (lane % 4);  // of the block; and row + 8
  const Query query[2] = {query_of(p, hk, first_row + row), query_of(p, hk, first_row + row + 8)};
  const Head head[2] = {Head(batch, b, query[0].h, diagonal(p, b)),
                        Head(batch, b, query[1].h, diagonal(p, b))};
  const Visible visible(p, b);
  const MaskLines mask(QueryPlaces{head, query, 0});
  const float to_log2 = F::kGeneral ? kLog2e : head[0].scale * kLog2e;

  const KeyRange seen = key_range(p, b, 0, p.M), by_all = common_range(p, b, 0, p.M);
  const int begin = static_cast<int>(seen.lo) / 8 * 8;  // see mask.cuh, dropout.cuh
  const int end = static_cast<int>(seen.hi);
  const int64_t all_tiles = (end - begin + F::kKeys - 1) / F::kKeys;
  const int first_tile = static_cast<int>(all_tiles * split / splits);
  const int tiles = static_cast<int>(all_tiles * (split + 1) / splits) - first_tile;
  const int start = begin + first_tile * F::kKeys;

  const KeyRows k(matrix_of(p.k, b, hk, end, p.D), batch, batch.k, b, begin, F::kKeys);
  const KeyRows v(matrix_of(p.v, b, hk, end, p.Dv), batch, batch.v, b, begin, F::kKeys);
  const auto load = [&](int tile) {
    if (tile < tiles) {
      unsigned char* const to = memory + tile % F::kStages * F::kStageBytes;
      load_tile<typename F::KTile, F::kThreads>(to, k, start + tile * F::kKeys);
      load_tile<typename F::VTile, F::kThreads>(to + F::KTile::kBytes, v, start + tile * F::kKeys);
    }
    ptx::copies_commit("decode: a tile");
  };

  unsigned char* const q_tile = memory + (F::kStages - 1) * F::kStageBytes;
  load_tile<typename F::QTile, F::kThreads>(q_tile, queries_of(p, b, hk), first_row);
  ptx::copies_commit("decode: the rows");
#pragma unroll
  for (int tile = 0; tile < F::kStages - 1; ++tile) load(tile);
  ptx::copies_wait<F::kStages - 1>("decode: the rows have landed");
  ptx::block_sync("decode: all see the rows");
  uint32_t left[F::kD / 16][4];
#pragma unroll
  for (int d = 0; d < F::kD / 16; ++d)
    load_left<typename F::QTile>(left[d], ptx::shared_address(q_tile), row_tile, d);

  Softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  Accumulator<F::kWarpColumns> out = {};
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::copies_wait<F::kStages - 2>("decode: this tile has landed");
    ptx::block_sync("decode: all see this tile and are done with the one before");
    load(tile + F::kStages - 1);  // to where the one before was
    if (first_row + 16 * row_tile >= rows) continue;

    const uint32_t k_tile = ptx::shared_address(memory + tile % F::kStages * F::kStageBytes);
    const int at = key_warp * F::kWarpKeys, first = start + tile * F::kKeys + at;  // this warp's
    const QueryPlaces places = {head, query, first + column};
    MaskPairs<F::kWarpKeys / 8> pairs;
    if (F::kGeneral) load_mask(pairs, mask, places);
    Accumulator<F::kWarpKeys> s = {};
#pragma unroll
    for (int d = 0; d < F::kD / 16; ++d)
      add_products<Type, typename F::KTile>(s, left[d], k_tile, d, at / 16);
    const bool whole = by_all.lo <= first && first + F::kWarpKeys <= by_all.hi;
    if (F::kGeneral) logits(s, places, mask, pairs, NoGradient());
    if (!whole) hide(s, places, visible, p.M, NoGradient());
    update<F::kGeneral>(state, s, out, to_log2);
    if (F::kGeneral && p.dropout_p > 0) drop(s, draw<F::kWarpKeys / 8>(places));
    multiply_values<Type, typename F::VTile>(out, s, k_tile + F::KTile::kBytes, at / 16,
                                             first_column / 16);
  }

  ptx::block_sync("decode: all are done with the last tile");
  const Parts parts(memory, F::kKeyWarps, F::kRows, F::kPartWidth);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = key_warp * F::kRows + row + 8 * half;
    const float sum = row_sum(state.sum[half]);
    if (first_column + column == 0) {
      parts.level[at] = state.level[half];
      parts.sum[at] = sum;
    }
    const float factor = head[half].dropout_factor;
    float* const to = parts.out + at * F::kPartWidth + first_column + column;
#pragma unroll
    for (int n = 0; n < F::kWarpColumns / 8; ++n)
      *reinterpret_cast<float2*>(to + 8 * n) = {out[n][2 * half] * factor,
                                                out[n][2 * half + 1] * factor};
  }
  ptx::block_sync("decode: the warps' parts are there");

  const Parts to = splits_of(batch, splits);
  for (int x = thread; x < F::kRows * F::kDv / 4; x += F::kThreads) {
    const int r = x / (F::kDv / 4), d = x % (F::kDv / 4) * 4;
    if (first_row + r >= rows || d >= p.Dv) continue;
    const Merged all = merge<F::kGeneral, F::kKeyWarps>(parts, r, d);
    if (splits == 1) {
      finish<Type, F::kGeneral>(p, b, query_of(p, hk, first_row + r), d, all);
      continue;
    }
    const int64_t at = b * batch.H * batch.M + hk * rows + first_row + r;
    *to.columns(split, at, d) = all.out;
    if (d == 0) {
      to.level[split * to.rows + at] = all.level;
      to.sum[split * to.rows + at] = all.sum;
    }
  }
}

constexpr int kCombineWarps = 4;

// A block for a row; its warps take the row's splits in turns.
template <class Type, bool general>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_kernel(const FaParams batch, int splits) {
  FA_SHARED_MEMORY(memory);
  const int64_t row = blockIdx.x, of_item = batch.H * batch.M, b = row / of_item;
  if (row % of_item >= batch.H * Item(batch, b).M) return;  // another item has more
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Parts parts = splits_of(batch, splits);

  Merged all = {-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
  for (int part = lane; part < splits; part += 32)
    all.level = fmaxf(all.level, parts.level[part * parts.rows + row]);
  for (int flip = 16; flip; flip /= 2)
    all.level = fmaxf(all.level, ptx::shuffle_xor(all.level, flip));
  for (int part = lane; part < splits; part += 32)
    all.sum = fmaf(parts.weight<general>(part, row, all.level), parts.sum[part * parts.rows + row],
                   all.sum);
  for (int flip = 16; flip; flip /= 2) all.sum += ptx::shuffle_xor(all.sum, flip);

  auto* sums = reinterpret_cast<float4*>(memory);  // [kCombineWarps][width / 4]
  for (int x = lane; x < parts.width / 4; x += 32) {
    Merged mine = {};
#pragma unroll 4
    for (int part = warp; part < splits; part += kCombineWarps)
      mine.add(parts.weight<general>(part, row, all.level), *parts.columns(part, row, 4 * x));
    sums[warp * (parts.width / 4) + x] = mine.out;
  }
  ptx::block_sync("combine: the warps' sums are there");
  const Item p(batch, b);
  const Query query = {row % of_item / p.M, row % of_item % p.M};
  for (int x = thread; x < parts.width / 4; x += 32 * kCombineWarps) {
    for (int from = 0; from < kCombineWarps; ++from)
      all.add(1.0f, sums[from * (parts.width / 4) + x]);
    finish<Type, general>(p, b, query, 4 * x, all);
  }
}

}  // namespace sm80
}  // namespace fa
