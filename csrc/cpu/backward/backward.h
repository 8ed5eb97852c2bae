// The backward pass. The main phase assigns each block of keys of one key head (and, if blocks are
// few, each segment of its rows) to a task. The task accumulates its own dK and dV, and adds its
// share of dQ to the current tile of rows. These additions are made in turn, first block first, so
// every sum has one order whatever the threads do; those to the gradient of a mask that items or
// heads share have turns of their own. A task only ever waits for tasks taken before it, and follows
// its predecessor one tile behind.
#pragma once
#include "shared_mask.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct Backward {
  using G = Gradient<Mul>;
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using Op = Operand<Mul>;
  using Buffers = typename G::Buffers;
  using Shared = SharedMask<Mul>;
  static constexpr int pair = Mul::pair;

  // --- before: normaliser and delta as the tiles want them, dq = 0 ----------------
  static void prepare(const Params& p, int64_t task, char* scratch) {
    [[maybe_unused]] const typename Mul::Registers registers;
    const auto w = G::workspace(p);
    const int64_t t = task % G::tiles(p), h = task / G::tiles(p) % p.H,
                  b = task / G::tiles(p) / p.H;
    const Rows rows = G::tile_rows(p, b, h, t);
    const Normaliser<R> normaliser = w.normaliser.from(task * G::kRows);
    R* delta = w.delta + task * G::kRows;
    read_normaliser(p, rows, G::kRows, normaliser);
    std::fill(delta, delta + G::kRows, R(0));
    if constexpr (G::kByParts) {
      Buffers buf;
      G::carve(p, scratch, buf);
      pack_rows(p, w, rows, task * G::kRows, buf);
      std::fill_n(w.dq + task * G::kRows * G::padded(p.D), G::kRows * G::padded(p.D), R(0));
    } else {
      begin_dq(p, w, rows);
    }
    if (!G::of_weights(p))
      delta_from_output(p, rows, delta);
    else if (!p.constant_lse)
      delta_from_weights(p, rows, normaliser, delta, scratch);
    if (MaskGradient<Mul>::is_ds(p))
      each_part<Mul>(rows, [&](auto, const Rows& part, int64_t lane) {
        MaskGradient<Mul>::clear_unseen(p, part, normaliser.lse + lane);
      });
    w.turn[task] = int32_t(key_range(p, b, rows.i0, rows.end()).lo / kTileKeys);
  }
  static void begin_dq(const Params& p, const typename G::Workspace& w, const Rows& rows) {
    for (int64_t l = 0; l < rows.count; ++l) {
      R* dq = dq_row(p, w, rows, l);
      std::fill(dq, dq + (G::dq_in_place(p) ? p.D : G::padded(p.D)), R(0));
    }
  }
  static void delta_from_output(const Params& p, const Rows& rows, R* delta) {
    add_products(p, p.out, p.dout, rows, delta);
    if (p.dlse.data) subtract(p.dlse, rows, delta);
  }
  // delta += sum_d x y, row by row.
  static void add_products(const Params& p, const FaTensor& x, const FaTensor& y, const Rows& rows,
                           R* delta) {
    const Plane o = plane(x, rows.b, rows.h), g = plane(y, rows.b, rows.h);
    R a[FA_CPU_MAX_HEAD_DIM], c[FA_CPU_MAX_HEAD_DIM];
    for (int64_t l = 0; l < rows.count; ++l) {
      read_row(o.data, o.dtype, o.at(rows.i0 + l), o.step, p.Dv, a);
      read_row(g.data, g.dtype, g.at(rows.i0 + l), g.step, p.Dv, c);
      Vec<R> sums{};
      int64_t d = 0;
      for (; d + kLanes<R> <= p.Dv; d += kLanes<R>) sums += load(a + d) * load(c + d);
      R sum = R(0);
      for (; d < p.Dv; ++d) sum += a[d] * c[d];
      for (int x = 0; x < kLanes<R>; ++x) sum += sums[x];
      delta[l] += sum;
    }
  }
  static void subtract(const FaTensor& x, const Rows& rows, R* delta) {
    const Plane from = plane(x, rows.b, rows.h);
    for (int64_t l = 0; l < rows.count; ++l)
      delta[l] -= read<R>(x.data, x.dtype, from.at(rows.i0 + l));
  }
  static void delta_from_weights(const Params& p, const Rows& rows, Normaliser<R> normaliser,
                                 R* delta, char* scratch) {
    Buffers buf;
    G::carve(p, scratch, buf);
    each_part<Mul>(rows, [&](auto nv, const Rows& part, int64_t lane) {
      constexpr int NV = decltype(nv)::value;
      using T = Tile<R, NV>;
      const Normaliser<R> here = normaliser.from(lane);
      G::stage_rows(p, part, T::lanes, buf);
      G::each_block(p, part, here.lse, {0, p.N}, buf, [&](const Keys& keys, const auto& block) {
        G::template probabilities<NV>(p, part, keys, block, here, buf);
        R sum[T::lanes] = {};
        for (int64_t j = 0; j < keys.count; ++j)
          for (int l = 0; l < T::lanes; ++l)
            sum[l] += buf.s[j * T::lanes + l] * buf.ds[j * T::lanes + l];
        for (int l = 0; l < T::lanes; ++l)
          if (here.lse[l] != kInf<R>) delta[lane + l] += sum[l];
      });
    });
  }

  static R* dq_row(const Params& p, const typename G::Workspace& w, const Rows& rows, int64_t l) {
    if (G::dq_in_place(p))
      return static_cast<R*>(p.dq.data) + plane(p.dq, rows.b, rows.h).at(rows.i0 + l);
    return w.dq + ((rows.b * p.H + rows.h) * p.M + rows.i0 + l) * G::padded(p.D);
  }

  // --- the five products -----------------------------------------------------------
  // A block of keys of one key head, and a segment of the rows that see it.
  struct KeysTask {
    int64_t task, b, hk, chunk, segment, J0, count;
    int64_t end;  // of the block's valid keys
    KeysTask(const Params& p, int64_t number) : task(number) {
      const int64_t all = p.B * p.Hk;  // sums that tasks share have the order of their numbers
      const bool shares = p.mod.dfloats || Shared::is_one(p);
      const int64_t bhk = shares ? task % all : apart(task % all, all, p.threads);
      segment = task / (p.B * p.Hk) % G::segments(p);
      chunk = task / (p.B * p.Hk) / G::segments(p);
      b = Shared::of_items(p) ? bhk % p.B : bhk / p.Hk;
      hk = Shared::of_items(p) ? bhk / p.B : bhk % p.Hk;
      J0 = chunk * kTileKeys;
      count = std::min(kTileKeys, p.N - J0);
      end = std::min(J0 + count, key_length(p, b));
    }
  };
  static void keys(const Params& p, int64_t task, char* scratch) {
    [[maybe_unused]] const typename Mul::Registers registers;
    Buffers buf;
    G::carve(p, scratch, buf);
    const auto w = G::workspace(p);
    const KeysTask of(p, task);
    begin_keys(p, of, buf);
    const int64_t parts = G::captured_parts(p), captured = parts ? task % parts : 0;
    if (parts) {
      buf.captured = w.captured + captured * captured_floats(p.mod);
      if (!wait_for_turn(p, w.captured_turn + captured, task / parts)) return;
    }
    if (of.end > of.J0) {
      const auto block = G::stage_keys(p, of.b, of.hk, of.J0, of.end, buf, true);
      const auto k_across = summed_keys(p, of, block, buf);
      each_tile(p, w, of, [&](const Rows& rows, int64_t t, const Keys& seen) {
        if constexpr (G::kByParts)
          tile_by_parts(p, w, rows, t, seen, of.chunk, block, k_across, buf);
        else
          with_vectors<R>(rows.count, [&](auto nv) {
            tile<decltype(nv)::value>(p, w, rows, t, seen, of.chunk, block, k_across, buf);
          });
      });
    } else if (Shared::is_one(p)) {
      each_tile(p, w, of, [](const Rows&, int64_t, const Keys&) {});  // to pass turns on
    }
    if (G::kByParts)  // otherwise scaled during accumulation
      for (int64_t x = 0; x < of.count * G::padded(p.D); ++x)
        buf.dk[x] *= scale_of<R>(p, of.hk * (p.H / p.Hk));
    if (parts) pass_turn(w.captured_turn + captured, task / parts);
    write_keys(p, w, of, buf);
  }
  // Calls f(rows, their tile, the keys of the block that they see) for each tile of rows.
  template <class S = Shared, class F>
  static FA_INLINE void each_tile(const Params& p, const typename G::Workspace& w,
                                  const KeysTask& of, F f) {
    const int64_t group = p.H / p.Hk;
    const int64_t all = group * G::tiles(p);  // head by head
    for (int64_t at = all * of.segment / G::segments(p);
         at < all * (of.segment + 1) / G::segments(p); ++at) {
      if (interrupted(p)) return;
      const int64_t t = at % G::tiles(p);
      const Rows rows = G::tile_rows(p, of.b, of.hk * group + at / G::tiles(p), t);
      if (visible_keys<Mul>(p, rows, of.J0).count <= 0) {
        if (!S::add_in_turn(p, rows, t, of.chunk)) return;
        continue;
      }
      const int64_t index = G::tile_index(p, of.b, rows.h, t);
      const Keys seen = G::seen_keys(p, rows, of.J0, w.normaliser.lse + index * G::kRows);
      if (seen.count > 0) {
        f(rows, t, seen);
      } else {  // nothing to add to dq: only pass the turn on
        if (!wait_for_turn(p, w.turn + index, of.chunk)) return;
        pass_turn(w.turn + index, of.chunk);
        if (!S::add_in_turn(p, rows, t, of.chunk)) return;
      }
    }
  }
  static void begin_keys(const Params& p, const KeysTask& of, const Buffers& buf) {
    std::fill(buf.dk, buf.dk + of.count * G::padded(p.D), R(0));
    std::fill(buf.dv, buf.dv + of.count * G::padded(p.Dv), R(0));
  }
  static void write_keys(const Params& p, const typename G::Workspace& w, const KeysTask& of,
                         const Buffers& buf) {
    const auto put = [&](const FaTensor& to, const R* sum, R* parts, int64_t d) {
      const int64_t size = of.count * G::padded(d);
      if (G::segments(p) == 1)
        write(to, of.b, of.hk, of.J0, of.count, d, sum);
      else
        std::copy_n(sum, size, parts + of.task * kTileKeys * G::padded(d));
    };
    put(p.dk, buf.dk, w.dk, p.D);
    if (!G::of_weights(p)) put(p.dv, buf.dv, w.dv, p.Dv);
  }

  // dK and dV of a block of keys from its segments, in their order.
  static void join_segments(const Params& p, int64_t number, char*) {
    const auto w = G::workspace(p);
    const int64_t all = p.B * p.Hk;
    const KeysTask first(p, number / all * G::segments(p) * all + number % all);
    const auto join = [&](const FaTensor& to, R* parts, int64_t d) {
      const int64_t size = kTileKeys * G::padded(d), step = all * size;
      R* sum = parts + first.task * size;
      for (int64_t s = 1; s < G::segments(p); ++s)
        for (int64_t x = 0; x < first.count * G::padded(d); ++x) sum[x] += sum[s * step + x];
      write(to, first.b, first.hk, first.J0, first.count, d, sum);
    };
    join(p.dk, w.dk, p.D);
    if (!G::of_weights(p)) join(p.dv, w.dv, p.Dv);
  }
  static void write(const FaTensor& t, int64_t b, int64_t hk, int64_t J0, int64_t count, int64_t d,
                    const R* src) {
    const Plane to = plane(t, b, hk);
    for (int64_t j = 0; j < count; ++j)
      write_row(t.data, to.dtype, to.at(J0 + j), to.step, d, src + j * G::padded(d));
  }

  template <int NV>
  static void tile(const Params& p, const typename G::Workspace& w, const Rows& rows, int64_t t,
                   const Keys& keys, int64_t chunk, const typename G::Block& block,
                   Broadcast<E> k_across, const Buffers& buf) {
    using T = Tile<R, NV>;
    const int64_t index = G::tile_index(p, rows.b, rows.h, t), first = keys.j0 - block.J0;
    const int64_t pairs_of_rows = (rows.count + pair - 1) / pair;
    G::stage_rows(p, rows, T::lanes, buf);
    G::template scores<NV>(p, rows, keys, block, w, index * G::kRows, buf);
    if (MaskGradient<Mul>::is_ds(p)) MaskGradient<Mul>::write_ds(p, rows, keys, T::lanes, buf.ds);
    if (!Shared::add_in_turn(p, rows, t, chunk, keys, T::lanes, buf.ds)) return;
    if (buf.captured) T::captured_gradients(p, rows, keys, buf.ds, buf.score, buf.captured);
    if (!G::of_weights(p)) {  // dV += dropout(P) dO
      const R* s = p.dropout_p > 0 ? buf.dropped : buf.s;
      const Broadcast<E> dout = Op::across(plane(p.dout, rows.b, rows.h), rows.i0, rows.count, p.Dv,
                                           true, buf.dout_across, true);
      accumulate_wide<Mul, Unit::along_k>(
          {Op::tile_along(s, keys.count, T::lanes, buf.along), T::lanes / pair}, dout.data,
          dout.stride, pairs_of_rows, keys.count, G::padded(p.Dv), buf.dv + first * G::padded(p.Dv),
          G::padded(p.Dv));
    }
    T::product_gradient(p, keys.count, buf.ds, buf.derivative);
    const Broadcast<E> q =
        Op::across(plane(p.q, rows.b, rows.h), rows.i0, rows.count, p.D, true, buf.q_across, true);
    accumulate_wide<Mul, Unit::along_k>(  // dK += scale dS Q
        {Op::tile_along(buf.ds, keys.count, T::lanes, buf.along), T::lanes / pair}, q.data,
        q.stride, pairs_of_rows, keys.count, G::padded(p.D), buf.dk + first * G::padded(p.D),
        G::padded(p.D), scale_of<R>(p, rows.h));
    const E* across = Op::tile_across(buf.ds, keys.count, T::lanes, buf.across);
    if (!wait_for_turn(p, w.turn + index, chunk)) return;
    accumulate_wide<Mul, Unit::along_r>(  // dQ += scale dS^T K
        {across, T::lanes}, k_across.data + first / pair * k_across.stride, k_across.stride,
        (keys.count + pair - 1) / pair, rows.count, G::padded(p.D), dq_row(p, w, rows, 0),
        dq_stride(p), scale_of<R>(p, rows.h));
    pass_turn(w.turn + index, chunk);
  }

  // K as dQ += dS^T K reads it, summed along the keys.
  static auto summed_keys(const Params& p, const KeysTask& of, const typename G::Block& block,
                          const Buffers& buf) {
    const Plane k = plane(p.k, of.b, of.hk);
    const int64_t count = of.end - of.J0;
    if constexpr (G::kByParts) {
      Op::turned(k, of.J0, count, p.D, buf.k_across, buf.rows);
      return buf.k_across;
    } else if constexpr (G::kSameKeys) {
      return block.k;
    } else {
      return Op::across(k, of.J0, count, p.D, true, buf.k_across);
    }
  }

  // The same on tile registers: the scores of one part of the rows after another, while they are in
  // L1; then the sums over all of the rows at once, and dQ^T += K^T dS part by part.
  static void tile_by_parts(const Params& p, const typename G::Workspace& w, const Rows& rows,
                            int64_t t, const Keys& keys, int64_t chunk,
                            const typename G::Block& block, const E* k_turned, const Buffers& buf) {
    constexpr int64_t part = G::kPart, room = part * kTileKeys;  // of one part, as an operand
    const int64_t index = G::tile_index(p, rows.b, rows.h, t), first = keys.j0 - block.J0;
    const int64_t d = G::padded(p.D), dv = G::padded(p.Dv);
    const int64_t whole = round_up(keys.count, part), parts = (rows.count + part - 1) / part;
    const bool masks = MaskGradient<Mul>::is_ds(p), shared = Shared::is_one(p);
    const Shared sum(p, rows, t, chunk);
    bool begun = false;
    Keys seen[G::kRows / part];  // of each part; keys that it does not see are 0 in the sums
    each_part<Mul>(rows, [&](auto nv, const Rows& here, int64_t lane) {
      constexpr int NV = decltype(nv)::value;
      using T = Tile<R, NV>;
      const int64_t at = index * G::kRows + lane, operand = lane / part * room;
      const Normaliser<R> normaliser = w.normaliser.from(at);
      const Keys& mine = seen[lane / part] = G::seen_keys(p, here, block.J0, normaliser.lse);
      const int64_t skipped = mine.count > 0 ? mine.j0 - keys.j0 : 0;
      const int64_t end = skipped + round_up(mine.count, part);
      for (E* along : {buf.along + operand, buf.along_p + operand}) {
        std::fill(along, along + skipped * part, E{});
        std::fill(along + end * part, along + whole * part, E{});
      }
      if (mine.count == 0) return;
      bool fit = G::template probabilities<NV>(p, here, mine, block, normaliser,
                                               packed_rows(p, w, at, buf));
      if (!G::of_weights(p))
        Op::tile_along(p.dropout_p > 0 ? buf.dropped : buf.s, mine.count,
                       buf.along_p + operand + skipped * part);
      const typename G::template OfScores<NV> of_scores(normaliser, w.delta + at);
      const bool keep = masks || shared || buf.captured;
      const auto gradient = [&](int64_t j, int v) {
        const int64_t x = j * T::lanes + v * T::W;
        const Vec<R> ds = of_scores(v, load(buf.s + x), load(buf.ds + x));
        if (keep) store(buf.ds + x, ds);
        return T::product_gradient(p, ds, buf.derivative + x);
      };
      fit &= Op::along_and_across(mine.count, buf.along + operand + skipped * part,
                                  buf.across + operand, gradient);
      if (masks) MaskGradient<Mul>::write_ds(p, here, mine, T::lanes, buf.ds);
      if (shared && (begun || (begun = sum.begin(p)))) sum.add(here, mine, T::lanes, buf.ds);
      if (buf.captured) T::captured_gradients(p, here, mine, buf.ds, buf.score, buf.captured);
      if constexpr (G::kPlanes) {
        if (fit) return;
        for (E* along : {buf.along + operand, buf.along_p + operand})
          std::fill(along, along + whole * part, E{});
        if (!keep) G::of_all(of_scores, mine.count, buf);
        if (!wait_for_turn(p, w.turn + index, chunk)) return;
        add_on_vectors<NV>(p, here, mine, block.J0, dq_part(p, w, rows, lane), buf);
        seen[lane / part].count = 0;
      }
    });
    if (shared && !begun && !sum.begin(p)) return;
    if (shared) sum.end(p);
    const auto add = [&](const E* along, const E* across, int64_t columns, R* sum) {
      Op::multiply_add(along, part, room, across, columns, parts, whole, columns,
                       sum + first * columns, columns);
    };
    const Buffers packed = packed_rows(p, w, index * G::kRows, buf);
    if (!G::of_weights(p)) add(buf.along_p, packed.dout_across, dv, buf.dv);
    add(buf.along, packed.q_across, d, buf.dk);
    if (!wait_for_turn(p, w.turn + index, chunk)) return;
    for (int64_t x = 0; x < parts; ++x)
      Op::multiply_add(k_turned + (seen[x].j0 - block.J0) * d, part, part * d,
                       buf.across + x * room, part, round_up(seen[x].count, part) / part, d, part,
                       dq_part(p, w, rows, x * part), part);
    pass_turn(w.turn + index, chunk);
  }
  // Adds a part of the rows to the three sums on vectors, if one of its operands has no planes.
  template <int NV>
  static void add_on_vectors(const Params& p, const Rows& rows, const Keys& keys, int64_t J0, R* dq,
                             const Buffers& buf) {
    using T = Tile<R, NV>;
    using Vectors = Plain<R>;
    using OfRows = Operand<Vectors>;
    const auto add = [&](const R* tile, const FaTensor& t, int64_t columns, R* sum) {
      const Broadcast<R> across = OfRows::across(plane(t, rows.b, rows.h), rows.i0, rows.count,
                                                 columns, true, buf.vectors.turned);
      accumulate_wide<Vectors, Unit::along_k>(
          {tile, T::lanes}, across.data, across.stride, rows.count, keys.count,
          round_up(columns, T::W), sum + (keys.j0 - J0) * G::padded(columns), G::padded(columns));
    };
    if (!G::of_weights(p)) add(p.dropout_p > 0 ? buf.dropped : buf.s, p.dout, p.Dv, buf.dv);
    T::product_gradient(p, keys.count, buf.ds, buf.derivative);
    add(buf.ds, p.q, p.D, buf.dk);
    const Broadcast<R> k = keys_on_vectors(p, plane(p.k, rows.b, key_head(p, rows.h)), keys, rows,
                                           p.D, buf.k_unfit + (keys.j0 - J0), buf.vectors.keys);
    product<Vectors, Unit::along_r, NV>({k.data, k.stride}, buf.ds, T::lanes, keys.count, p.D,
                                        Accumulate<R>{dq, T::lanes});
  }

  // The buffers, with pointers to the rows that `prepare` packed, from this row on.
  static Buffers packed_rows(const Params& p, const typename G::Workspace& w, int64_t row,
                             Buffers buf) {
    buf.q = w.q + row * G::padded(p.D);
    buf.q_across = w.q_across + row * G::padded(p.D);
    buf.dout = w.dout + row * G::padded(p.Dv);
    buf.dout_across = w.dout_across + row * G::padded(p.Dv);
    buf.q_unfit = w.q_unfit + row;
    buf.dout_unfit = w.dout_unfit + row;
    return buf;
  }
  static void pack_rows(const Params& p, const typename G::Workspace& w, const Rows& rows,
                        int64_t first, const Buffers& buf) {
    each_part<Mul>(rows, [&](auto, const Rows& part, int64_t lane) {
      const Buffers to = packed_rows(p, w, first + lane, buf);
      G::stage_rows(p, part, G::kPart, to);
      Op::across(plane(p.q, part.b, part.h), part.i0, part.count, p.D, to.q_across, buf.rows);
      if (!G::of_weights(p))
        Op::across(plane(p.dout, part.b, part.h), part.i0, part.count, p.Dv, to.dout_across,
                   buf.rows);
    });
  }
  static R* dq_part(const Params& p, const typename G::Workspace& w, const Rows& rows,
                    int64_t lane) {
    const int64_t tile = G::tile_index(p, rows.b, rows.h, rows.i0 / G::kRows);
    return w.dq + (tile * G::kRows + lane) * G::padded(p.D);
  }

  static int64_t dq_stride(const Params& p) {
    return G::dq_in_place(p) ? p.dq.stride[2] : G::padded(p.D);
  }

  // --- after -----------------------------------------------------------------------
  static void write_dq(const Params& p, int64_t task, char*) {
    const auto w = G::workspace(p);
    const int64_t t = task % G::tiles(p), bh = task / G::tiles(p);
    const Rows rows = G::tile_rows(p, bh / p.H, bh % p.H, t);
    const Plane to = plane(p.dq, rows.b, rows.h);
    if constexpr (G::kByParts) {
      R scale[G::kPart];
      std::fill(scale, scale + G::kPart, scale_of<R>(p, rows.h));
      return each_part<Mul>(rows, [&](auto, const Rows& part, int64_t lane) {
        write_transposed(dq_part(p, w, rows, lane), G::kPart, scale, to, part.i0, part.count, 0,
                         p.D);
      });
    }
    for (int64_t l = 0; l < rows.count; ++l)
      write_row(p.dq.data, to.dtype, to.at(rows.i0 + l), to.step, p.D, dq_row(p, w, rows, l));
  }

  // A sink is a key without a value: dsink_h = -sum exp(sink - lse - tail) delta.
  static void sinks(const Params& p, int64_t h, char*) {
    const auto w = G::workspace(p);
    const R sink = sink_of<R>(p.sinks, h);
    double sum = 0;
    for (int64_t b = 0; b < p.B; ++b) {
      const int64_t at = G::tile_index(p, b, h, 0) * G::kRows;
      const Normaliser<R> normaliser = w.normaliser.from(at);
      for (int64_t i = 0; i < p.M; ++i)
        sum -= std::exp((double(sink) - double(normaliser.lse[i])) - double(normaliser.tail[i])) *
               double(w.delta[at + i]);
    }
    const R result = R(sum);
    write_row(p.dsinks.data, p.dsinks.dtype, h * p.dsinks.stride[1], 1, 1, &result);
  }

  // The gradient of captured numbers: zeros to add to, before the main phase; the sum of the parts
  // after it.
  static void clear_captured(const Params& p, int64_t part, char*) {
    const auto w = G::workspace(p);
    const int64_t n = captured_floats(p.mod);
    std::fill_n(w.captured + part * n, n, R(0));
    w.captured_turn[part] = 0;
  }
  static constexpr int64_t kCapturedAtOnce = 4096;
  static void sum_captured(const Params& p, int64_t task, char*) {
    const auto w = G::workspace(p);
    const int64_t n = captured_floats(p.mod), begin = task * kCapturedAtOnce;
    R* to = static_cast<R*>(p.mod.dfloats);
    for (int64_t x = begin; x < std::min(n, begin + kCapturedAtOnce); ++x) {
      R sum = R(0);
      for (int64_t part = 0; part < G::captured_parts(p); ++part) sum += w.captured[part * n + x];
      to[x] = sum;
    }
  }

  // The gradients of a mask, of sinks and of captured numbers, where the main phase does not compute
  // them.
  static void add_others(const Params& p, Plan& plan, bool mask_is_done) {
    Buffers unused;
    if (p.dmask.data && !mask_is_done)
      plan.add({MaskGradient<Mul>::tasks(p), G::carve(p, nullptr, unused), MaskGradient<Mul>::run});
    if (p.dsinks.data) plan.add({p.H, 0, sinks});
    const int64_t numbers = p.mod.dfloats ? captured_floats(p.mod) : 0;
    plan.add({(numbers + kCapturedAtOnce - 1) / kCapturedAtOnce, 0, sum_captured});
  }
  static Plan plan(const Params& p) {
    Plan plan;
    Buffers unused;
    const size_t scratch = G::carve(p, nullptr, unused);
    const int64_t row_tasks = p.B * p.H * G::tiles(p);
    plan.workspace = Shared::workspace(p).bytes;
    MaskClasses::add(p, plan);
    plan.add({Shared::planes(p), 0, Shared::clear_turns});
    plan.add({row_tasks, G::of_weights(p) || G::kByParts ? scratch : 0, prepare});
    plan.add({G::captured_parts(p), 0, clear_captured});
    plan.add({G::key_tasks(p), scratch, keys});
    if (G::segments(p) > 1) plan.add({G::chunks(p) * p.B * p.Hk, 0, join_segments});
    if (!G::dq_in_place(p)) plan.add({row_tasks, 0, write_dq});
    add_others(p, plan, MaskGradient<Mul>::is_ds(p) || Shared::is_one(p));
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
