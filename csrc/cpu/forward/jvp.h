// Forward mode: the tangents of out and the LSE from those of q, k, v, mask and sinks (x_t is the
// tangent of x). With sums relative to the maximum m of an online softmax,
//
//   l = sum_j e    mu = sum_j e s_t    acc_t = sum_j e Z (s_t v + v_t)
//
// where Z is dropout's factor and a sink is a key without a value,
//
//   lse_t = mu / l    out_t = acc_t / l - lse_t out
//
// This pass computes its own softmax even where out is known: that costs no product, and the result
// does not depend on how other kernels rounded their scores. (If these do round differently, they
// compute out.) All is computed on vectors, for every instruction set. A zero tangent costs no
// product.
#pragma once
#include "../base/plan.h"
#include "../base/scratch.h"
#include "../score/tile.h"

namespace fa {
namespace FA_ISA {

// True if scores have tangents; and if scores or sinks have, and so the normaliser.
FA_INLINE bool scores_move(const Params& p) { return p.q_t.data || p.k_t.data || p.mask_t.data; }
FA_INLINE bool lse_moves(const Params& p) { return scores_move(p) || p.sinks_t.data; }

// The tangents of keys and values, in the layout of those.
FA_INLINE KeyPlane key_tangents_of(const Params& p, int64_t b, int64_t hk) {
  return key_plane(p, p.k_t, {}, b, hk);
}
FA_INLINE KeyPlane value_tangents_of(const Params& p, int64_t b, int64_t hk) {
  return key_plane(p, p.v_t, {}, b, hk);
}

// S = factor (X Y_t + X_t Y); a null tangent is zero.
template <class R, int NV>
void product_tangents(Broadcast<R> x, const R* y, Broadcast<R> x_t, const R* y_t, int64_t columns,
                      int64_t rows, R factor, R* s) {
  using Dots = DotProducts<Plain<R>, NV>;
  if (y_t) Dots::run(x, y_t, columns, rows, factor, s);
  if (!x_t.data && !y_t) std::fill_n(s, rows * Dots::lanes, R(0));
  if (!x_t.data) return;
  if (!y_t) return Dots::run(x_t, y, columns, rows, factor, s);
  for (int64_t c = 0; c < columns; c += Dots::longest)
    product<Plain<R>, Unit::along_k, NV>({x_t.data + c, x_t.stride}, y + c * Dots::lanes,
                                         Dots::lanes, std::min(columns - c, Dots::longest), rows,
                                         Accumulate<R>{s, Dots::lanes, factor});
}

template <class R>
struct Jvp {
  using Mul = Plain<R>;
  using Op = Operand<Mul>;

  struct Buffers {
    const Params& p;
    Scratch take;
    int64_t lanes = std::min(kTileRows<R>, round_up(std::max<int64_t>(p.M, 1), kLanes<R>));
    int64_t keys = std::min(kTileKeys, round_up(std::max<int64_t>(p.N, 1), 4));
    int64_t tile = keys * lanes, wide = round_up(p.Dv, kLanes<R>);
    bool moves = scores_move(p), bends = moves && has_derivative(p);
    // [D][lanes], and [Dv][lanes] not yet divided by l. Tangents of inputs are null if zero.
    R* q = take.array<R>(p.D * lanes);
    R* q_t = take.array_if<R>(p.D * lanes, p.q_t.data != nullptr);
    R* out = take.array<R>(p.Dv * lanes);
    R* out_t = take.array<R>(p.Dv * lanes);
    R* m = take.array<R>(lanes);
    R* l = take.array<R>(lanes);
    R* mu = take.array<R>(lanes);
    R* rescale = take.array<R>(lanes);
    R* s = take.array<R>(tile);  // this and the next three: [keys][lanes]
    R* s_t = take.array_if<R>(tile, moves);
    R* derivative = take.array_if<R>(tile, bends);
    R* second = take.array_if<R>(tile, bends);
    R* k = take.array<R>(keys * p.D);
    R* v = take.array<R>(keys * wide);
    R* k_t = take.array_if<R>(keys * p.D, p.k_t.data != nullptr);
    R* v_t = take.array_if<R>(keys * wide, p.v_t.data != nullptr);
    R* rows = take.array<R>(kLanes<R> * std::max(p.D, p.Dv));
    ScoreScratch<R> score = ScoreScratch<R>::of(take, p, p.mask.data ? keys * kLanes<R> : 0);
  };

  // True if this pass computes out.
  template <bool kForward>
  static bool makes_out(const Params& p) {
    return kForward && p.out.data;
  }

  template <int NV>
  static void begin(const Params& p, const Rows& rows, const Buffers& buf) {
    constexpr int lanes = NV * kLanes<R>;
    const auto turn = [&](const FaTensor& x, R* to) {
      Op::transposed(plane(x, rows.b, rows.h), rows.i0, rows.count, 0, p.D, lanes, to, buf.rows);
    };
    turn(p.q, buf.q);
    if (buf.q_t) turn(p.q_t, buf.q_t);
    for (R* sum : {buf.out, buf.out_t}) std::fill_n(sum, p.Dv * lanes, R(0));
    const R sink = sink_of<R>(p.sinks, rows.h);
    const bool seen = sink != -kInf<R>;
    std::fill_n(buf.m, lanes, sink);
    std::fill_n(buf.l, lanes, seen ? R(1) : R(0));
    std::fill_n(buf.mu, lanes, seen ? sink_of<R>(p.sinks_t, rows.h, R(0)) : R(0));
  }

  template <int NV, bool kForward>
  static void attend(const Params& p, const Rows& rows, const Keys& keys, const Buffers& buf) {
    using T = Tile<R, NV>;
    const int64_t hk = key_head(p, rows.h), n = keys.count;
    const auto along = [&](const KeyPlane& x, R* to) { return Op::along(x, keys.j0, n, p.D, to); };
    T::prefetch_mask(p, rows, keys);
    const Broadcast<R> k = along(keys_of(p, rows.b, hk), buf.k);
    DotProducts<Mul, NV>::run(k, buf.q, p.D, n, scale_of<R>(p, rows.h), buf.s);
    T::score(p, rows, keys, buf.s, buf.derivative, buf.score, buf.second);
    T::online_softmax(Strips<R, NV>::whole(n), buf.s, buf.m, buf.l, buf.rescale);
    if (buf.s_t) {
      Broadcast<R> k_t{};
      if (buf.k_t) k_t = along(key_tangents_of(p, rows.b, hk), buf.k_t);
      product_tangents<R, NV>(k, buf.q, k_t, buf.q_t, p.D, n, scale_of<R>(p, rows.h), buf.s_t);
      T::score_tangents(p, rows, keys, buf.s_t, buf.derivative, buf.second, buf.score);
    }
    weigh<NV>(n, buf);
    if (p.dropout_p > 0) T::dropout(p, rows, keys, buf.s, buf.s_t);

    const auto add = [&](Broadcast<R> x, const R* weights, R* sum, bool rescaled) {
      if (rescaled)
        product<Mul, Unit::along_r, NV>(x, weights, T::lanes, n, p.Dv,
                                        Rescale<R>{sum, T::lanes, buf.rescale});
      else
        product<Mul, Unit::along_r, NV>(x, weights, T::lanes, n, p.Dv,
                                        Accumulate<R>{sum, T::lanes});
    };
    const auto across = [&](const KeyPlane& x, R* to) {
      return Op::across(x, keys.j0, n, p.Dv, false, to);
    };
    if (makes_out<kForward>(p) || buf.s_t) {
      const Broadcast<R> v = across(values_of(p, rows.b, hk), buf.v);
      if (makes_out<kForward>(p)) add(v, buf.s, buf.out, true);
      if (buf.s_t) add(v, buf.s_t, buf.out_t, true);
    }
    if (buf.v_t) add(across(value_tangents_of(p, rows.b, hk), buf.v_t), buf.s, buf.out_t, !buf.s_t);
  }

  // s_t becomes e s_t, 0 where nothing is seen, and is added to mu.
  template <int NV>
  static void weigh(int64_t keys, const Buffers& buf) {
    using T = Tile<R, NV>;
    using V = Vec<R>;
    V mu[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) mu[v] = load(buf.mu + v * T::W) * load(buf.rescale + v * T::W);
    if (buf.s_t)
      for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const int64_t at = j * T::lanes + v * T::W;
          const V e = load(buf.s + at), x = e == R(0) ? V{} : V(e * load(buf.s_t + at));
          mu[v] += x;
          store(buf.s_t + at, normal_or_zero<R>(x));
        }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(buf.mu + v * T::W, mu[v]);
  }

  template <int NV, bool kForward>
  static void finish(const Params& p, const Rows& rows, const Buffers& buf) {
    using T = Tile<R, NV>;
    using V = Vec<R>;
    if (kForward) write_normalisers(p, rows, buf.m, buf.l);
    R *one = buf.rescale, *inverse = buf.l, *lse_t = buf.mu;
    for (int l = 0; l < T::lanes; ++l) {
      one[l] = R(1);
      inverse[l] = buf.l[l] == R(0) ? R(0) : R(1) / buf.l[l];
      lse_t[l] = buf.mu[l] * inverse[l];
    }
    if (p.lse_t.data) {
      const Plane to = plane(p.lse_t, rows.b, rows.h);
      for (int64_t i = 0; i < rows.count; ++i)
        static_cast<R*>(p.lse_t.data)[to.at(rows.i0 + i)] = lse_t[i];
    }
    const auto write = [&](const R* tile, const FaTensor& to) {
      write_transposed(tile, T::lanes, one, plane(to, rows.b, rows.h), rows.i0, rows.count, 0,
                       p.Dv);
    };
    if (makes_out<kForward>(p)) {
      T::each(p.Dv, buf.out, [&](int64_t, int v, V x) { return x * load(inverse + v * T::W); });
      write(buf.out, p.out);
    }
    if (!p.out_t.data) return;
    if (!makes_out<kForward>(p))
      Op::transposed(plane(p.out, rows.b, rows.h), rows.i0, rows.count, 0, p.Dv, T::lanes, buf.out,
                     buf.rows);
    T::each(p.Dv, buf.out_t, [&](int64_t d, int v, V x) {
      const V out = load(buf.out + d * T::lanes + v * T::W);
      return x * load(inverse + v * T::W) - load(lse_t + v * T::W) * out;
    });
    write(buf.out_t, p.out_t);
  }

  // A task is a tile of rows against all keys. kForward: it computes out and the normaliser, too.
  template <bool kForward>
  static void run(const Params& p, int64_t task, char* scratch) {
    const Buffers buf{p, {scratch}};
    const int64_t all = p.B * p.H, t = tiles(p) - 1 - task / all;
    const int64_t bh = apart(task % all, all, p.threads);
    const int64_t i0 = t * kTileRows<R>;  // causal: the last rows see most
    const Rows rows{bh / p.H, bh % p.H, i0, std::min(kTileRows<R>, p.M - i0)};
    const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
    with_vectors<R>(rows.count, [&](auto nv) {
      constexpr int NV = decltype(nv)::value;
      UnmaskedKeys<1> visible;
      do {
        begin<NV>(p, rows, buf);
        for (int64_t J0 = seen.lo / kTileKeys * kTileKeys; J0 < seen.hi; J0 += kTileKeys) {
          if (interrupted(p)) return;
          if (visible.find(0, p, rows, visible_keys<Mul>(p, rows, J0)))
            attend<NV, kForward>(p, rows, visible.of[0], buf);
        }
        visible.check_skipped(0, p, rows, buf.m);
      } while (visible.again());
      finish<NV, kForward>(p, rows, buf);
    });
  }
  static int64_t tiles(const Params& p) { return (p.M + kTileRows<R> - 1) / kTileRows<R>; }

  template <bool kForward>
  static Phase phase(const Params& p) {
    return {p.B * p.H * tiles(p), Buffers{p, {nullptr}}.take.used, run<kForward>};
  }
  static Plan plan(const Params& p, bool forward) {
    Plan plan;
    plan.workspace = MaskClasses::bytes(p);
    MaskClasses::add(p, plan);
    plan.add(forward ? phase<true>(p) : phase<false>(p));
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
