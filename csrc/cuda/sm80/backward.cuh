// Backward on Ampere-class tensor cores, in kernels of one structure (Dao 2023, algorithm 2). Sums
// have a fixed order, so results are the same every time.
//
// One side of the scores stays in a block: keys and values for dk and dv, rows of q and dout for
// dq. Tiles of the other side pass. For narrow heads one kernel computes all three: keys stay, and
// blocks add to dq in turn (dq_accum.cuh). With L and R the left and right of a product,
//
//   s  = L1 R1^T,  L1 stays: q or k           p  = exp(s - normaliser)
//   dp = L2 R2^T,  L2 stays: dout or v        ds = p (dp - delta)
//   first += ds R1: dq or dk                  second += p R2: dv
//
// The backward pass of the weights uses the same kernels. There dp is an input, no values exist,
// and delta is a sum over keys: a separate kernel adds up a row's p dp.
#pragma once
#include "../launch.h"
#include "dq_accum.cuh"

namespace fa {
namespace sm80 {

enum Gradient { kOfQ, kOfAll, kOfK, kOfV, kOfMask, kDelta };  // what a kernel computes

// Without values, kDv = 0, dp is given.
template <class Type_, int kD_, int kDv_, Gradient kWhat_, bool kGeneral_>
struct Backward {
  using Type = Type_;
  static constexpr int kD = kD_, kDv = kDv_, kWidest = kD > kDv ? kD : kDv;
  static constexpr Gradient kWhat = kWhat_;
  static constexpr bool kGeneral = kGeneral_, kGiven = kDv == 0;
  static constexpr bool kKeysStay = kWhat == kOfAll || kWhat == kOfK || kWhat == kOfV;
  static constexpr bool kFirst = kWhat != kOfV && kWhat != kDelta;
  static constexpr bool kSecond = kWhat == kOfAll || kWhat == kOfV;
  static constexpr bool kInTurn = kWhat == kOfAll;  // blocks add to dq, too
  static constexpr bool kMakesSums = kWhat != kOfMask && kWhat != kDelta;
  // 32 rows a warp read shared memory half as often as 16, if a lane has registers for their sums;
  // beside 128 columns of sums it has some for a tile of dq, but not for features. What stays is
  // held in registers, too, up to so many: with more, ptxas spills.
  static constexpr int kColumns = (kFirst ? kD : 0) + (kSecond ? kDv : 0);
  static constexpr bool kFew = kColumns < 128 || (kColumns == 128 && kInTurn && !kGeneral);
  static constexpr int kStrips = kMakesSums && kFew ? 2 : 1;
  static constexpr int kSums = kStrips * kColumns / 2, kOneSide = kStrips * kWidest / 4;
  // No feature changes dp first: products are accumulated onto - delta.
  static constexpr bool kDeltaFirst = !kGeneral && kFirst && kSums < 128;
  static constexpr bool kMayHold = kMakesSums && kWidest <= 128;
  static constexpr int kMost1 = kStrips == 2 ? 96 : kInTurn ? 112 : 128;
  static constexpr bool kHolds1 = kMayHold && kSums + kOneSide <= kMost1;
  static constexpr bool kHolds2 =
      kMayHold && !kGiven && kFirst && kSums + 2 * kOneSide <= (kStrips == 2 ? 96 : 128);
  static constexpr bool kHoldsAll = kHolds1 && (kHolds2 || kGiven || !kFirst);
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kStaying = 16 * kStrips * kWarps;
  static constexpr int kPassing = kHoldsAll || (kWidest <= 64 && !kInTurn) ? 64
                                  : kWidest <= 192                         ? 32
                                                                           : 16;
  // How many of the passing rows or keys are in registers at a time.
  static constexpr bool kMany = kStrips == 1 && kWidest <= 128 && (kKeysStay || kGeneral);
  static constexpr int kAtOnce = !kMakesSums ? kPassing : kMany ? 32 : 16;
  using Left1 = Tile<kStaying, kD>;
  using Left2 = Tile<kStaying, kDv>;
  using Right1 = Tile<kPassing, kD>;
  using Right2 = Tile<kPassing, kDv>;
  using States = StateTile<kPassing>;
  static constexpr int kLeftBytes = Left1::kBytes + Left2::kBytes;
  static constexpr int kStageBytes =
      Right1::kBytes + Right2::kBytes + (kKeysStay ? (States::kBytes + 127) / 128 * 128 : 0);
  static constexpr int kScoresAt = kLeftBytes + 2 * kStageBytes;
  static constexpr int kTicketAt = kScoresAt + (kInTurn ? kStaying * kPassing * 2 : 0);
  static constexpr int kSharedBytes = kTicketAt + (kInTurn ? 16 : 0);
  static constexpr bool kTiled = false;
  static constexpr MaskTiling kTiling = {kKeysStay ? kPassing : kStaying,
                                         kKeysStay ? kStaying : kPassing};
};

// For masks with known tiles: separate kernels, as in forward.cuh.
template <class Type, int kD, int kDv, Gradient kWhat>
struct MaskedBackward : Backward<Type, kD, kDv, kWhat, true> {
  static constexpr bool kTiled = true;
};

// What a block computes gradients of: rows of one query head, the last rows first, as with a causal
// band those have most to do; or keys of one key head, the first keys first. Blocks that add in
// turn take the last keys first, of some heads at a time, so that fewer begin behind one another.
template <class B>
struct Task {
  int b, head, first_row;

  FA_DEVICE Task(const FaParams& p, unsigned index) {
    const auto heads = static_cast<unsigned>(B::kKeysStay ? p.Hk : p.H);
    const auto blocks =
        (static_cast<unsigned>(B::kKeysStay ? p.N : p.M) + B::kStaying - 1) / B::kStaying;
    constexpr unsigned kTogether = B::kInTurn ? 8 : 1;
    const unsigned before = index / (blocks * kTogether) * kTogether;  // heads
    const unsigned left = heads * static_cast<unsigned>(p.B) - before;
    const unsigned together = left < kTogether ? left : kTogether, own = index - before * blocks;
    const unsigned of = before + own % together;
    constexpr bool kBackwards = !B::kKeysStay || B::kInTurn;
    const unsigned block = kBackwards ? blocks - 1 - own / together : own / together;
    b = static_cast<int>(of / heads);
    head = static_cast<int>(of % heads);
    first_row = static_cast<int>(block) * B::kStaying;
  }
};

// The side that passes: rows of a head, or keys.
template <class B>
struct Passing {
  Matrix right1, right2;
  RowStates states;

  FA_DEVICE Passing(const Item& p, float* workspace, int64_t b, int h, int rows, const Matrix& k,
                    const Matrix& v)
      : right1(B::kKeysStay ? matrix_of(p.q, b, h, rows, p.D) : k),
        right2(B::kKeysStay ? matrix_of(p.dout, b, h, rows, p.Dv) : v),
        states(p, workspace, b, h) {}

  // Where keys stay: the rows of the next head.
  FA_DEVICE void next_head(const FaParams& p) {
    right1 = right1.further(p.q.stride[1]);
    right2 = right2.further(p.dout.stride[1]);
    states.data += kParts * rows_of_head(p);
  }

  FA_DEVICE void load(unsigned char* to, int first) const {
    load_tile<typename B::Right1, B::kThreads>(to, right1, first);
    to += B::Right1::kBytes;
    if constexpr (!B::kGiven) load_tile<typename B::Right2, B::kThreads>(to, right2, first);
    to += B::Right2::kBytes;
    if constexpr (B::kKeysStay) B::States::load(to, states, first);
  }
};

// Which rows or keys pass a block that has those from `first_row` on: [start, end).
template <class B>
struct PassingRange {
  int start, end, rows;  // from `rows` on, others see nothing here
  Band by_all;
  // Up to this row this block is the first to add to a tile of dq: its rows see no later keys.
  int begins_to;

  FA_DEVICE PassingRange(const Item& p, const Visible& visible, int b, int first_row) {
    const int past = first_row + B::kStaying;
    const int64_t last_row = least(past, B::kKeysStay ? p.N : p.M);
    const KeyRange seen =
        B::kKeysStay ? row_range(p, b, first_row, last_row) : key_range(p, b, first_row, last_row);
    start = static_cast<int>(seen.lo) / B::kPassing * B::kPassing;
    end = static_cast<int>(seen.hi);
    rows = B::kKeysStay ? end : static_cast<int>(p.M);
    by_all = B::kKeysStay ? visible.rows_of_all(first_row, past, rows)
                          : visible.keys_of_all(first_row, past, rows);
    const KeyRange later = row_range(p, b, past, p.N);
    begins_to = later.empty() ? end + B::kPassing : static_cast<int>(later.lo);
  }
};

// --- load: the tiles that stay
template <class B>
FA_DEVICE void load_staying(unsigned char* left1, unsigned char* left2, const Item& p, int b,
                            int head, int first_row, const Matrix& k, const Matrix& v) {
  const int64_t h = head;
  load_tile<typename B::Left1, B::kThreads>(
      left1, B::kKeysStay ? k : matrix_of(p.q, b, h, p.M, p.D), first_row);
  if constexpr (!B::kGiven && B::kFirst)
    load_tile<typename B::Left2, B::kThreads>(
        left2, B::kKeysStay ? v : matrix_of(p.dout, b, h, p.M, p.Dv), first_row);
  ptx::copies_commit("backward: what stays");
}

// --- accumulate: p dp of a tile, to the sums of its rows
template <class B>
FA_DEVICE void add_to_deltas(float (&delta)[B::kStrips][2],
                             const Strips<B::kStrips, B::kAtOnce>& dp) {
#pragma unroll
  for (int x = 0; x < B::kStrips * B::kAtOnce / 2; ++x)
    delta[x % B::kStrips][x / B::kStrips % 4 / 2] +=
        dp[x % B::kStrips][x / B::kStrips / 4][x / B::kStrips % 4];
}

// --- store: the sums of a block. Where it stands is computed anew: registers held it for no other use.
template <class B>
FA_DEVICE void store_sums(const FaParams& batch, float* workspace, const unsigned* ticket,
                          Strips<B::kStrips, B::kFirst ? B::kD : 8>& first_sum,
                          Strips<B::kStrips, B::kSecond ? B::kDv : 8>& second_sum,
                          const float (&delta)[B::kStrips][2]) {
  using Type = typename B::Type;
  const Task<B> own(batch, B::kInTurn ? *ticket : ptx::block_anew());
  const Item of(batch, own.b);
  const int thread = static_cast<int>(B::kInTurn ? ptx::thread_anew() : threadIdx.x);
  const int own_row = own.first_row + 16 * B::kStrips * (thread / 32) + thread % 32 / 4;
  const auto store = [&](const FaTensor& to, int64_t width, auto& sum, float factor) {
    const int64_t length = B::kKeysStay ? of.N : of.M;
    store_gradient<Type>(to, own.b, own.head, own_row, 2 * (thread % 4), length, width, sum,
                         factor);
  };
  if constexpr (B::kFirst && B::kMakesSums)
    store(B::kKeysStay ? of.dk : of.dq, of.D, first_sum, static_cast<float>(of.scale));
  if constexpr (B::kSecond) {
    const bool dropout = B::kGeneral && of.dropout_p > 0;
    store(of.dv, of.Dv, second_sum,
          dropout ? static_cast<float>(dropout_rule(of.dropout_p).factor) : 1.0f);
  }
  if constexpr (B::kWhat == kDelta) {
    const RowStates states(of, workspace, own.b, own.head);
#pragma unroll
    for (int x = 0; x < 2 * B::kStrips; ++x) {
      const float sum = row_sum(delta[x / 2][x % 2]);
      if (thread % 4 == 0) states.at(kMinusDelta, own_row + 8 * x) = -sum;
    }
  }
}

// The rows of all query heads that read a key head pass one after the other. A kernel that computes
// deltas finds 0 in their place.
template <class B>
__global__ void __launch_bounds__(B::kThreads, 1)
    backward_kernel(const FaParams batch, float* workspace) {
  using Type = typename B::Type;
  using PlacesOf = Places<B::kKeysStay>;
  FA_SHARED_MEMORY(memory);
  auto* const ticket = reinterpret_cast<unsigned*>(memory + B::kTicketAt);
  unsigned index = blockIdx.x;
  if constexpr (B::kInTurn) index = Turns(workspace).begin(ticket);
  const Task<B> task(batch, index);
  const int b = task.b, staying_head = task.head, first_row = task.first_row;
  const Item p(batch, b);
  if (first_row >= (B::kKeysStay ? p.N : p.M)) return;  // another item is longer
  if (B::kInTurn && Turns(workspace).fall(batch)) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = first_row + 16 * B::kStrips * warp + lane / 4, column = 2 * (lane % 4);

  const FaParams all = batch;  // see forward.cuh
  const Visible visible(p, b);
  const PassingRange<B> range(p, visible, b, first_row);
  const int start = range.start, end = range.end, rows = range.rows;
  const int group = static_cast<int>(p.H / p.Hk);
  const int hk = B::kKeysStay ? staying_head : staying_head / group;
  const int first_head = B::kKeysStay ? hk * group : staying_head;
  const int last_head = start < end ? first_head + (B::kKeysStay ? group : 1) : first_head;
  ShownTiles<B> tiles(batch, b, first_row / B::kStaying);

  unsigned char *const left1 = memory, *const left2 = left1 + B::Left1::kBytes;
  unsigned char *const stages = memory + B::kLeftBytes, *const scores = memory + B::kScoresAt;
  // Rows past what is seen are not read: past a key length they may be NaN.
  const int64_t keys = B::kKeysStay ? visible.length : end;
  const Matrix k = matrix_of(p.k, b, hk, keys, p.D), v = matrix_of(p.v, b, hk, keys, p.Dv);
  Passing<B> coming(p, workspace, b, first_head, rows, k, v);
  // The next tile, and how many heads are left with it; with a mask, the next one that is visible.
  int next = start, left_next = last_head - first_head;
  const auto enter = [&](int left) {
    for (; left > 0; --left, coming.next_head(batch)) {
      next = tiles.next(last_head - left, start, end, true);
      if (next < end) break;
    }
    return left;
  };
  if constexpr (B::kTiled) left_next = enter(left_next);
  const bool any = left_next > 0;

  Strips<B::kStrips, B::kFirst ? B::kD : 8> first_sum = {};
  Strips<B::kStrips, B::kSecond ? B::kDv : 8> second_sum = {};
  float delta[B::kStrips][2] = {};
  RowState staying[B::kStrips][2] = {};
  Left<typename B::Left1, B::kStrips, B::kHolds1> first_left(left1, warp);
  // Two tiles of one width are addressed as one tile, which takes fewer addresses.
  constexpr bool kOneWidth = B::kD == B::kDv;
  Left<typename B::Left2, B::kStrips, B::kHolds2, kOneWidth ? B::kStaying / 16 : 0> second_left(
      kOneWidth ? left1 : left2, warp);
  if (any) {
    load_staying<B>(left1, left2, p, b, staying_head, first_row, k, v);
    coming.load(stages, next);
    if constexpr (!B::kKeysStay)
#pragma unroll
      for (int x = 0; x < 2 * B::kStrips; ++x)
        staying[x / 2][x % 2] = RowStates(p, workspace, b, staying_head).at(row + 8 * x);
  }
  ptx::copies_commit("backward: first tile");
  if constexpr (B::kHolds1)
    if (any) {
      ptx::copies_wait<1>("backward: what stays has landed");
      ptx::block_sync("backward: all see what stays");
      first_left.load();
      second_left.load();
    }
  int stage = 0;
  QuerySums<B> queries(p, workspace, b, first_head);
  for (int left = last_head - first_head; left > 0; --left, queries.next_head(batch)) {
    if (B::kTiled && left != left_next) continue;  // no tile of this head is visible
    const int h = last_head - left;
    const Head head(B::kGeneral ? all : p, b, h, diagonal(p, b));
    MaskLines mask[B::kStrips];
#pragma unroll
    for (int x = 0; x < B::kStrips; ++x) mask[x] = MaskLines(PlacesOf{head, row + 16 * x, 0});
    int first = B::kTiled ? next : start;
    do {
      const int last = first + B::kPassing;
      const uint32_t bits = tiles.bits;
      const auto load = [&](int at) { coming.load(stages + (stage ^ 1) * B::kStageBytes, at); };
      if constexpr (B::kTiled) {
        next = tiles.next(h, last, end, false);
        if (next >= end) {
          coming.next_head(batch);
          left_next = enter(left - 1);
        }
        if (left_next > 0) load(next);
      } else {
        const bool ends = last >= end;
        if (!ends || left > 1) {
          if (B::kKeysStay && ends) coming.next_head(batch);
          load(ends ? start : last);
        }
      }
      ptx::copies_commit("backward: next tile");
      ptx::copies_wait<1>("backward: this tile has landed");
      ptx::block_sync("backward: all see this tile");

      const unsigned char* const now = stages + stage * B::kStageBytes;
      const uint32_t right1 = ptx::shared_address(now);
      const uint32_t right2 = kOneWidth ? right1 : right1 + B::Right1::kBytes;
      constexpr int kBelow = kOneWidth ? B::kPassing / 16 : 0;
      const bool whole = range.by_all.holds(first, last);
      const bool read = !B::kTiled || bits & ShownTiles<B>::kToRead;
#pragma unroll
      for (int at = 0; at < B::kPassing; at += B::kAtOnce) {
        Strips<B::kStrips, B::kAtOnce> s = {}, dp = {};
        const auto passing = [&](RowState(&two)[2], int further) {
          B::States::read(two, now + B::Right1::kBytes + B::Right2::kBytes + 4 * column,
                          at + further);
        };
        const Corner corner = {row, first + at + column};
        if constexpr (B::kDeltaFirst) subtract_deltas<B>(dp, staying, passing);
        MaskPairs<B::kAtOnce / 8> pairs[B::kStrips];
        if (B::kGeneral && p.mask.data && read)
#pragma unroll
          for (int x = 0; x < B::kStrips; ++x)
            load_mask(pairs[x], mask[x], PlacesOf{head, corner.stays + 16 * x, corner.passes});
        product<Type, typename B::Right1>(s, first_left, right1, at / 16);
        if constexpr (B::kGiven)
          read_given<B>(dp, p, b, h, corner);
        else if constexpr (B::kFirst)
          product<Type, typename B::Right2>(dp, second_left, right2, kBelow + at / 16);
        differentiate<B>(s, dp, head, visible, rows, whole, staying, passing, mask, pairs, corner,
                         read);
        LeftSides<B::kAtOnce / 8> ds[B::kStrips], weights[B::kStrips];
        if constexpr (B::kFirst && B::kMakesSums)
          accumulate<Type, typename B::Right1>(first_sum, ds, dp, right1, at / 16);
        if constexpr (B::kSecond)
          accumulate<Type, typename B::Right2>(second_sum, weights, s, right2, kBelow + at / 16);
        if constexpr (B::kInTurn) put_scores<Tile<B::kStaying, B::kPassing>>(scores, ds, at / 16);
        if constexpr (B::kWhat == kDelta) add_to_deltas<B>(delta, dp);
      }
      if constexpr (B::kInTurn)
        if (batch.dq.data) {
          ptx::block_sync("backward: all see this ds");
          const int block = first_row / B::kStaying;
          const bool begins = B::kTiled ? bits & ShownTiles<B>::kBegins : last <= range.begins_to;
          const int before = B::kTiled ? tiles.before(bits, h, first) : block + 1;
          queries.add_in_turn(ptx::shared_address(scores), ptx::shared_address(left1), first, block,
                              before, begins);
        }
      // With ds no thread needs to wait here; but without this barrier ptxas spills.
      ptx::block_sync("backward: all are done with this tile");
      first = B::kTiled ? left_next == left ? next : end : last, stage ^= 1;
    } while (first < end);
  }
  ptx::copies_wait<0>("backward: nothing is on its way");

  store_sums<B>(batch, workspace, ticket, first_sum, second_sum, delta);
}

template <class B>
int start_gradient(const FaParams& p, float* workspace, void* stream) {
  const int64_t heads = B::kKeysStay ? p.Hk : p.H, length = B::kKeysStay ? p.N : p.M;
  const int64_t blocks = (length + B::kStaying - 1) / B::kStaying * heads * p.B;
  if constexpr (B::kTiled)
    if (const int failed = start_shown_tiles<B>(p, workspace, stream)) return failed;
  static_assert(B::kSharedBytes <= kLeastShared, "a block has no room on sm_86 and sm_89");
  return launch_blocks("backward_kernel", backward_kernel<B>, blocks, B::kThreads, B::kSharedBytes,
                       stream, p, workspace);
}

}  // namespace sm80
}  // namespace fa
