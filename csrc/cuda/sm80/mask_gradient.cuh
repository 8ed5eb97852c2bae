// The gradient of a float mask, in the mask's own shape: ds summed over the dimensions along which
// it is broadcast. Each block owns some of its elements and visits all ds that add to them, in one
// order; it computes ds anew, so that no M x N buffer exists unless the mask is one.
#pragma once
#include "backward.cuh"

namespace fa {
namespace sm80 {

FA_DEVICE void write(const FaTensor& x, int64_t at, float value) {
  if (x.dtype == FA_F32)
    static_cast<float*>(x.data)[at] = value;
  else if (x.dtype == FA_BF16)
    static_cast<uint16_t*>(x.data)[at] = static_cast<uint16_t>(ptx::pack(ptx::BF16(), value, 0));
  else
    static_cast<uint16_t*>(x.data)[at] = static_cast<uint16_t>(ptx::pack(ptx::F16(), value, 0));
}

// The parts of one dimension among which blocks are divided: one, if the mask is broadcast along
// it.
struct Extent {
  int64_t parts;
  bool summed;
};
FA_SHARED Extent extent(const FaParams& p, int dim, int64_t whole) {
  const bool summed = p.dmask.stride[dim] == 0;
  return {summed ? 1 : whole, summed};  // of size 0, too: an empty sum
}

template <class B>
FA_SHARED int64_t tiles_of_rows(const FaParams& p) {
  return (p.M + B::kStaying - 1) / B::kStaying;
}
template <class B>
FA_SHARED int64_t tiles_of_keys(const FaParams& p) {
  return (p.N + B::kPassing - 1) / B::kPassing;
}

// Adds ds of one tile to total.
template <class B>
FA_DEVICE void add_tile(Accumulator<B::kPassing>& total, unsigned char* memory, const Item& p,
                        float* workspace, int64_t b, int64_t h, int first_row, int first_key) {
  if (first_row >= p.M) return;  // another item is longer
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row + 16 * warp + lane / 4, column = first_key + 2 * (lane % 4);
  const int64_t last_row = least(first_row + B::kStaying, p.M);
  const KeyRange seen = key_range(p, b, first_row, last_row);
  if (seen.hi <= first_key || first_key + B::kPassing <= seen.lo) return;

  const int64_t hk = key_head(p, h);
  unsigned char* const left2 = memory + B::Left1::kBytes;
  unsigned char* const right1 = left2 + B::Left2::kBytes;
  unsigned char* const right2 = right1 + B::Right1::kBytes;
  load_tile<typename B::Left1, B::kThreads>(memory, matrix_of(p.q, b, h, p.M, p.D), first_row);
  load_tile<typename B::Right1, B::kThreads>(right1, matrix_of(p.k, b, hk, seen.hi, p.D),
                                             first_key);
  if constexpr (!B::kGiven) {
    load_tile<typename B::Left2, B::kThreads>(left2, matrix_of(p.dout, b, h, p.M, p.Dv), first_row);
    load_tile<typename B::Right2, B::kThreads>(right2, matrix_of(p.v, b, hk, seen.hi, p.Dv),
                                               first_key);
  }
  ptx::copies_commit("mask: a tile");
  ptx::copies_wait<0>("mask: it has landed");
  ptx::block_sync("mask: all see this tile");
  const Head head(p, b, h, diagonal(p, b));
  const Places<false> places = {head, row, column};
  const MaskLines mask[1] = {MaskLines(places)};
  MaskPairs<B::kPassing / 8> pairs[1];
  load_mask(pairs[0], mask[0], places);
  Strips<1, B::kPassing> s = {}, dp = {};
  const Left<typename B::Left1, 1, false> first_left(memory, warp);
  product<typename B::Type, typename B::Right1>(s, first_left, ptx::shared_address(right1), 0);
  const Corner corner = {row, column};
  if constexpr (B::kGiven) {
    read_given<B>(dp, p, b, h, corner);
  } else {
    const Left<typename B::Left2, 1, false> second_left(left2, warp);
    product<typename B::Type, typename B::Right2>(dp, second_left, ptx::shared_address(right2), 0);
  }
  const RowStates states(p, workspace, b, h);
  const RowState staying[1][2] = {{states.at(row), states.at(row + 8)}};
  const int rows = static_cast<int>(p.M);
  differentiate<B>(s, dp, head, Visible(p, b), rows, false, staying, 0, mask, pairs, corner);
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) total[n][e] += dp[0][n][e];
  ptx::block_sync("mask: all are done with this tile");
}

// Sums over the rows of the block, left in the lanes of the first row; or over its columns, left in
// the first column.
template <class B>
FA_DEVICE void sum_rows(Accumulator<B::kPassing>& total, unsigned char* memory) {
  auto* sums = reinterpret_cast<float*>(memory);  // of each warp
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      float sum = total[n][pass] + total[n][2 + pass];
      for (int flip = 4; flip < 32; flip *= 2) sum += ptx::shuffle_xor(sum, flip);
      if (lane < 4) sums[warp * B::kPassing + 8 * n + 2 * lane + pass] = sum;
    }
  ptx::block_sync("mask: every warp has its sums");
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      float sum = 0.0f;
      for (int from = 0; from < B::kWarps; ++from)
        sum += sums[from * B::kPassing + 8 * n + 2 * (lane % 4) + pass];
      total[n][pass] = sum;
    }
}

template <class B>
FA_DEVICE void sum_columns(Accumulator<B::kPassing>& total) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < B::kPassing / 8; ++n) sum += total[n][2 * half] + total[n][2 * half + 1];
    total[0][2 * half] = row_sum(sum);
  }
}

template <class B>
__global__ void __launch_bounds__(B::kThreads, 1)
    mask_gradient_kernel(const FaParams batch, float* workspace) {
  FA_SHARED_MEMORY(memory);
  const Extent of_b = extent(batch, 0, batch.B), of_h = extent(batch, 1, batch.H);
  const Extent of_i = extent(batch, 2, tiles_of_rows<B>(batch));
  const Extent of_j = extent(batch, 3, tiles_of_keys<B>(batch));
  int64_t task = blockIdx.x;
  const int64_t own_j = task % of_j.parts, own_i = task / of_j.parts % of_i.parts;
  task /= of_j.parts * of_i.parts;
  const int64_t own_h = task % of_h.parts, own_b = task / of_h.parts;

  const auto each = [](const Extent& of, int64_t own, int64_t whole, auto body) {
    for (int64_t x = of.summed ? 0 : own; x < (of.summed ? whole : own + 1); ++x) body(x);
  };
  Accumulator<B::kPassing> total = {};
  each(of_b, own_b, batch.B, [&](int64_t b) {
    const Item item(batch, b);
    each(of_h, own_h, batch.H, [&](int64_t h) {
      each(of_i, own_i, tiles_of_rows<B>(batch), [&](int64_t i) {
        each(of_j, own_j, tiles_of_keys<B>(batch), [&](int64_t j) {
          add_tile<B>(total, memory, item, workspace, b, h, static_cast<int>(i) * B::kStaying,
                      static_cast<int>(j) * B::kPassing);
        });
      });
    });
  });
  if (of_i.summed) sum_rows<B>(total, memory);
  if (of_j.summed) sum_columns<B>(total);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Item p(batch, own_b);
  const int64_t* stride = p.dmask.stride;
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t row = 16 * warp + lane / 4 + 8 * (e / 2);
      const int64_t column = 8 * n + 2 * (lane % 4) + e % 2;
      const int64_t i = of_i.summed ? row : own_i * B::kStaying + row;
      const int64_t j = of_j.summed ? column : own_j * B::kPassing + column;
      if (i >= (of_i.summed ? 1 : p.M) || j >= (of_j.summed ? 1 : p.N)) continue;
      write(p.dmask, own_b * stride[0] + own_h * stride[1] + i * stride[2] + j * stride[3],
            total[n][e]);
    }
}

template <class B>
int start_mask_gradient(const FaParams& p, float* workspace, void* stream) {
  const int64_t blocks = extent(p, 0, p.B).parts * extent(p, 1, p.H).parts *
                         extent(p, 2, tiles_of_rows<B>(p)).parts *
                         extent(p, 3, tiles_of_keys<B>(p)).parts;
  static_assert(B::kSharedBytes <= kLeastShared, "a block has no room on sm_86 and sm_89");
  return launch_blocks("mask_gradient_kernel", mask_gradient_kernel<B>, blocks, B::kThreads,
                       B::kSharedBytes, stream, p, workspace);
}

}  // namespace sm80
}  // namespace fa
