// The forward pass on vectors; csrc/README.md has a drawing. A task is a few tiles of query rows
// that share each block of keys and values while it is in cache. They are of one head, or of
// several heads with few rows each and one key head. Q is transposed once; S^T = K Q^T then reads K
// in place. Lanes of O are columns, as in memory: O = P V reads V in place, too. Both skip what a
// band hides, S^T by vectors of rows, O by the rows of a register tile. Columns that do not fill a
// vector are a tail, O^T = V^T P^T.
#pragma once
#include "../base/plan.h"
#include "../base/scratch.h"
#include "../score/tile.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct Forward {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using Op = Operand<Mul>;
  static constexpr int pair = Mul::pair;

  // Tiles that share each block of keys, as long as every thread still gets a few tasks; a row's
  // result does not depend on the other rows of its task. Measured: 4 beats 2 and 1 by 3 to 20%,
  // the more the larger D.
  static constexpr int64_t kMostTiles = 4;
  static int64_t tiles_per_task(const Params& p) {
    const int64_t tiles = (p.M + kTileRows<R> - 1) / kTileRows<R>;
    return std::clamp<int64_t>(p.B * p.H * tiles / (4 * p.threads), 1, kMostTiles);
  }
  static int64_t rows_per_task(const Params& p) { return tiles_per_task(p) * kTileRows<R>; }
  static int64_t blocks(const Params& p) { return (p.M + rows_per_task(p) - 1) / rows_per_task(p); }
  // Heads of one task: more than one if the rows of a head do not fill the tiles of a task.
  static int64_t heads_per_task(const Params& p) {
    const int64_t tiles = std::max<int64_t>(1, (p.M + kTileRows<R> - 1) / kTileRows<R>);
    return std::clamp<int64_t>(tiles_per_task(p) / tiles, 1, std::max<int64_t>(1, group(p)));
  }
  static int64_t group(const Params& p) { return p.Hk ? p.H / p.Hk : 0; }
  static int64_t shares(const Params& p) {  // parts of a key head's query heads
    return (group(p) + heads_per_task(p) - 1) / heads_per_task(p);
  }

  // Few rows wait for memory, and prefetching makes float32 up to 1.6 times as fast. Measured: with
  // more rows, with keys that are converted on the way, or as few keys as lanes, it costs as much as
  // it gains.
  static bool reads_ahead(const Params& p) {
    return pair == 1 && p.M <= kTileRows<R> && p.N > kLanes<R> && p.v.dtype == dtype_of<R> &&
           p.v.stride[3] == 1;
  }

  struct State {  // one tile of rows across all blocks of keys
    Rows rows;
    int64_t lanes;  // at least as many as rows
    E* q;           // [D / pair][lanes]
    R* out;         // [rows][whole(Dv)], not yet divided by l
    R* tail;        // [Dv - whole(Dv)][lanes], the same
    R *m, *l;       // [lanes]
    bool begun;     // out has a sum
    bool written;   // the call's output has it, divided by l
  };
  static int64_t whole(int64_t columns) { return columns / kLanes<R> * kLanes<R>; }
  struct Buffers {
    State state[kMostTiles];
    R *s, *rescale;
    E *k, *v, *p, *rows;
    ScoreScratch<R> score;
    Plane next_q;  // what this thread's next task reads first, as far as it is known
    KeyPlane next_k;
    int64_t next_rows;
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t lanes = std::min(kTileRows<R>, round_up(std::max<int64_t>(p.M, 1), kLanes<R>));
    const int64_t keys = std::min(kTileKeys, round_up(std::max<int64_t>(p.N, 1), 4));
    const int64_t tiles = tiles_per_task(p);
    for (int64_t t = 0; t < tiles; ++t)
      b.state[t] = {{},
                    0,
                    take.array<E>((p.D + pair - 1) / pair * lanes),
                    take.array<R>(whole(p.Dv) * lanes),
                    take.array<R>((p.Dv - whole(p.Dv)) * lanes),
                    take.array<R>(lanes),
                    take.array<R>(lanes),
                    false,
                    false};
    b.s = take.array<R>(keys * lanes);
    b.rescale = take.array<R>(lanes);
    b.k = take.array<E>(keys * ((p.D + pair - 1) / pair));
    b.v = take.array<E>(keys / pair * (round_up(p.Dv, kLanes<R>) + kSpare<E>));
    b.p = take.array<E>(pair == 1 ? 0 : keys / pair * lanes);
    b.rows = take.array<E>(kLanes<E> * p.D);
    b.score = ScoreScratch<R>::of(take, p, p.mask.data ? keys * kLanes<R> : 0);
    b.next_rows = 0;
    return take.used;
  }

  template <int NV>
  static void begin(const Params& p, State& st, E* rows_buf) {
    const Rows& rows = st.rows;
    constexpr int lanes = NV * kLanes<R>;
    Op::transposed(plane(p.q, rows.b, rows.h), rows.i0, rows.count, 0, p.D, lanes, st.q, rows_buf);
    std::fill_n(st.tail, (p.Dv - whole(p.Dv)) * lanes, R(0));
    st.begun = st.written = false;
    // A sink acts as a first key without a value.
    const R sink = sink_of<R>(p.sinks, rows.h);
    std::fill(st.m, st.m + lanes, sink);
    std::fill(st.l, st.l + lanes, sink == -kInf<R> ? R(0) : R(1));
  }

  // One tile of rows against one block of keys; `k` and `v` start at key J0. `ahead`: the products
  // go in steps, between which V, and K of the next block, are prefetched. The position of these
  // loops in a line of code decides a sixth of the time, measured: it is fixed for every build.
  // Structures are passed by reference or inlined: a copy of one that was just written, number by
  // number, is read in vectors, and waits until every earlier store has left for the cache.
  template <int NV, bool ahead = false>
  [[gnu::aligned(64)]] static void attend(const Params& p, const Keys& keys, int64_t J0,
                                          const Broadcast<E>& key_rows,
                                          const Broadcast<E>& value_rows, State& st,
                                          const Buffers& buf) {
    using T = Tile<R, NV>;
    const Rows& rows = st.rows;
    const Broadcast<E> k{key_rows.data + (keys.j0 - J0) * key_rows.stride, key_rows.stride};
    const Broadcast<E> v{value_rows.data + (keys.j0 - J0) / pair * value_rows.stride,
                         value_rows.stride};
    const int64_t hk = key_head(p, rows.h);
    const SeenKeys seen = SeenKeys::of(p, rows, keys);
    // A score_mod may read any score.
    const auto strips = p.mod.code ? Strips<R, NV>::whole(keys.count) : Strips<R, NV>::of(seen);
    T::prefetch_mask(p, rows, keys);
    strips.each([&](int64_t j, int64_t end, int vector, auto n) {
      const int64_t step = ahead ? 16 : end - j, lane = vector * kLanes<R>;
      for (; j < end; j += step) {
        const int64_t here = std::min(step, end - j);
        if (ahead) prefetch(values_of(p, rows.b, hk), keys.j0 + j, here, p.Dv);
        DotProducts<Mul, n>::run({k.data + j * k.stride, k.stride}, st.q + lane, p.D, here,
                                 scale_of<R>(p, rows.h), buf.s + j * T::lanes + lane, T::lanes);
      }
    });
    // Outside of the strips, where a register tile of rows may see a key, P is 0.
    const R outside = p.mod.code ? -kInf<R> : R(0);
    T::score(p, rows, keys, buf.s, nullptr, buf.score, nullptr, outside);
    T::online_softmax(strips, buf.s, st.m, st.l, buf.rescale);
    if (p.dropout_p > 0) T::dropout(p, rows, keys, buf.s, nullptr);
    const E* weights = Op::tile_across(buf.s, keys.count, T::lanes, buf.p);
    const int64_t columns = whole(p.Dv);
    if (columns < p.Dv)
      product<Mul, Unit::along_r, NV>({v.data + columns, v.stride}, weights, T::lanes,
                                      (keys.count + pair - 1) / pair, p.Dv - columns,
                                      Rescale<R>{st.tail, T::lanes, buf.rescale});
    RescaleRows<R> out{st.out, columns, buf.rescale};
    if (!st.begun) {
      // All keys of the tile are here: its sums are divided and written as they are made.
      const Plane to = plane(p.out, rows.b, rows.h);
      st.written =
          keys.end() >= key_range(p, rows.b, rows.i0, rows.end()).hi && readable_in_place<R>(to);
      if (st.written) out.c = const_cast<R*>(in_place<R>(to, rows.i0)), out.ldc = to.row;
      for (int v = 0; v < NV; ++v) {
        const int at = v * kLanes<R>;
        store(buf.rescale + at, st.written ? inverse(load(st.l + at)) : splat(R(1)));
      }
    }
    int64_t next = keys.end();
    each_register_tile<R>(columns, [&](auto n, int64_t c) {
      constexpr int64_t most = register_rows(n);
      for (int64_t r = 0; r < rows.count; r += most) {
        if (ahead && next < p.N) {
          const int64_t share = kTileKeys * most / rows.count + 1;
          prefetch(keys_of(p, rows.b, hk), next, std::min(share, p.N - next), p.D);
          next += share;
        } else if (ahead && c == 0 && r < buf.next_rows) {
          const int64_t share = std::min(most, buf.next_rows - r);
          prefetch(buf.next_q, r, share, p.D);
          prefetch(buf.next_k, r, share, p.D);
        }
        const int64_t here = std::min(most, rows.count - r);
        const KeyRange of = seen.by(r, here);
        const auto add = [&](const auto& to) __attribute__((always_inline)) {
          product<Mul, Unit::along_r, n>({weights + of.lo / pair * T::lanes + r, T::lanes},
                                         v.data + of.lo / pair * v.stride + c, v.stride,
                                         (of.hi - of.lo + pair - 1) / pair, here, to);
        };
        R* const at = out.c + r * out.ldc + c;
        if (!st.begun)
          add(ScaleRows<R>{at, out.ldc, out.factor + r});
        else if (!of.empty())
          add(RescaleRows<R>{at, out.ldc, out.factor + r});
      }
    });
    st.begun = true;
  }
  static FA_INLINE Vec<R> inverse(Vec<R> l) { return l == R(0) ? Vec<R>{} : R(1) / l; }

  template <int NV>
  static void finish(const Params& p, const State& st) {
    const Rows& rows = st.rows;
    const int64_t columns = whole(p.Dv);
    const Plane to = plane(p.out, rows.b, rows.h);
    if (!st.begun) std::fill_n(st.out, rows.count * columns, R(0));
    write_normalisers(p, rows, st.m, st.l);
    if (st.written && columns == p.Dv) return;
    for (int v = 0; v < NV; ++v) store(st.l + v * kLanes<R>, inverse(load(st.l + v * kLanes<R>)));
    for (int64_t i = 0; i < rows.count && !st.written; ++i) {
      R* out = st.out + i * columns;
      for (int64_t c = 0; c < columns; c += kLanes<R>)
        store(out + c, load(out + c) * splat(st.l[i]));
      write_row(const_cast<void*>(to.data), to.dtype, to.at(rows.i0 + i), to.step, columns, out);
    }
    if (columns < p.Dv)
      write_transposed(st.tail, NV * kLanes<R>, st.l, to, rows.i0, rows.count, columns,
                       p.Dv - columns);
  }

  // The first `tiles` of the buffers, all of one key head, against all keys.
  static void over_keys(const Params& p, int64_t tiles, Buffers& buf) {
    const Rows &first = buf.state[0].rows, &last = buf.state[tiles - 1].rows;
    const int64_t b = first.b, hk = key_head(p, first.h);
    const KeyRange seen = key_range(p, b, first.i0, last.end());
    // Measured: with fewer tiles, or shorter rows, a copy costs what it gains.
    const bool often = tiles == kMostTiles && p.Dv * sizeof(R) >= 1024;
    UnmaskedKeys<kMostTiles> visible;
    const auto each_due = [&](auto f) {
      for (int64_t t = 0; t < tiles; ++t)
        if (visible.due(t)) f(buf.state[t], t);
    };
    const auto with_lanes = [](const State& st, auto f) { with_vectors<R>(st.lanes, f); };
    do {
      each_due([&](State& st, int64_t) {
        with_lanes(st, [&](auto nv) { begin<nv>(p, st, buf.rows); });
      });
      for (int64_t J0 = seen.lo / kTileKeys * kTileKeys; J0 < seen.hi; J0 += kTileKeys) {
        if (interrupted(p)) return;
        bool any = false;
        each_due([&](const State& st, int64_t t) {
          any |= visible.find(t, p, st.rows, visible_keys<Mul>(p, st.rows, J0));
        });
        if (!any) continue;
        const int64_t count = std::min(J0 + kTileKeys, seen.hi) - J0;
        const Broadcast<E> k = Op::along(keys_of(p, b, hk), J0, count, p.D, buf.k);
        const Broadcast<E> v =
            Op::across(values_of(p, b, hk), J0, count, p.Dv, false, buf.v, often);
        each_due([&](State& st, int64_t t) {
          const Keys& keys = visible.of[t];
          if (keys.count <= 0) return;
          with_lanes(st, [&](auto nv) {
            if constexpr (pair == 1)
              if (t == 0 && reads_ahead(p)) return attend<nv, true>(p, keys, J0, k, v, st, buf);
            attend<nv>(p, keys, J0, k, v, st, buf);
          });
        });
      }
      each_due([&](State& st, int64_t t) { visible.check_skipped(t, p, st.rows, st.m); });
    } while (visible.again());
    for (int64_t t = 0; t < tiles; ++t)
      with_lanes(buf.state[t], [&](auto nv) { finish<nv>(p, buf.state[t]); });
  }

  static void run(const Params& p, int64_t task, char* scratch) {
    // Divisions come before the first store: after it the compiler repeats those of one value.
    const int64_t of_head = shares(p), each = p.Hk * of_head, all = p.B * each;
    const int64_t in_group = group(p), heads = heads_per_task(p), rows = rows_per_task(p);
    const int64_t block = blocks(p) - 1 - task / all;  // causal: the last rows see most
    struct Place {
      int64_t b, hk, head;
    };
    const auto place = [&](int64_t number) {
      const int64_t at = apart(number, all, p.threads);
      const int64_t share = at % each, hk = share / of_head;
      return Place{at / each, hk, hk * in_group + share % of_head * heads};
    };
    const Place here = place(task % all);
    const int64_t end_head = std::min(here.head + heads, (here.hk + 1) * in_group);
    const int64_t begin_row = block * rows, end_row = std::min(p.M, begin_row + rows);
    Buffers buf;
    carve(p, scratch, buf);
    int64_t tiles = 0;
    for (int64_t h = here.head; h < end_head; ++h)
      for (int64_t i = begin_row; i < end_row; i += kTileRows<R>) {
        State& st = buf.state[tiles++];
        st.rows = {here.b, h, i, std::min(kTileRows<R>, end_row - i)};
        st.lanes = st.rows.count;
      }
    const int64_t next = task + p.threads;  // threads take turns, more or less
    if (next < all && reads_ahead(p)) {
      const Place there = place(next);
      buf.next_q = plane(p.q, there.b, there.head);
      buf.next_k = keys_of(p, there.b, there.hk);
      buf.next_rows = std::min(p.M, p.N);
    }
    over_keys(p, tiles, buf);
  }

  static Plan plan(const Params& p) {
    Plan plan;
    Buffers unused;
    plan.workspace = MaskClasses::bytes(p);
    MaskClasses::add(p, plan);
    plan.add({p.B * p.Hk * shares(p) * blocks(p), carve(p, nullptr, unused), run});
    return plan;
  }
};

#if defined(FA_AMX)  // of rows that tiles cannot compute; unit.cpp compiles it once
void over_keys_on_vectors(const Params& p, int64_t tiles, Forward<Plain<float>>::Buffers& buf);
#endif

}  // namespace FA_ISA
}  // namespace fa
