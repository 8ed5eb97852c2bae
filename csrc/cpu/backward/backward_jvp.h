// The tangent of the backward pass: the tangents of its gradients from those of q, k, v, mask,
// sinks, dO and dlse. With dS_t of gradient_tangent.h, and phi the derivative of a score by its
// scaled product,
//
//   dQ_t = scale (D_t K + D K_t)          D = phi dS,  D_t = phi dS_t + phi_t dS
//   dK_t = scale (D_t' Q + D' Q_t)        dV_t = (P (s_t - lse_t) Z)' dO + (P Z)' dO_t
//
// delta_t = sum_d dO O_t + dO_t O, less dlse_t. Twelve products at most: a zero tangent needs none.
// Tasks and turns are those of backward; all is computed on vectors.
#pragma once
#include "backward.h"
#include "gradient_tangent.h"

namespace fa {
namespace FA_ISA {

template <class R>
struct Second {
  using G = GradientTangent<R>;
  using B = Backward<Plain<R>>;
  using Op = typename G::Op;
  using Buffers = typename G::Buffers;
  using Masks = MaskGradient<Plain<R>, G>;
  using Shared = SharedMask<Plain<R>, G>;

  // --- before: row vectors as the tiles want them, dq = 0 ---------------------------
  static FaTensor own_lse(const Params& p) {
    const int64_t head = 2 * p.M;
    return {G::workspace(p).lse, {p.H * head, head, 2, 1}, dtype_of<R>};
  }
  // The normaliser of these scores, if forward rounded its scores differently.
  static void normalise(const Params& p, int64_t task, char* scratch) {
    Params alone = p;
    for (FaTensor Params::* x : {&Params::out, &Params::out_t, &Params::lse_t, &Params::q_t,
                                 &Params::k_t, &Params::v_t, &Params::mask_t, &Params::sinks_t})
      alone.*x = {};
    alone.lse = own_lse(p);
    Jvp<R>::template run<true>(alone, task, scratch);
  }
  template <bool kRescored>
  static void prepare(const Params& p, int64_t task, char*) {
    const auto w = G::workspace(p);
    const int64_t t = task % G::tiles(p), bh = task / G::tiles(p);
    const Rows rows = G::tile_rows(p, bh / p.H, bh % p.H, t);
    const int64_t at = task * G::kRows;
    Params read_from = p;
    if (kRescored) read_from.lse = own_lse(p);
    const Normaliser<R> normaliser = w.normaliser.from(at);
    read_normaliser(read_from, rows, G::kRows, normaliser);
    for (R* x : {w.delta, w.delta_t, w.lse_t}) std::fill_n(x + at, G::kRows, R(0));
    B::delta_from_output(p, rows, w.delta + at);
    B::add_products(p, p.out_t, p.dout, rows, w.delta_t + at);
    if (p.dout_t.data) B::add_products(p, p.out, p.dout_t, rows, w.delta_t + at);
    if (p.dlse_t.data) B::subtract(p.dlse_t, rows, w.delta_t + at);
    const Plane lse_t = plane(p.lse_t, rows.b, rows.h);
    for (int64_t l = 0; l < rows.count; ++l)
      w.lse_t[at + l] = static_cast<const R*>(lse_t.data)[lse_t.at(rows.i0 + l)];
    B::begin_dq(p, w, rows);
    if (Masks::is_ds(p)) Masks::clear_unseen(p, rows, normaliser.lse);
    w.turn[task] = int32_t(key_range(p, rows.b, rows.i0, rows.end()).lo / kTileKeys);
  }

  // --- the products ----------------------------------------------------------------
  static void keys(const Params& p, int64_t task, char* scratch) {
    Buffers buf;
    G::carve(p, scratch, buf);
    const auto w = G::workspace(p);
    const typename B::KeysTask of(p, task);
    B::begin_keys(p, of, buf);
    if (of.end > of.J0) {
      const auto block = G::stage_keys(p, of.b, of.hk, of.J0, of.end, buf, true);
      Broadcast<R> k_t{};
      if (buf.k_t)
        k_t = Op::across(plane(p.k_t, of.b, of.hk), of.J0, of.end - of.J0, p.D, true,
                         buf.k_t_across, true);
      B::template each_tile<Shared>(p, w, of, [&](const Rows& rows, int64_t t, const Keys& seen) {
        with_vectors<R>(rows.count, [&](auto nv) {
          tile<decltype(nv)::value>(p, w, rows, t, seen, of.chunk, block, k_t, buf);
        });
      });
    } else if (Shared::is_one(p)) {  // to pass turns on
      B::template each_tile<Shared>(p, w, of, [](const Rows&, int64_t, const Keys&) {});
    }
    B::write_keys(p, w, of, buf);
  }

  template <int NV>
  static void tile(const Params& p, const typename G::Workspace& w, const Rows& rows, int64_t t,
                   const Keys& keys, int64_t chunk, const typename G::Block& block,
                   Broadcast<R> k_t, const Buffers& buf) {
    using T = Tile<R, NV>;
    using V = Vec<R>;
    const int64_t index = G::tile_index(p, rows.b, rows.h, t), at = index * G::kRows;
    const int64_t first = keys.j0 - block.J0;
    const bool lse = lse_moves(p), keep = Masks::is_ds(p), shared = Shared::is_one(p);
    G::stage_rows(p, rows, T::lanes, buf);
    G::template products<NV>(p, rows, keys, block, w.normaliser.from(at), buf);
    G::template each_score<NV>(p, w, at, keys.count, buf, [&](int64_t x, const auto& moved) {
      V ds = moved.ds, ds_t = moved.ds_t;
      if (keep || shared) store(buf.sum + x, ds_t);
      if (has_derivative(p)) {
        ds_t = T::product_gradient(p, ds_t, buf.derivative + x) +
               T::product_gradient(p, ds, buf.second + x);
        ds = T::product_gradient(p, ds, buf.derivative + x);
      }
      store(buf.s + x, moved.weights);
      store(buf.s_t + x, moved.weights_t);
      store(buf.ds + x, ds);
      store(buf.ds_t + x, ds_t);
    });
    if (keep) Masks::write_ds(p, rows, keys, T::lanes, buf.sum);
    if (!Shared::add_in_turn(p, rows, t, chunk, keys, T::lanes, buf.sum)) return;

    // C += factor tile X, where X is a tensor of the rows or its tangent.
    const auto add_rows = [&](const R* tile, const FaTensor& x, int64_t columns, R* room, R* sum,
                              R factor) {
      const Broadcast<R> across =
          Op::across(plane(x, rows.b, rows.h), rows.i0, rows.count, columns, true, room, true);
      const int64_t ld = G::padded(columns);
      accumulate_wide<Plain<R>, Unit::along_k>({tile, T::lanes}, across.data, across.stride,
                                               rows.count, keys.count, ld, sum + first * ld, ld,
                                               factor);
    };
    if (lse) add_rows(buf.s_t, p.dout, p.Dv, buf.dout_across, buf.dv, R(1));
    if (buf.dout_t) add_rows(buf.s, p.dout_t, p.Dv, buf.dout_t_across, buf.dv, R(1));
    add_rows(buf.ds_t, p.q, p.D, buf.q_across, buf.dk, scale_of<R>(p, rows.h));
    if (buf.q_t) add_rows(buf.ds, p.q_t, p.D, buf.q_t_across, buf.dk, scale_of<R>(p, rows.h));

    const auto add_keys = [&](const R* tile, Broadcast<R> x) {
      accumulate_wide<Plain<R>, Unit::along_r>(
          {tile, T::lanes}, x.data + first * x.stride, x.stride, keys.count, rows.count,
          G::padded(p.D), B::dq_row(p, w, rows, 0), B::dq_stride(p), scale_of<R>(p, rows.h));
    };
    if (!wait_for_turn(p, w.turn + index, chunk)) return;
    add_keys(buf.ds_t, block.k);
    if (k_t.data) add_keys(buf.ds, k_t);
    pass_turn(w.turn + index, chunk);
  }

  // --- after -----------------------------------------------------------------------
  // -sum P_t delta + P delta_t of the sink's probability P.
  static void sinks(const Params& p, int64_t h, char*) {
    const auto w = G::workspace(p);
    const double sink = sink_of<R>(p.sinks, h), sink_t = sink_of<R>(p.sinks_t, h, R(0));
    double sum = 0;
    for (int64_t b = 0; b < p.B; ++b) {
      const int64_t first = G::tile_index(p, b, h, 0) * G::kRows;
      for (int64_t at = first; at < first + p.M; ++at) {
        const Normaliser<R> x = w.normaliser.from(at);
        const double share = std::exp((sink - double(*x.lse)) - double(*x.tail));
        if (share > 0)
          sum -= share *
                 ((sink_t - double(w.lse_t[at])) * double(w.delta[at]) + double(w.delta_t[at]));
      }
    }
    const R result = R(sum);
    write_row(p.dsinks.data, p.dsinks.dtype, h * p.dsinks.stride[1], 1, 1, &result);
  }

  // rescored: did forward round its scores differently?
  static Plan plan(const Params& p, bool rescored) {
    Plan plan;
    Buffers unused;
    const size_t scratch = G::carve(p, nullptr, unused);
    const int64_t row_tasks = p.B * p.H * G::tiles(p);
    plan.workspace = Shared::workspace(p).bytes;
    MaskClasses::add(p, plan);
    plan.add({Shared::planes(p), 0, Shared::clear_turns});
    if (rescored) {
      Phase phase = Jvp<R>::template phase<true>(p);
      phase.run = normalise;
      plan.add(phase);
    }
    plan.add({row_tasks, 0, rescored ? prepare<true> : prepare<false>});
    plan.add({G::chunks(p) * G::segments(p) * p.B * p.Hk, scratch, keys});
    if (G::segments(p) > 1) plan.add({G::chunks(p) * p.B * p.Hk, 0, B::join_segments});
    if (!G::dq_in_place(p)) plan.add({row_tasks, 0, B::write_dq});
    if (p.dmask.data && !Masks::is_ds(p) && !Shared::is_one(p))
      plan.add({Masks::tasks(p), scratch, Masks::run});
    if (p.dsinks.data) plan.add({p.H, 0, sinks});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
