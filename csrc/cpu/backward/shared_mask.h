// The gradient of a float mask that the items of a batch, or heads, share: the main phase of the
// backward pass adds up their dS. Tasks take turns at the rows of a tile: one block of keys after
// another, and for each the first item and its first head first, so every sum has one order. The
// first turn of a block begins with zeros, the last one writes the sums. A task only ever waits for
// tasks taken before it.
#pragma once
#include "mask_gradient.h"

namespace fa {
namespace FA_ISA {

// G: the class that computes dS, as in mask_gradient.h.
template <class Mul, class G = Gradient<Mul>>
struct SharedMask {
  using R = typename Mul::Real;

  // Where heads of a group that share a mask are in several segments of rows, tasks are not in the
  // order of heads: then mask_gradient.h sums.
  static bool is_one(const Params& p) {
    if (!p.dmask.data || MaskGradient<Mul>::is_ds(p) || p.B * p.H == 0) return false;
    const bool whole = (p.dmask.stride[2] || p.M == 1) && (p.dmask.stride[3] || p.N == 1);
    return whole && (p.dmask.stride[1] || p.H == p.Hk || G::segments(p) == 1);
  }
  static int64_t items(const Params& p) { return p.dmask.stride[0] ? p.B : 1; }
  static int64_t heads(const Params& p) { return p.dmask.stride[1] ? p.H : 1; }
  // True if items share it and heads do not: then a head's items come one after another, so that the
  // sum stays in a cache.
  static bool of_items(const Params& p) { return is_one(p) && items(p) < p.B && heads(p) == p.H; }
  static int64_t planes(const Params& p) { return is_one(p) ? items(p) * heads(p) : 0; }
  static bool in_place(const Params& p) {
    return p.dmask.dtype == dtype_of<R> && p.dmask.stride[3] == 1;
  }

  struct Workspace {
    int32_t* turn;  // [planes][tiles]
    R* sums;        // [planes][M][width], unless summed in place
    int64_t width;  // keys of a block
    size_t bytes;
  };
  static Workspace workspace(const Params& p) {
    Scratch take{static_cast<char*>(p.workspace), G::workspace(p).bytes};
    Workspace w;
    w.turn = take.array<int32_t>(planes(p) * G::tiles(p));
    w.width = std::min(kTileKeys, p.N);
    w.sums = take.array<R>(in_place(p) ? 0 : planes(p) * p.M * w.width);
    w.bytes = take.used;
    return w;
  }
  static void clear_turns(const Params& p, int64_t plane, char*) {
    std::fill_n(workspace(p).turn + plane * G::tiles(p), G::tiles(p), 0);
  }

  Plane result, sum{};
  Rows rows;
  int64_t J0, keys = 0, first = 0, mine = 0, last = 0;
  int32_t* turn = nullptr;
  // The part of tile t, which has these rows of an item and a head, and of a block of keys.
  SharedMask(const Params& p, const Rows& of_tile, int64_t t, int64_t chunk)
      : result(plane(p.dmask, of_tile.b, of_tile.h)), rows(of_tile), J0(chunk * kTileKeys) {
    if (!is_one(p)) return;
    const Workspace w = workspace(p);
    const bool all_items = items(p) == 1, all_heads = heads(p) == 1;
    const int64_t at = (all_items ? 0 : rows.b) * heads(p) + (all_heads ? 0 : rows.h);
    keys = std::min(kTileKeys, p.N - J0);
    const int64_t turns = (all_items ? p.B : 1) * (all_heads ? p.H : 1);
    first = chunk * turns;
    last = first + turns - 1;
    mine = first + (all_items ? rows.b : 0) * (all_heads ? p.H : 1) + (all_heads ? rows.h : 0);
    turn = w.turn + at * G::tiles(p) + t;
    sum = in_place(p) ? result : Plane{w.sums, dtype_of<R>, at * p.M * w.width - J0, w.width, 1};
  }
  R* row(int64_t i, int64_t j) const {
    return static_cast<R*>(const_cast<void*>(sum.data)) + sum.at(i, j);
  }
  bool begin(const Params& p) const {
    if (!wait_for_turn(p, turn, mine)) return false;
    for (int64_t i = rows.i0; i < rows.end() && mine == first; ++i)
      std::fill_n(row(i, J0), keys, R(0));
    return true;
  }
  // ds: [keys][lanes] of some rows of the tile, and some keys of the block.
  void add(const Rows& some, const Keys& seen, int64_t lanes, const R* ds) const {
    constexpr int64_t W = kLanes<R>;
    for (int64_t j = 0; j < seen.count; j += W, ds += W * lanes) {
      const int64_t n = std::min(W, seen.count - j);
      each_column(ds, lanes, n, some.count, [&](int64_t l, Vec<R> x) {
        R* to = row(some.i0 + l, seen.j0 + j);
        if (n == W) return store(to, Vec<R>(load(to) + x));
        for (int64_t i = 0; i < n; ++i) to[i] += x[i];
      });
    }
  }
  void end(const Params& p) const {
    for (int64_t i = rows.i0; i < rows.end() && mine == last && !in_place(p); ++i)
      write_row(p.dmask.data, result.dtype, result.at(i, J0), result.step, keys, row(i, J0));
    pass_turn(turn, mine);
  }
  // Adds the dS of a tile, or nothing where its rows see none of the keys, in its turn. False if the
  // run is interrupted.
  static bool add_in_turn(const Params& p, const Rows& rows, int64_t t, int64_t chunk,
                          const Keys& seen = {}, int64_t lanes = 0, const R* ds = nullptr) {
    if (!is_one(p)) return true;
    const SharedMask part(p, rows, t, chunk);
    if (!part.begin(p)) return false;
    part.add(rows, seen, lanes, ds);
    part.end(p);
    return true;
  }
};

}  // namespace FA_ISA
}  // namespace fa
