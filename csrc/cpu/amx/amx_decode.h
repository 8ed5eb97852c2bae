// Decoding (few query rows, many keys) on AMX tiles. Rows and heads that share a key head fill the
// lanes of one tile of scores, up to 16 of them, so that grouped heads cost as much as one.
// S^T = K Q^T reads bfloat16 K in place. For O += P V, V's rows are only paired (or split and
// paired), and P, which is small, is transposed. Chunks and their merge are those of decode.h. The
// merge recomputes a row that tiles could not compute in one of its chunks.
#pragma once
#include "../forward/decode.h"
#include "../forward/forward.h"
#include "amx_softmax.h"

namespace fa {
namespace FA_ISA {

template <int P>
struct WeightedSum<Amx<P>> : WeightedSum<Plain<float>> {};

template <int P>
struct AmxDecode : Decode<Amx<P>> {
  using Base = Decode<Amx<P>>;
  using Softmax = AmxSoftmax<P, 1>;
  using E = Planes<P>;
  using typename Base::Op;
  using typename Base::T;
  static constexpr int64_t kLanesUsed = 16;
  static int64_t padded(int64_t d) { return round_up(d, kStep); }

  static int64_t heads_per_tile(const Params& p) {
    return std::clamp<int64_t>(kLanesUsed / std::max<int64_t>(p.M, 1), 1,
                               std::max<int64_t>(Base::group(p), 1));
  }
  static int64_t tiles(const Params& p) {
    return (Base::group(p) + heads_per_tile(p) - 1) / heads_per_tile(p);
  }
  // Lane x * M + i is row i of head h + x.
  struct Heads {
    int64_t b, h, count, M;
    FA_INLINE Rows rows(int64_t x) const { return {b, h + x, 0, M}; }
  };
  template <class F>
  static void each_tile(const Params& p, int64_t b, int64_t hk, F f) {
    const int64_t most = heads_per_tile(p), end = (hk + 1) * Base::group(p);
    int64_t t = 0;
    for (int64_t h = hk * Base::group(p); h < end; h += most)
      f(t++, Heads{b, h, std::min(most, end - h), p.M});
  }

  struct State {   // one tile of lanes
    E* q;          // [padded(D) / 2][planes][16] pairs
    float* out;    // [16][padded(Dv)], not yet divided by l
    float *m, *l;  // [16]
  };
  struct Buffers {
    E* q;
    float *out, *m, *l;        // of all tiles
    float *s, *one, *rescale;  // [kTileKeys][16], the same for one head
    E *k, *v, *p, *turned, *rows;
    uint8_t *k_unfit, *v_unfit, *not_served;  // per key; per lane of all tiles
    ScoreScratch<float> score;
    State state(const Params& p, int64_t t) const {
      return {q + t * padded(p.D) * 16, out + t * 16 * padded(p.Dv), m + t * 16, l + t * 16};
    }
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t lanes = tiles(p) * 16, d = padded(p.D), dv = padded(p.Dv);
    b.q = take.template array<E>(lanes * d);
    b.out = take.array<float>(lanes * dv);
    b.m = take.array<float>(lanes);
    b.l = take.array<float>(lanes);
    b.s = take.array<float>(kTileKeys * 16);
    b.one = take.array<float>(kTileKeys * 16);
    b.rescale = take.array<float>(16);
    b.k = take.template array<E>(kTileKeys * d);
    b.v = take.template array<E>(kTileKeys * dv);
    b.p = take.template array<E>(kTileKeys * 16);
    b.turned = take.template array<E>(kTileKeys * 16);
    b.rows = take.template array<E>(kStep * std::max(d, dv));
    b.k_unfit = take.array<uint8_t>(kTileKeys);
    b.v_unfit = take.array<uint8_t>(kTileKeys);
    b.not_served = take.array<uint8_t>(lanes);
    b.score = ScoreScratch<float>::of(take, p, p.mask.data ? kTileKeys * 16 : 0);
    return take.used;
  }

  static void begin(const Params& p, const Heads& heads, const State& st, E* rows_buf,
                    uint8_t* not_served) {
    const typename Op::Source* from[16];
    const int64_t d = padded(p.D);
    std::fill_n(not_served, 16, uint8_t(kFits));
    for (int64_t l = 0; l < 16; ++l)
      from[l] =
          Op::row(plane(p.q, heads.b, heads.h + l / heads.M), l % heads.M, 0,
                  l < heads.count * heads.M, p.D, Op::as_source(rows_buf) + l * d, not_served + l);
    Op::transpose_rows(from, d, 16, Op::as_pairs(st.q));
    std::fill_n(st.out, 16 * padded(p.Dv), 0.0f);
    std::fill_n(st.m, 16, -kInf<float>);
    std::fill_n(st.l, 16, 0.0f);
  }

  // Calls f(rows, tile) on each head's lanes alone, in the layout of the score pipeline.
  template <class F>
  static void each_head(const Heads& heads, int64_t keys, float* s, float* one, F f) {
    for (int64_t x = 0; x < heads.count; ++x) {
      const __mmask16 mine = ((1u << heads.M) - 1) << x * heads.M;
      for (int64_t j = 0; j < keys; ++j)
        _mm512_storeu_ps(one + j * 16, _mm512_maskz_compress_ps(mine, load(s + j * 16)));
      f(heads.rows(x), one);
      for (int64_t j = 0; j < keys; ++j)
        store(s + j * 16,
              (Vec<float>)_mm512_mask_expand_ps(load(s + j * 16), mine, load(one + j * 16)));
    }
  }

  static bool hidden_by_mod(const Params& p, const Heads& heads, const Keys& keys) {
    bool all = p.mod.classes.data != nullptr;
    for (int64_t x = 0; x < heads.count && all; ++x)
      all = FA_ISA::hidden_by_mod(p, heads.rows(x), keys);
    return all;
  }

  // As T::score_unscaled, for each head separately, or once for all if they have one row and are
  // alike.
  static float score(const Params& p, const Heads& heads, const Keys& keys, const Buffers& buf) {
    if (heads.count == 1 || (heads.M == 1 && heads_alike(p)))
      return T::score_unscaled(p, heads.rows(0), keys, buf.s, nullptr, buf.score);
    const float scale = scale_of<float>(p, heads.h);
    bool plain = scale > 0;
    for (int64_t x = 0; x < heads.count; ++x) plain = plain && T::plain(p, heads.rows(x), keys);
    if (plain) return scale;
    T::each(keys.count, buf.s, [&](int64_t, int, Vec<float> x) { return x * scale; });
    each_head(heads, keys.count, buf.s, buf.one,
              [&](const Rows& rows, float* s) { T::score(p, rows, keys, s, nullptr, buf.score); });
    return 1;
  }

  // Calls f(first key, keys) for each step, and prefetches the rows of the next step.
  template <class A, class F>
  static void each_step(const A& a, const Keys& keys, int64_t columns, F f) {
    for (int64_t j = 0; j < keys.count; j += kStep) {
      const int64_t next = keys.j0 + j + kStep;
      if (Base::goes_on(next)) prefetch(a, next, kStep, columns);
      f(j, std::min(kStep, keys.count - j));
    }
  }

  // A block of keys as products read it: whole, or, if it spans several pages, a tile's 16 keys at
  // a time, read in place.
  struct Staged {
    static constexpr int64_t kKeys = 16;
    Broadcast<E> of[kTileKeys / kKeys];
    bool whole;
    Staged(const KeyPlane& k, const Keys& keys, int64_t columns, const Buffers& buf)
        : whole(P > 1 || k.scaled() || k.one_block(keys.j0, keys.count)) {
      if (whole) of[0] = Op::along(k, keys.j0, keys.count, columns, buf.k, buf.k_unfit);
      for (int64_t j = 0; j < keys.count && !whole; j += kKeys)
        of[j / kKeys] = Op::along(k, keys.j0 + j, std::min(kKeys, keys.count - j), columns,
                                  buf.k + j * padded(columns), nullptr, kKeys);
    }
    void products(const E* q, int64_t columns, int64_t j, int64_t n, float* s) const {
      if (whole)
        return tile_products<1, P>({of[0].data + j * of[0].stride, of[0].stride}, q, columns, n, s);
      for (const int64_t end = j + n; j < end; j += kKeys, s += 16 * kKeys) {
        const TileRows<P> here{of[j / kKeys].data, of[j / kKeys].stride, kStep};
        tile_product<Sums::overwrite, Largest>(here, TilePairs<P>{q, 16}, padded(columns) / kStep,
                                               kKeys, 16, s, 16);
      }
    }
  };

  static void attend(const Params& p, const Heads& heads, const Keys& keys, const Staged& k,
                     const State& st, const Buffers& buf) {
    const int64_t dv = padded(p.Dv), steps = (keys.count + kStep - 1) / kStep;
    each_step(keys_of(p, heads.b, key_head(p, heads.h)), keys, p.D,
              [&](int64_t j, int64_t n) { k.products(st.q, p.D, j, n, buf.s + j * 16); });
    const float factor = score(p, heads, keys, buf);
    if (Softmax::move(keys.count, buf.s, factor, st.m, st.l, buf.rescale))
      for (int64_t at = 0; at < 16 * dv; at += 16)
        store(st.out + at, load(st.out + at) * buf.rescale[at / dv]);
    if (p.dropout_p > 0)
      Softmax::probabilities_after(keys.count, buf.s, factor, st.m, st.l, buf.p, [&] {
        each_head(heads, keys.count, buf.s, buf.one,
                  [&](const Rows& rows, float* s) { T::dropout(p, rows, keys, s, nullptr); });
      });
    else
      typename Softmax::Probabilities(keys.count, buf.s, factor, st.m, st.l, buf.p).rest();
    const int32_t* from = reinterpret_cast<const int32_t*>(buf.p);
    int32_t* to = Op::as_pairs(buf.turned);
    for (int64_t step = 0; step < steps; ++step, from += 256 * P, to += 256 * P)
      for (int x = 0; x < P; ++x) {  // to [steps][16 lanes][planes][32]
        Vec<int32_t> block[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) block[i] = load(from + (i * P + x) * 16);
        transpose_registers<int32_t>(block);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store(to + (i * P + x) * 16, block[i]);
      }
    Op::multiply_add(buf.turned, kStep, 16 * kStep, buf.v, dv, steps, 16, dv, st.out, dv);
  }

  // What the mask holds for at least one of the heads.
  static uint8_t held_by(const Params& p, const Heads& heads, const Keys& keys) {
    uint8_t all = 0;
    for (int64_t x = 0; x < (p.mask.stride[1] == 0 ? 1 : heads.count) && !mixed(all); ++x)
      all |= classes_in(p, heads.rows(x), keys);
    return all;
  }
  // One block of keys against every row that sees them.
  static void run_block(const Params& p, int64_t b, int64_t hk, const Keys& keys,
                        const Buffers& buf) {
    const KeyPlane k = keys_of(p, b, hk), v = values_of(p, b, hk);
    std::optional<Staged> staged;  // set once a tile sees them
    const KeyFits fits{buf.k_unfit, buf.v_unfit, keys.j0};
    each_tile(p, b, hk, [&](int64_t t, const Heads& heads) {
      const Keys visible{keys.j0, keys.count, held_by(p, heads, keys)};
      if (hidden(visible.classes) || hidden_by_mod(p, heads, keys)) return;
      if (!staged) {
        staged.emplace(k, keys, p.D, buf);
        each_step(v, keys, p.Dv, [&](int64_t j, int64_t n) {
          Op::across(v, keys.j0 + j, n, p.Dv, buf.v + j * padded(p.Dv), buf.rows, buf.v_unfit + j);
        });
      }
      if constexpr (P > 1)
        for (int64_t l = 0; l < heads.count * heads.M; ++l)
          buf.not_served[t * 16 + l] |=
              see_unfit_key(p, heads.rows(l / heads.M).one(l % heads.M), keys, fits);
      attend(p, heads, visible, *staged, buf.state(p, t), buf);
    });
  }
  static void run_chunk(const Params& p, int64_t task, char* scratch) {
    const amx::Tiles registers;
    Buffers buf;
    carve(p, scratch, buf);
    const int64_t hk = task % p.Hk, b = task / p.Hk % p.B, chunk = task / p.Hk / p.B;
    each_tile(p, b, hk, [&](int64_t t, const Heads& heads) {
      begin(p, heads, buf.state(p, t), buf.rows, buf.not_served + t * 16);
    });
    Base::each_block(p, b, chunk, [&](const Keys& keys) { run_block(p, b, hk, keys, buf); });
    const auto to = Base::parts(p);
    const int64_t columns = Base::Sum::columns(p.Dv);
    each_tile(p, b, hk, [&](int64_t t, const Heads& heads) {
      const State st = buf.state(p, t);
      for (int64_t l = 0; l < heads.count * heads.M; ++l) {
        const int64_t at = Base::part(p, chunk, b, heads.h + l / heads.M, l % heads.M);
        std::copy_n(st.out + l * padded(p.Dv), columns, to.out + at * columns);
        to.m[at] = st.m[l];
        to.l[at] = st.l[l];
        if (P > 1) not_served(p)[at] = buf.not_served[t * 16 + l];
      }
    });
  }
  static uint8_t* not_served(const Params& p) {  // [chunks][B H M], after the parts
    return static_cast<uint8_t*>(p.workspace) + Base::parts(p).bytes;
  }

  static void merge(const Params& p, int64_t task, char* scratch) {
    Base::merge(p, task, scratch);
    const Rows rows{task / p.H, task % p.H, 0, p.M};
    using Vectors = Forward<Plain<float>>;
    typename Vectors::Buffers buf;
    Vectors::carve(p, scratch, buf);
    for (int64_t i = 0; i < p.M; ++i) {
      bool unfit = false;
      for (int64_t c = 0; c < Base::chunks(p); ++c)
        unfit = unfit || not_served(p)[Base::part(p, c, rows.b, rows.h, i)] != kFits;
      if (unfit) {
        buf.state[0].rows = rows.one(i);
        buf.state[0].lanes = kLanes<float>;
        over_keys_on_vectors(p, 1, buf);
      }
      mark_scores(p, rows, i, unfit);
    }
  }

  static Plan plan(const Params& p) {
    Buffers unused;
    Plan plan = Base::plan(p, carve(p, nullptr, unused), run_chunk);
    if constexpr (P > 1) {
      typename Forward<Plain<float>>::Buffers of_vectors;
      if (plan.count == 0) return plan;
      Phase& last = plan.phases[plan.count - 1];
      last.scratch = std::max(last.scratch, Forward<Plain<float>>::carve(p, nullptr, of_vectors));
      last.run = merge;
      plan.workspace += Base::chunks(p) * p.B * p.H * p.M;
    }
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
