// The gradient of one tile of scores (FlashAttention-2, Dao 2023, Algorithm 2, with the tile
// transposed), and what every phase of the backward pass shares: the workspace and a thread's
// buffers.
//
//   P = exp(S - lse - tail)   dP = V dO^T   dS = P * (dropout(dP) - delta)
//
// delta_i = sum_d dO_id O_id - dlse_i, which is sum_j P_ij dP_ij minus the gradient of the LSE. The
// gradient of attention weights takes the same path: there dP is given instead of computed.
#pragma once
#include <thread>

#include "../amx/split_fallback.h"
#include "../base/plan.h"
#include "../forward/few_rows.h"

namespace fa {
namespace FA_ISA {

// Turns are taken within one call, by threads that share only this number. False if the run is
// interrupted: then turns are not passed on.
inline bool wait_for_turn(const Params& p, const int32_t* turn, int64_t mine) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; ++spins)
    if (spins > 64) {
      if (interrupted(p)) return false;
      std::this_thread::yield();
    }
  return true;
}
inline void pass_turn(int32_t* turn, int64_t mine) {
  __atomic_store_n(turn, int32_t(mine + 1), __ATOMIC_RELEASE);
}

template <class Mul>
struct Gradient {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using Op = Operand<Mul>;
  static constexpr int pair = Mul::pair;
  static constexpr int64_t kRows = Sizes<Mul>::rows, kPart = Sizes<Mul>::part;

  static int64_t tiles(const Params& p) { return (p.M + kRows - 1) / kRows; }
  static int64_t chunks(const Params& p) { return (p.N + kTileKeys - 1) / kTileKeys; }
  static int64_t padded(int64_t d) { return round_up(d, Sizes<Mul>::padding); }
  static Rows tile_rows(const Params& p, int64_t b, int64_t h, int64_t t) {
    const int64_t i0 = t * kRows;
    return {b, h, i0, std::min(kRows, p.M - i0)};
  }

  // Few keys and many rows (cross-attention, grouped heads) give few blocks of keys to distribute:
  // then the rows are split, too, into segments of at least four tiles and 256 rows. The rule does
  // not depend on B, H or threads, so neither does the order of a sum.
  static int64_t segments(const Params& p) {
    const int64_t group = p.Hk ? p.H / p.Hk : 0, few = most(1, chunks(p));
    return most(1, least(group * tiles(p) / most(4, 256 / kRows), 16 / few));
  }

  // The gradient of captured numbers is summed in so many parts: the number depends on the call
  // alone, so a sum has one order. Tasks share a part if there are more of them, in turn.
  static int64_t captured_parts(const Params& p) {
    if (!p.mod.dfloats) return 0;
    // At most 64 MiB, and less work to add them up than the scores are, if four allow that.
    const int64_t numbers = most(1, captured_floats(p.mod));
    const int64_t fit = (int64_t{64} << 20) / sizeof(R) / numbers;
    const int64_t worth = most(4, p.B * p.H * p.M * p.N / (4 * numbers));
    return most(1, least(least(64, least(fit, worth)), key_tasks(p)));
  }
  static int64_t key_tasks(const Params& p) { return chunks(p) * segments(p) * p.B * p.Hk; }

  // True if dP comes from the gradient of the weights, not from dO and V.
  static bool of_weights(const Params& p) { return p.dweights.data != nullptr; }

  static constexpr bool kByParts = kPart < kRows, kPlanes = Mul::planes > 1;
  // True if scores have the roundings of few_rows.h. (Tiles and quads have one path only.)
  static constexpr bool kMayBeFew = !kByParts && pair <= 2;
  static bool few(const Params& p) {
    if constexpr (!kMayBeFew) return false;
    return FewRows<Mul>::suit(p);
  }

  // dq is summed in place if its rows are whole vectors of the computing type, and not taken by
  // parts.
  static bool dq_in_place(const Params& p) {
    return !kByParts && p.dq.dtype == dtype_of<R> && p.dq.stride[3] == 1 && p.D % kLanes<R> == 0;
  }
  struct Workspace {
    Normaliser<R> normaliser;  // [B H][tiles][kRows]
    R* delta;                  // the same
    R* dq;          // [B H M][padded(D)], unless summed in place; if rows are taken by parts, [B
                    // H][tiles][parts][padded(D)][kPart]
    int32_t* turn;  // [B H][tiles]: the chunk of keys that adds to dq next
    R *dk, *dv;     // [tasks][keys][padded(D)], [..padded(Dv)]: sums of segments, if any
    R* captured;    // [captured_parts][numbers]: the gradient of captured numbers
    int32_t* captured_turn;  // [captured_parts]: the task that adds to it next, by its rank
    E *q, *dout, *q_across, *dout_across;  // [B H][tiles], where rows are taken by parts
    uint8_t *q_unfit, *dout_unfit;         // [B H][tiles][kRows]: which rows have no planes
    size_t bytes;
  };
  static Workspace workspace(const Params& p) {
    Scratch take = MaskClasses::workspace_behind(p);
    const int64_t rows = p.B * p.H * tiles(p) * kRows;
    Workspace w;
    w.normaliser.lse = take.array<R>(rows);
    w.normaliser.tail = take.array<R>(rows);
    w.delta = take.array<R>(rows);
    w.dq = take.array<R>(dq_in_place(p) ? 0 : (kByParts ? rows : p.B * p.H * p.M) * padded(p.D));
    w.turn = take.array<int32_t>(p.B * p.H * tiles(p));
    const int64_t parts = segments(p) == 1 ? 0 : segments(p) * chunks(p) * p.B * p.Hk * kTileKeys;
    w.dk = take.array<R>(parts * padded(p.D));
    w.dv = take.array<R>(parts * padded(p.Dv));
    w.captured = take.array<R>(captured_parts(p) * captured_floats(p.mod));
    w.captured_turn = take.array<int32_t>(captured_parts(p));
    const int64_t packed = kByParts ? rows : 0, packed_dout = of_weights(p) ? 0 : packed;
    w.q = take.array<E>(packed * padded(p.D));
    w.q_across = take.array<E>(packed * padded(p.D));
    w.dout = take.array<E>(packed_dout * padded(p.Dv));
    w.dout_across = take.array<E>(packed_dout * padded(p.Dv));
    w.q_unfit = take.array<uint8_t>(packed);
    w.dout_unfit = take.array<uint8_t>(packed_dout);
    w.bytes = take.used;
    return w;
  }
  static int64_t tile_index(const Params& p, int64_t b, int64_t h, int64_t t) {
    return (b * p.H + h) * tiles(p) + t;
  }

  struct Buffers {
    E *k, *v, *k_across;                          // of one block of keys
    E *q, *dout, *q_across, *dout_across, *rows;  // of one tile of rows, or part of it
    R *s, *ds, *dropped;                          // [keys][lanes]
    R* derivative;      // [keys][lanes], of the scores by the products; null if 1
    E *along, *across;  // a tile as an operand
    E* along_p;         // for P, if rows are taken by parts
    R *dk, *dv;         // [keys][padded(D)], [keys][padded(Dv)]
    R* sum;             // [keys][lanes], mask gradients
    ScoreScratch<R> score;
    R* captured;  // the part of the gradient of captured numbers that the task adds to, or null
    E* few_q;     // [rows][padded(D)], and [rows][keys] of S: few_rows.h
    R* few_s;
    // Flags of the block's keys, and of the rows, that have no planes; and buffers for those.
    uint8_t *k_unfit, *v_unfit, *q_unfit, *dout_unfit;
    VectorScratch vectors;
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t lanes = kPart, rows = kRows, keys = kTileKeys, tile = keys * lanes;
    const int64_t d = padded(p.D), dv = padded(p.Dv);
    b.k = take.array<E>(keys * d / pair);
    b.v = take.array<E>(keys * dv / pair);
    b.k_across = take.array<E>(keys * (d / pair + kSpare<E>));
    b.q = take.array<E>(d / pair * lanes);
    b.dout = take.array<E>(dv / pair * lanes);
    b.q_across = take.array<E>(kByParts ? 0 : lanes * (d / pair + kSpare<E>));
    b.dout_across = take.array<E>(kByParts ? 0 : lanes * (dv / pair + kSpare<E>));
    b.rows = take.array<E>(Sizes<Mul>::staged * std::max({d, dv, keys}));
    b.s = take.array<R>(tile);
    b.ds = take.array<R>(tile);
    b.dropped = take.array<R>(p.dropout_p > 0 ? tile : 0);
    b.derivative = has_derivative(p) ? take.array<R>(tile) : nullptr;
    const bool converted = kByParts || sizeof(E) != sizeof(R) || pair > 1;
    b.along = take.array<E>(converted ? keys * rows / pair : 0);
    b.across = take.array<E>(converted ? keys * rows / pair : 0);
    b.along_p = take.array<E>(kByParts ? keys * rows : 0);
    b.dk = take.array<R>(keys * d);
    b.dv = take.array<R>(keys * dv);
    b.sum = take.array<R>(p.dmask.data ? keys * rows : 0);
    b.score = ScoreScratch<R>::of(take, p, p.mask.data || of_weights(p) ? keys * kLanes<R> : 0);
    if (p.mod.dfloats && code_of(p.mod).reads_products) b.score.products = take.array<R>(tile);
    b.captured = nullptr;
    b.few_q = take.array<E>(few(p) ? p.M * d : 0);
    b.few_s = take.array<R>(few(p) ? keys * kLanes<R> : 0);
    if constexpr (kPlanes) {
      b.k_unfit = take.array<uint8_t>(keys);
      b.v_unfit = take.array<uint8_t>(keys);
      b.q_unfit = take.array<uint8_t>(kPart);
      b.dout_unfit = take.array<uint8_t>(kPart);
      b.vectors = VectorScratch::of(take, std::max(d, dv));
    }
    return take.used;
  }

  struct Block {  // a block of keys, staged
    int64_t J0;
    Broadcast<E> k, v;
  };
  // True if K is the same operand for the scores and for dQ.
  static constexpr bool kSameKeys = !kByParts && pair == 1;
  // `summed`: K is an operand of dQ, too, for all rows.
  static Block stage_keys(const Params& p, int64_t b, int64_t hk, int64_t J0, int64_t end,
                          const Buffers& buf, bool summed = false) {
    Block block{J0, {}, {}};
    const int64_t count = std::min(J0 + kTileKeys, end) - J0;
    const auto along = [&](const FaTensor& t, int64_t d, E* to, [[maybe_unused]] uint8_t* unfit) {
      if constexpr (kPlanes)
        return Op::along(plane(t, b, hk), J0, count, d, to, unfit);
      else
        return Op::along(plane(t, b, hk), J0, count, d, to);
    };
    if constexpr (kSameKeys)
      if (summed) {
        const bool often = p.H / p.Hk * tiles(p) >= 4;
        block.k = Op::across(plane(p.k, b, hk), J0, count, p.D, true, buf.k_across, often);
      }
    if (!summed || !kSameKeys) block.k = along(p.k, p.D, buf.k, buf.k_unfit);
    if (!of_weights(p)) block.v = along(p.v, p.Dv, buf.v, buf.v_unfit);
    return block;
  }
  static void stage_rows(const Params& p, const Rows& rows, int64_t lanes, const Buffers& buf) {
    const auto turn = [&](const FaTensor& t, int64_t d, E* to, [[maybe_unused]] uint8_t* unfit) {
      const Plane from = plane(t, rows.b, rows.h);
      if constexpr (kPlanes) {
        std::fill_n(unfit, kPart, uint8_t(kFits));
        Op::transposed(from, rows.i0, rows.count, 0, d, lanes, to, buf.rows, unfit);
      } else {
        Op::transposed(from, rows.i0, rows.count, 0, d, lanes, to, buf.rows);
      }
    };
    if constexpr (kMayBeFew)
      if (few(p))
        FewRows<Mul>::stage(plane(p.q, rows.b, rows.h), rows.i0, rows.count, p.D, buf.few_q);
    if (!few(p)) turn(p.q, p.D, buf.q, buf.q_unfit);
    if (!of_weights(p)) turn(p.dout, p.Dv, buf.dout, buf.dout_unfit);
  }

  // buf.s = P and, with dropout, buf.dropped = dropout(P); buf.ds = dropout(dP). Returns whether
  // all operands have planes.
  template <int NV>
  static bool probabilities(const Params& p, const Rows& rows, const Keys& keys, const Block& block,
                            Normaliser<R> normaliser, const Buffers& buf) {
    using T = Tile<R, NV>;
    using Dots = DotProducts<Mul, NV>;
    Broadcast<E> k = block.k, v = block.v;
    k.data += (keys.j0 - block.J0) * k.stride;
    v.data += (keys.j0 - block.J0) * v.stride;
    // s = x y of these lanes, which planes cannot serve.
    [[maybe_unused]] const auto on_vectors = [&](const FaTensor& x, const uint8_t* unfit,
                                                 const FaTensor& y, uint32_t lanes, int64_t columns,
                                                 R factor, R* s) {
      if constexpr (kPlanes)
        products_on_vectors<NV>(p, plane(x, rows.b, key_head(p, rows.h)), keys,
                                unfit + (keys.j0 - block.J0), plane(y, rows.b, rows.h), rows, lanes,
                                columns, factor, buf.vectors, s);
    };
    T::prefetch_mask(p, rows, keys);
    bool fit = true;
    if constexpr (kPlanes) {
      const bool outputs = !of_weights(p);
      fit = !any_unfit(buf.q_unfit, rows.count) &&
            !(outputs && any_unfit(buf.dout_unfit, rows.count)) &&
            !see_unfit_key(p, rows, keys, {buf.k_unfit, outputs ? buf.v_unfit : nullptr, block.J0});
    }
    if constexpr (kByParts) {
      uint32_t lanes = 0;
      if constexpr (kPlanes)
        lanes = scored_on_vectors(p, rows, keys, {buf.k_unfit, nullptr, block.J0}, buf.q_unfit,
                                  normaliser.tail);
      R factor = R(1);
      Dots::run(k, buf.q, p.D, keys.count, lanes ? scale_of<R>(p, rows.h) : R(1), buf.s);
      if (!lanes) {
        factor = T::score_unscaled(p, rows, keys, buf.s, buf.derivative, buf.score);
      } else {
        on_vectors(p.k, buf.k_unfit, p.q, lanes, p.D, scale_of<R>(p, rows.h), buf.s);
        T::score(p, rows, keys, buf.s, buf.derivative, buf.score);
      }
      T::template probabilities<true>(keys.count, normaliser, buf.s, factor);
    } else {
      if (!few(p))
        Dots::run(k, buf.q, p.D, keys.count, scale_of<R>(p, rows.h), buf.s);
      else if constexpr (kMayBeFew)
        FewRows<Mul>::tile(k, keys.count, p.D, buf.few_q, rows.count, scale_of<R>(p, rows.h),
                           buf.few_s, buf.s);
      T::score(p, rows, keys, buf.s, buf.derivative, buf.score);
      T::probabilities(keys.count, normaliser, buf.s);
    }
    if (of_weights(p)) {
      Operand<Plain<R>>::transposed(plane(p.dweights, rows.b, rows.h), rows.i0, rows.count, keys.j0,
                                    keys.count, T::lanes, buf.ds, buf.score.rows);
      const R share = p.average_heads ? R(1) / R(p.H) : R(1);
      T::each(keys.count, buf.ds, [&](int64_t, int, Vec<R> x) { return x * share; });
    } else if (fit) {
      Dots::run(v, buf.dout, p.Dv, keys.count, R(1), buf.ds);
    } else {
      on_vectors(p.v, buf.v_unfit, p.dout, ~0u, p.Dv, R(1), buf.ds);
    }
    if (p.dropout_p > 0) {
      std::copy(buf.s, buf.s + keys.count * T::lanes, buf.dropped);
      T::dropout(p, rows, keys, buf.dropped, buf.ds);
    }
    return fit;
  }

  // The gradient of scores, P * (dP - delta), of one tile of rows.
  template <int NV>
  struct OfScores {
    Vec<R> shift[NV], lse[NV];
    FA_INLINE OfScores(Normaliser<R> normaliser, const R* delta) {
      for (int v = 0; v < NV; ++v) {
        shift[v] = load(delta + v * kLanes<R>);
        lse[v] = load(normaliser.lse + v * kLanes<R>);
      }
    }
    FA_INLINE Vec<R> operator()(int v, Vec<R> p, Vec<R> dp) const {
      const Vec<R> ds = p * (dp - shift[v]);
      return lse[v] == kInf<R> ? Vec<R>{} : normal_or_zero<R>(ds);  // 0 even where dP is not finite
    }
  };
  // buf.ds = the gradient with respect to the scores; `at`: the first row's place in the workspace.
  template <int NV>
  static void scores(const Params& p, const Rows& rows, const Keys& keys, const Block& block,
                     const Workspace& w, int64_t at, const Buffers& buf) {
    const Normaliser<R> normaliser = w.normaliser.from(at);
    probabilities<NV>(p, rows, keys, block, normaliser, buf);
    of_all(OfScores<NV>(normaliser, w.delta + at), keys.count, buf);
  }
  // From P and dP, which `probabilities` left there.
  template <int NV>
  static FA_INLINE void of_all(const OfScores<NV>& of_scores, int64_t keys, const Buffers& buf) {
    using T = Tile<R, NV>;
    T::each(keys, buf.ds, [&](int64_t j, int v, Vec<R> dp) {
      return of_scores(v, load(buf.s + j * T::lanes + v * T::W), dp);
    });
  }

  // The keys of the block at J0 that some of the rows see, given their LSE (see `hiding_classes`).
  static Keys seen_keys(const Params& p, const Rows& rows, int64_t J0, const R* lse) {
    const Keys keys = visible_keys<Mul>(p, rows, J0);
    const bool masked = p.mask.data || p.mod.classes.data;
    return masked ? unmasked_keys(p, rows, keys, hiding_classes(lse, rows.count)) : keys;
  }

  // Calls f(keys, block) for every block of keys that the rows see, as `Of` stages it.
  template <class Of = Gradient, class F>
  static void each_block(const Params& p, const Rows& rows, const R* lse, KeyRange within,
                         const typename Of::Buffers& buf, F f) {
    const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
    const int64_t end = std::min(seen.hi, within.hi);
    const int64_t begin = std::max(seen.lo, within.lo) / kTileKeys * kTileKeys;
    for (int64_t J0 = begin; J0 < end; J0 += kTileKeys) {
      if (interrupted(p)) return;
      const Keys keys = seen_keys(p, rows, J0, lse);
      if (keys.count <= 0) continue;
      f(keys, Of::stage_keys(p, rows.b, key_head(p, rows.h), J0, seen.hi, buf));
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa
