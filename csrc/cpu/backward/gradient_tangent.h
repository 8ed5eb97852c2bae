// The tangent of the gradient of one tile of scores, and what every phase of backward_jvp.h shares:
// the workspace and a thread's buffers. P and dP are those of gradient.h, Z is dropout's factor of P,
// and x_t is the tangent of x:
//
//   dS_t = P ((s_t - lse_t) (Z dP - delta) + Z dP_t - delta_t)     dP_t = V_t dO + V dO_t
#pragma once
#include "../forward/jvp.h"
#include "gradient.h"

namespace fa {
namespace FA_ISA {

// Takes the place of Gradient in the phases that backward shares.
template <class R_>
struct GradientTangent : Gradient<Plain<R_>> {
  using R = R_;
  using Mul = Plain<R>;
  using G = Gradient<Mul>;
  using Op = Operand<Mul>;
  using V = Vec<R>;

  struct Workspace : G::Workspace {
    R *lse_t, *delta_t;  // as delta
    R* lse;              // [B H M][2]: the normaliser of these scores, if forward's differ
  };
  static Workspace workspace(const Params& p) {
    Workspace w;
    static_cast<typename G::Workspace&>(w) = G::workspace(p);
    Scratch take{static_cast<char*>(p.workspace), w.bytes};
    const int64_t rows = p.B * p.H * G::tiles(p) * G::kRows;
    w.lse_t = take.array<R>(rows);
    w.delta_t = take.array<R>(rows);
    w.lse = take.array<R>(2 * p.B * p.H * p.M);
    w.bytes = take.used;
    return w;
  }

  struct Buffers : G::Buffers {
    R *k_t, *v_t, *k_t_across;                     // of a block of keys; null if zero
    R *q_t, *dout_t, *q_t_across, *dout_t_across;  // of a tile of rows; likewise
    R *s_t, *dp_t, *second, *ds_t;                 // [keys][lanes]
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base, G::carve(p, base, b)};
    const int64_t lanes = G::kPart, keys = kTileKeys;
    const int64_t d = G::padded(p.D), dv = G::padded(p.Dv);
    const auto array = [&](const void* wanted, int64_t n) {
      return wanted ? take.array<R>(n) : nullptr;
    };
    b.k_t = array(p.k_t.data, keys * d);
    b.k_t_across = array(p.k_t.data, keys * (d + kSpare<R>));
    b.v_t = array(p.v_t.data, keys * dv);
    b.q_t = array(p.q_t.data, lanes * d);
    b.q_t_across = array(p.q_t.data, lanes * (d + kSpare<R>));
    b.dout_t = array(p.dout_t.data, lanes * dv);
    b.dout_t_across = array(p.dout_t.data, lanes * (dv + kSpare<R>));
    for (R** x : {&b.s_t, &b.dp_t, &b.ds_t}) *x = take.array<R>(keys * lanes);
    b.second = has_derivative(p) ? take.array<R>(keys * lanes) : nullptr;
    return take.used;
  }

  struct Block : G::Block {
    Broadcast<R> k_t, v_t;  // null if zero
  };
  static Block stage_keys(const Params& p, int64_t b, int64_t hk, int64_t J0, int64_t end,
                          const Buffers& buf, bool summed = false) {
    Block block{G::stage_keys(p, b, hk, J0, end, buf, summed), {}, {}};
    const int64_t count = std::min(J0 + kTileKeys, end) - J0;
    if (buf.k_t) block.k_t = Op::along(plane(p.k_t, b, hk), J0, count, p.D, buf.k_t);
    if (buf.v_t) block.v_t = Op::along(plane(p.v_t, b, hk), J0, count, p.Dv, buf.v_t);
    return block;
  }
  static void stage_rows(const Params& p, const Rows& rows, int64_t lanes, const Buffers& buf) {
    const auto turn = [&](const FaTensor& t, int64_t d, R* to) {
      if (to)
        Op::transposed(plane(t, rows.b, rows.h), rows.i0, rows.count, 0, d, lanes, to, buf.rows);
    };
    turn(p.q, p.D, buf.q);
    turn(p.q_t, p.D, buf.q_t);
    turn(p.dout, p.Dv, buf.dout);
    turn(p.dout_t, p.Dv, buf.dout_t);
  }
  template <class F>
  static void each_block(const Params& p, const Rows& rows, const R* lse, KeyRange within,
                         const Buffers& buf, F f) {
    G::template each_block<GradientTangent>(p, rows, lse, within, buf, f);
  }

  // buf.s = P, buf.s_t, buf.ds = dP, buf.dp_t; buf.dropped = Z if there is dropout; and the
  // derivative of scores by products, buf.derivative, with its tangent, buf.second.
  template <int NV>
  static void products(const Params& p, const Rows& rows, const Keys& keys, const Block& block,
                       Normaliser<R> normaliser, const Buffers& buf) {
    using T = Tile<R, NV>;
    using Dots = DotProducts<Mul, NV>;
    const auto from = [&](Broadcast<R> x) {
      if (x.data) x.data += (keys.j0 - block.J0) * x.stride;
      return x;
    };
    const Broadcast<R> k = from(block.k), v = from(block.v);
    const int64_t n = keys.count;
    T::prefetch_mask(p, rows, keys);
    Dots::run(k, buf.q, p.D, n, scale_of<R>(p, rows.h), buf.s);
    T::score(p, rows, keys, buf.s, buf.derivative, buf.score, buf.second);
    T::probabilities(n, normaliser, buf.s);
    product_tangents<R, NV>(k, buf.q, from(block.k_t), buf.q_t, p.D, n, scale_of<R>(p, rows.h),
                            buf.s_t);
    T::score_tangents(p, rows, keys, buf.s_t, buf.derivative, buf.second, buf.score);
    Dots::run(v, buf.dout, p.Dv, n, R(1), buf.ds);
    product_tangents<R, NV>(v, buf.dout, from(block.v_t), buf.dout_t, p.Dv, n, R(1), buf.dp_t);
    if (p.dropout_p > 0) {
      std::fill_n(buf.dropped, n * T::lanes, R(1));
      T::dropout(p, rows, keys, buf.dropped, nullptr);
    }
  }

  // For one vector of scores: the weights dropout(P), dS, and their tangents.
  struct Moved {
    V weights, weights_t, ds, ds_t;
  };
  // Calls f(place in a tile, Moved) for each vector. All are 0 where P is 0: at hidden scores, and
  // in lanes without a row, the other numbers may be NaN or infinite.
  template <int NV, class F>
  static FA_INLINE void each_score(const Params& p, const Workspace& w, int64_t at, int64_t keys,
                                   const Buffers& buf, F f) {
    using T = Tile<R, NV>;
    V delta[NV], delta_t[NV], lse_t[NV];
    for (int v = 0; v < NV; ++v) {
      delta[v] = load(w.delta + at + v * T::W);
      delta_t[v] = load(w.delta_t + at + v * T::W);
      lse_t[v] = load(w.lse_t + at + v * T::W);
    }
    const R* kept = p.dropout_p > 0 ? buf.dropped : nullptr;
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int64_t x = j * T::lanes + v * T::W;
        const V probability = load(buf.s + x), z = kept ? load(kept + x) : splat(R(1));
        const V by = z * load(buf.ds + x) - delta[v], moves = load(buf.s_t + x) - lse_t[v];
        const V p_t = probability * moves, ds = probability * by;
        const V ds_t = p_t * by + probability * (z * load(buf.dp_t + x) - delta_t[v]);
        const auto none = probability == R(0);
        const auto visible = [&](V y) { return none ? V{} : normal_or_zero<R>(y); };
        f(x, Moved{probability * z, visible(p_t * z), visible(ds), visible(ds_t)});
      }
  }

  // buf.ds = dS_t.
  template <int NV>
  static void scores(const Params& p, const Rows& rows, const Keys& keys, const Block& block,
                     const Workspace& w, int64_t at, const Buffers& buf) {
    products<NV>(p, rows, keys, block, w.normaliser.from(at), buf);
    each_score<NV>(p, w, at, keys.count, buf,
                   [&](int64_t x, const Moved& moved) { store(buf.ds + x, moved.ds_t); });
  }
};

}  // namespace FA_ISA
}  // namespace fa
