// Backward on Ampere-class tensor cores, in two kernels of one shape (Dao 2023, algorithm 2, with
// the loops turned about so that nothing is added across blocks: results are the same every time).
//
// One side of the scores stays: rows of q and dout for dq, keys and values for dk and dv. Tiles of
// the other side come by. With L and R the left and right of a product,
//
//   s  = L1 R1^T,  L1 stays: q or k           p  = exp(s - normaliser)
//   dp = L2 R2^T,  L2 stays: dout or v        ds = p (dp - delta)
//   first += ds R1: dq or dk                  second += p R2: dv
//
// The backward pass of the weights takes the same road. There dp is an input, no values exist, and
// delta is a sum over keys: it has a kernel, in which a row's p dp are added up.
#pragma once
#include "../launch.h"
#include "product.cuh"

namespace fa {
namespace sm80 {

enum Gradient { kOfQ, kOfKV, kOfK, kOfV, kOfMask, kDelta };  // what a kernel makes

// Without values, kDv = 0, dp is given.
template <class Type_, int kD_, int kDv_, Gradient kWhat_, bool kGeneral_>
struct Backward {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_, kWidest = kD > kDv ? kD : kDv;
  static constexpr Gradient kWhat = kWhat_;
  static constexpr bool kGeneral = kGeneral_, kGiven = kDv == 0;
  static constexpr bool kKeysStay = kWhat == kOfKV || kWhat == kOfK || kWhat == kOfV;
  static constexpr bool kFirst = kWhat != kOfV && kWhat != kDelta;
  static constexpr bool kSecond = kWhat == kOfKV || kWhat == kOfV;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kStaying = 16 * kWarps;
  static constexpr int kPassing = kWidest <= 64 ? 64 : kWidest <= 192 ? 32 : 16;
  using Left1 = Tile<kStaying, kD>;
  using Left2 = Tile<kStaying, kDv>;
  using Right1 = Tile<kPassing, kD>;
  using Right2 = Tile<kPassing, kDv>;
  static constexpr int kStageBytes = Right1::kBytes + Right2::kBytes;
  static constexpr int kSharedBytes = Left1::kBytes + Left2::kBytes + 2 * kStageBytes;
};

// What a lane knows of a row.
struct RowState {
  Normaliser normaliser;
  float delta;
};

// Of the rows of one query head.
template <bool general>
struct RowStates {
  Normalisers normalisers;
  const float* deltas;
  int rows;

  FA_DEVICE RowStates(const FaParams& p, const float* deltas, int64_t b, int64_t h)
      : normalisers(p, b, h), deltas(deltas + (b * p.H + h) * p.M), rows(static_cast<int>(p.M)) {}
  FA_DEVICE RowState at(int i) const {
    if (i >= rows) return {{INFINITY, 0.0f}, 0.0f};
    return {normalisers.at<general>(i), deltas[i]};
  }
};

// Products of one tile become weights, and dp becomes ds, by the scaled products or by the mask.
// (row, column) is the lane's first element: a row or key that stays, and one that passes.
template <class B>
FA_DEVICE void differentiate(Accumulator<B::kPassing>& s, Accumulator<B::kPassing>& dp,
                             const Head& head, const Visible& visible,
                             const RowStates<B::kGeneral>& states,
                             const RowState (&staying)[2], int row, int column) {
  const float to_log2 = B::kGeneral ? kLog2e : head.scale * kLog2e;
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      const int passing = column + 8 * n + pass;
      RowState state = {};
      if (B::kKeysStay) state = states.at(passing);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int stays = row + 8 * half, e = 2 * half + pass;
        const int i = B::kKeysStay ? passing : stays, j = B::kKeysStay ? stays : passing;
        if (!B::kKeysStay) state = staying[half];
        if (i >= states.rows || !visible.holds(i, j)) {
          s[n][e] = dp[n][e] = 0.0f;
          continue;
        }
        float derivative = 1.0f;
        const float logit = B::kGeneral ? head.logit(s[n][e], i, j, derivative) : s[n][e];
        const float weight = probability<B::kGeneral>(logit, state.normaliser, to_log2);
        float kept = 1.0f;
        if (B::kGeneral && head.p.dropout_p > 0) kept = head.dropped_one(i, j);
        dp[n][e] = weight * (dp[n][e] * kept - state.delta);
        // The mask is added after softcap.
        if (B::kWhat != kOfMask && B::kWhat != kDelta) dp[n][e] *= derivative;
        s[n][e] = weight * kept;
      }
    }
}

// s += L R^T of the warp's 16 rows of L, both in shared memory.
template <class B, class Left, class Right>
FA_DEVICE void product(Accumulator<B::kPassing>& s, uint32_t left, uint32_t right, int warp) {
#pragma unroll 4  // no more: ptxas would compute all addresses ahead, and spill
  for (int d = 0; d < Left::kColumns / 16; ++d) {
    uint32_t a[4];
    load_left<Left>(a, left, warp, d);
    add_products<typename B::Type, Right>(s, a, right, d);
  }
}

// dp of a tile where it is an input, or what a head has of the mean's.
template <class B>
FA_DEVICE void read_given(Accumulator<B::kPassing>& dp, const FaParams& p, int64_t b, int64_t h,
                          int row, int column) {
  const int64_t* stride = p.dweights.stride;
  const auto* data =
      static_cast<const uint16_t*>(p.dweights.data) + b * stride[0] + h * stride[1];
  const float share = p.average_heads ? 1.0f / static_cast<float>(p.H) : 1.0f;
#pragma unroll
  for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int stays = row + 8 * (e / 2), passing = column + 8 * n + e % 2;
      const int64_t i = B::kKeysStay ? passing : stays, j = B::kKeysStay ? stays : passing;
      if (i < p.M && j < p.N)
        dp[n][e] = share * ptx::widen(typename B::Type(), data[i * stride[2] + j * stride[3]]);
    }
}

template <class Type, int columns>
FA_DEVICE void store_gradient(const FaTensor& to, int64_t b, int64_t h, int row, int column,
                              int64_t rows, int64_t width, Accumulator<columns>& x, float factor) {
  if (!to.data) return;  // nobody wants it
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = row + 8 * half;
    if (i >= rows) continue;
    const OutputRow<Type> at(to, b, h, i, width);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n)
      at.store(8 * n + column, x[n][2 * half] * factor, x[n][2 * half + 1] * factor);
  }
}

// A block for 64 rows of one query head, or 64 keys of one key head and the rows of all query heads
// that read it, one after the other. Where deltas are what it makes, they are 0 before.
template <class B>
__global__ void __launch_bounds__(B::kThreads, 1) backward_kernel(const FaParams p, float* deltas) {
  FA_SHARED_MEMORY(memory);
  const int64_t heads = B::kKeysStay ? p.Hk : p.H, length = B::kKeysStay ? p.N : p.M;
  const int64_t blocks = (length + B::kStaying - 1) / B::kStaying;
  const int64_t head_at = blockIdx.x / blocks;
  const int64_t b = head_at / heads, staying_head = head_at % heads;
  const int first_row = static_cast<int>(blockIdx.x % blocks) * B::kStaying;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row + 16 * warp + lane / 4, column = 2 * (lane % 4);  // and row + 8
  const int64_t last_row = least(first_row + B::kStaying, length);

  const Visible visible(p, b);
  const KeyRange seen = B::kKeysStay ? row_range(p, b, first_row, last_row)
                                     : key_range(p, b, first_row, last_row);
  const int64_t group = p.H / p.Hk;
  const int64_t hk = B::kKeysStay ? staying_head : key_head(p, staying_head);
  const int start = static_cast<int>(seen.lo) / B::kPassing * B::kPassing;
  const int end = static_cast<int>(seen.hi);
  const int tiles = end <= start ? 0 : (end - start + B::kPassing - 1) / B::kPassing;
  const int steps = B::kKeysStay ? tiles * static_cast<int>(group) : tiles;
  const auto head_of = [&](int step) {
    return B::kKeysStay ? hk * group + step / tiles : staying_head;
  };

  unsigned char* const left2 = memory + B::Left1::kBytes;
  unsigned char* const stages = left2 + B::Left2::kBytes;
  // Rows past what is seen are not read: NaN may lie past a key length.
  const int64_t keys = B::kKeysStay ? visible.length : end;
  const Matrix k = matrix_of(p.k, b, hk, keys, p.D), v = matrix_of(p.v, b, hk, keys, p.Dv);
  const auto load_passing = [&](int step) {
    unsigned char* const to = stages + step % 2 * B::kStageBytes;
    const int first = start + step % tiles * B::kPassing;
    const int64_t h = head_of(step);
    const Matrix right1 = B::kKeysStay ? matrix_of(p.q, b, h, p.M, p.D) : k;
    const Matrix right2 = B::kKeysStay ? matrix_of(p.dout, b, h, p.M, p.Dv) : v;
    load_tile<typename B::Right1, B::kThreads>(to, right1, first);
    if constexpr (!B::kGiven)
      load_tile<typename B::Right2, B::kThreads>(to + B::Right1::kBytes, right2, first);
  };

  Accumulator<B::kFirst ? B::kD : 8> first = {};
  Accumulator<B::kSecond ? B::kDv : 8> second = {};
  float delta[2] = {0.0f, 0.0f};
  RowState staying[2] = {};
  if (steps > 0) {
    const int64_t h = staying_head;
    load_tile<typename B::Left1, B::kThreads>(
        memory, B::kKeysStay ? k : matrix_of(p.q, b, h, p.M, p.D), first_row);
    if constexpr (!B::kGiven && B::kFirst)
      load_tile<typename B::Left2, B::kThreads>(
          left2, B::kKeysStay ? v : matrix_of(p.dout, b, h, p.M, p.Dv), first_row);
    load_passing(0);
    if (!B::kKeysStay)
      for (int half = 0; half < 2; ++half)
        staying[half] = RowStates<B::kGeneral>(p, deltas, b, h).at(row + 8 * half);
  }
  ptx::copies_commit("backward: first tile");
  const uint32_t left1_tile = ptx::shared_address(memory), left2_tile = ptx::shared_address(left2);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_passing(step + 1);
    ptx::copies_commit("backward: next tile");
    ptx::copies_wait<1>("backward: this tile has landed");
    ptx::block_sync("backward: all see this tile");

    const uint32_t right1 = ptx::shared_address(stages + step % 2 * B::kStageBytes);
    const uint32_t right2 = right1 + B::Right1::kBytes;
    Accumulator<B::kPassing> s = {}, dp = {};
    product<B, typename B::Left1, typename B::Right1>(s, left1_tile, right1, warp);
    const int64_t h = head_of(step);
    const int passing = start + step % tiles * B::kPassing + column;
    if constexpr (B::kGiven)
      read_given<B>(dp, p, b, h, row, passing);
    else if (B::kFirst)
      product<B, typename B::Left2, typename B::Right2>(dp, left2_tile, right2, warp);
    const RowStates<B::kGeneral> states(p, deltas, b, h);
    differentiate<B>(s, dp, Head(p, b, h), visible, states, staying, row, passing);
    if constexpr (B::kFirst)
      multiply_values<typename B::Type, typename B::Right1>(first, dp, right1);
    if constexpr (B::kSecond)
      multiply_values<typename B::Type, typename B::Right2>(second, s, right2);
    if constexpr (B::kWhat == kDelta) {
#pragma unroll
      for (int n = 0; n < B::kPassing / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) delta[e / 2] += dp[n][e];
    }
    ptx::block_sync("backward: all are done with this tile");
  }
  ptx::copies_wait<0>("backward: nothing is on its way");

  using Type = typename B::Type;
  const float scale = static_cast<float>(p.scale);
  const FaTensor& of_first = B::kKeysStay ? p.dk : p.dq;
  if constexpr (B::kFirst)
    store_gradient<Type, B::kD>(of_first, b, staying_head, row, column, length, p.D, first, scale);
  if constexpr (B::kSecond)
    store_gradient<Type, B::kDv>(p.dv, b, staying_head, row, column, length, p.Dv, second, 1.0f);
  if constexpr (B::kWhat == kDelta) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      const float sum = row_sum(delta[half]);
      if (lane % 4 == 0 && i < p.M) deltas[(b * p.H + staying_head) * p.M + i] = sum;
    }
  }
}

template <class B>
int start_gradient(const FaParams& p, float* deltas, void* stream) {
  const int64_t heads = B::kKeysStay ? p.Hk : p.H, length = B::kKeysStay ? p.N : p.M;
  const int64_t blocks = (length + B::kStaying - 1) / B::kStaying * heads * p.B;
  return launch_blocks("backward_kernel", backward_kernel<B>, blocks, B::kThreads, B::kSharedBytes,
                       stream, p, deltas);
}

}  // namespace sm80
}  // namespace fa
