// DeepSeek-V3.2's lightning indexer: the keys with the largest scores of each row,
//
//   I[i][j] = sum_h w[h][i] max(0, q[h][i] . k[j])
//
// A task has a few rows. It takes a tile of keys at a time: a product [keys][heads] for each row,
// from which one number for each key remains. No matrix of rows and keys is stored beyond the rows
// of a task, and the choice needs three passes over a row's scores.
#pragma once
#include <algorithm>
#include <functional>

#include "../base/scratch.h"
#include "../score/tile.h"

namespace fa {
namespace FA_ISA {

// The n-th largest of some numbers, and the places of those that are larger, or equal and first.
struct LargestNumbers {
  static constexpr int kBits = 11, kBins = 1 << kBits, kCounts = 4;
  static size_t numbers(int64_t n) { return n + kCounts * kBins; }

  // An integer with the order of the float, which is not -0; NaN is the least.
  static FA_INLINE uint32_t ordered(float x) {
    if (x != x) return 0;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  // Writes the places of the `count` largest of x[0..n), ascending, and -1 after them if n is less.
  // Of equal numbers the first ones are chosen. `scratch`: `numbers(n)` words.
  static void choose(const float* x, int64_t n, int64_t count, uint32_t* scratch, int32_t* to) {
    int64_t written = 0;
    if (n <= count) {
      for (; written < n; ++written) to[written] = int32_t(written);
    } else if (count > 0) {
      int64_t equal;
      const uint32_t least = threshold(x, n, count, scratch, equal);
      for (int64_t j = 0; j < n && written < count; ++j) {
        const uint32_t o = ordered(x[j]);
        const bool takes = o > least || (o == least && equal > 0);
        equal -= o == least && takes;
        to[written] = int32_t(j);
        written += takes;
      }
    }
    std::fill(to + written, to + count, -1);
  }
  // The count-th largest. equal: how many of those with its value are among the largest.
  static uint32_t threshold(const float* x, int64_t n, int64_t count, uint32_t* scratch,
                            int64_t& equal) {
    uint32_t *counts = scratch, *inside = scratch + kCounts * kBins;
    std::fill(counts, counts + kCounts * kBins, 0u);
    for (int64_t j = 0; j < n; ++j)  // several counts: equal bins do not wait for one another
      ++counts[j % kCounts * kBins + (ordered(x[j]) >> (32 - kBits))];
    int64_t left = count, bin = kBins;
    for (;;) {
      --bin;
      int64_t here = 0;
      for (int c = 0; c < kCounts; ++c) here += counts[c * kBins + bin];
      if (here >= left) break;
      left -= here;
    }
    int64_t m = 0;
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t o = ordered(x[j]);
      inside[m] = o;
      m += (o >> (32 - kBits)) == uint32_t(bin);
    }
    std::nth_element(inside, inside + left - 1, inside + m, std::greater<uint32_t>());
    const uint32_t least = inside[left - 1];
    equal = left - std::count_if(inside, inside + m, [=](uint32_t o) { return o > least; });
    return least;
  }
};

template <class Mul>
struct LightningIndex {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  static constexpr int W = kLanes<R>, kMost = kTileVectors;
  static constexpr int64_t kRows = 8;

  static int64_t row_tasks(const FaIndexer& p) { return (p.M + kRows - 1) / kRows; }
  static int64_t tasks(const FaIndexer& p) { return p.B * row_tasks(p); }
  static int64_t padded(const FaIndexer& p) { return round_up(p.D, Sizes<Mul>::padding); }
  // Vectors of heads that are taken at once; AMX's tiles come in pairs.
  static int vectors(int64_t heads) { return heads <= W ? 1 : heads <= 2 * W ? 2 : kMost; }
  static int64_t lanes(const FaIndexer& p) { return round_up(p.H, W * vectors(p.H)); }

  struct Buffers {
    const FaIndexer& p;
    Scratch take;
    int64_t d = padded(p);
    E* q = take.array<E>(kRows * lanes(p) * d);  // [kRows][lanes / group][padded(D)][group]
    E* k = take.array<E>(kTileKeys * d);
    E* rows = take.array<E>(Sizes<Mul>::staged * d);
    R* weights = take.array<R>(kRows * lanes(p));  // [kRows][lanes]
    R* s = take.array<R>(kTileKeys * kMost * W);   // [kTileKeys][group]
    float* scores = take.array<float>(kRows * round_up(p.N, kTileKeys));
    uint32_t* choice = take.array<uint32_t>(LargestNumbers::numbers(p.N));
  };
  static size_t scratch(const FaIndexer& p) { return Buffers{p, {nullptr}}.take.used; }

  // How many keys row i sees: they are the first ones.
  static int64_t seen(const FaIndexer& p, int64_t b, int64_t i) {
    const int64_t length = p.lengths ? p.lengths[b] : p.N;
    if (!p.causal) return length;
    return std::clamp<int64_t>(i + 1 + (p.bottom_right ? length - p.M : 0), 0, length);
  }

  static void run(const FaIndexer& p, int64_t task, char* base) {
    [[maybe_unused]] const typename Mul::Registers registers;
    const Buffers buf{p, {base}};
    const int64_t b = task / row_tasks(p), i0 = task % row_tasks(p) * kRows;
    const int64_t end = std::min(i0 + kRows, p.M), ld = round_up(p.N, kTileKeys);
    for (int64_t i = i0; i < end; ++i) stage(p, b, i, i - i0, buf);
    const Plane keys = plane(p.k, b, 0);
    for (int64_t j = 0; j < seen(p, b, end - 1); j += kTileKeys) {
      const int64_t n = std::min(kTileKeys, p.N - j);
      const Broadcast<E> k = Operand<Mul>::along(keys, j, n, p.D, buf.k);
      for (int64_t i = i0; i < end; ++i)
        if (j < seen(p, b, i)) score(p, k, n, i - i0, buf.scores + (i - i0) * ld + j, buf);
    }
    for (int64_t i = i0; i < end; ++i)
      LargestNumbers::choose(buf.scores + (i - i0) * ld, seen(p, b, i), p.count, buf.choice,
                             p.indices + (b * p.M + i) * p.count);
  }
  // The queries of one row, its heads in lanes, and its weights, 0 past the last head.
  static void stage(const FaIndexer& p, int64_t b, int64_t i, int64_t at, const Buffers& buf) {
    const int64_t group = W * vectors(p.H), d = padded(p);
    Plane heads = plane(p.q, b, 0);
    heads.origin += i * p.q.stride[2];
    heads.row = p.q.stride[1];
    for (int64_t h = 0; h < p.H; h += group)
      Operand<Mul>::transposed(heads, h, std::min(group, p.H - h), 0, p.D, group,
                               buf.q + (at * lanes(p) + h) * d, buf.rows);
    R* w = buf.weights + at * lanes(p);
    std::fill(w, w + lanes(p), R(0));
    for (int64_t h = 0; h < p.H; ++h)
      w[h] = read<R>(p.weights.data, p.weights.dtype, plane(p.weights, b, h).at(i));
  }
  static void score(const FaIndexer& p, Broadcast<E> k, int64_t n, int64_t at, float* to,
                    const Buffers& buf) {
    switch (vectors(p.H)) {
      case 1:
        return score_of<1>(p, k, n, at, to, buf);
      case 2:
        return score_of<2>(p, k, n, at, to, buf);
      default:
        return score_of<kMost>(p, k, n, at, to, buf);
    }
  }
  template <int NV>
  static void score_of(const FaIndexer& p, Broadcast<E> k, int64_t n, int64_t at, float* to,
                       const Buffers& buf) {
    constexpr int64_t group = NV * W;
    for (int64_t h = 0; h < lanes(p); h += group) {
      const int64_t first = at * lanes(p) + h;
      DotProducts<Mul, NV>::run(k, buf.q + first * padded(p), p.D, n, R(1), buf.s);
      // Lanes without a head: 0 times an infinite key is no number.
      for (int64_t j = 0; j < n && p.H - h < group; ++j)
        std::fill(buf.s + j * group + p.H - h, buf.s + (j + 1) * group, R(0));
      Vec<R> w[NV];
      for (int v = 0; v < NV; ++v) w[v] = load(buf.weights + first + v * W);
      for (int64_t j = 0; j < n; j += W) {
        Vec<R> sums[W];
#pragma GCC unroll 16
        for (int x = 0; x < W; ++x) {  // past the last key: numbers that are not stored
          sums[x] = Vec<R>{};
          for (int v = 0; v < NV; ++v) {
            const Vec<R> s = load(buf.s + (j + x) * group + v * W);
            sums[x] += relu(s) * w[v];
          }
        }
        const Vec<R> sum = sum_lanes<R>(sums);
        for (int64_t x = 0; x < std::min<int64_t>(W, n - j); ++x)
          to[j + x] = float(h == 0 ? sum[x] : to[j + x] + sum[x]);
      }
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa
