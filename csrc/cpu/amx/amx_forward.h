// The forward pass on AMX tiles; csrc/README.md draws which tile has what. S^T = K Q^T reads
// bfloat16 K in place. O^T += V^T P reads V^T, which a separate phase packs once for all rows and
// heads that share it; that phase also packs K, if K is split into planes.
// Scores are computed for a few keys at a time and exponentiated while they are in L1; P is
// collected for a block of keys, so that O is loaded once per block. Q, S, P and O of one tile of
// bfloat16 stay under 40 KB at D = 64.
#pragma once
#include "../forward/forward.h"
#include "amx_softmax.h"

namespace fa {
namespace FA_ISA {

template <int P>
struct AmxForward {
  using Mul = Amx<P>;
  using E = Planes<P>;
  using Op = Operand<Mul>;
  static constexpr int NV = 2;
  using T = Tile<float, NV>;
  using Softmax = AmxSoftmax<P, NV>;
  static constexpr int64_t kLanesUsed = T::lanes;
  // With planes, O has two levels of sums; a block is also the length of the lower level.
  static constexpr int64_t kBlockKeys = P == 1 ? 256 : 128, kChunkKeys = P == 1 ? 64 : 32;
  // With planes, a product takes long enough for the vector units to exponentiate the previous
  // chunk meanwhile. For bfloat16 it does not, and another chunk of scores would not fit L1:
  // measured.
  static constexpr bool kMeanwhile = P > 1;
  static constexpr int64_t kChunks = kMeanwhile ? 2 : 1;
  template <template <class> class Beside>
  static auto beside(typename Softmax::Probabilities& made) {
    if constexpr (kMeanwhile)
      return Beside<typename Softmax::Probabilities>{made};
    else
      return Nothing{};
  }
  static_assert(kChunkKeys <= kTileKeys && kChunkKeys % kStep == 0, "a tile of whole steps");

  // Tiles of rows that share each block of keys, as in forward.h; they fit L2 together with it.
  static constexpr int64_t kMostTiles = 8;
  static int64_t tiles_per_task(const Params& p) {
    const int64_t tiles = (p.M + kLanesUsed - 1) / kLanesUsed;
    return std::clamp<int64_t>(p.B * p.H * tiles / (4 * p.threads), 1, kMostTiles);
  }
  static int64_t rows_per_task(const Params& p) { return tiles_per_task(p) * kLanesUsed; }
  static int64_t blocks(const Params& p) { return (p.M + rows_per_task(p) - 1) / rows_per_task(p); }
  static int64_t key_blocks(const Params& p) { return (p.N + kBlockKeys - 1) / kBlockKeys; }
  static int64_t padded(int64_t d) { return round_up(d, kStep); }

  // K, if it is split, and V^T; rows past the length are 0. And flags of keys that have no planes.
  struct Packed {
    E *k, *v;                    // [B Hk][keys][padded(D)], [B Hk][steps of keys][padded(Dv)][32]
    uint8_t *k_unfit, *v_unfit;  // [B Hk][keys]
    size_t bytes;
  };
  static int64_t padded_keys(const Params& p) { return round_up(p.N, kStep); }
  static Packed packed(const Params& p, int64_t b = 0, int64_t hk = 0) {
    Scratch take = MaskClasses::workspace_behind(p);
    const int64_t at = (b * p.Hk + hk) * padded_keys(p), all = p.B * p.Hk * padded_keys(p);
    const int64_t cut = P == 1 ? 0 : all;
    Packed to;
    to.k = take.array<E>(cut * padded(p.D)) + at * padded(p.D);
    to.v = take.array<E>(all * padded(p.Dv)) + at * padded(p.Dv);
    to.k_unfit = take.array<uint8_t>(cut) + at;
    to.v_unfit = take.array<uint8_t>(cut) + at;
    to.bytes = take.used;
    return to;
  }
  static void pack(const Params& p, int64_t task, char* scratch) {
    const int64_t hk = task % p.Hk, b = task / p.Hk % p.B, J0 = task / p.Hk / p.B * kBlockKeys;
    const int64_t count = std::min(J0 + kBlockKeys, key_length(p, b)) - J0;
    if (count <= 0) return;
    const Packed to = packed(p, b, hk);
    Op::turned(values_of(p, b, hk), J0, count, p.Dv, to.v + J0 * padded(p.Dv),
               reinterpret_cast<E*>(scratch), P == 1 ? nullptr : to.v_unfit + J0);
    if constexpr (P > 1)
      Op::along(keys_of(p, b, hk), J0, count, p.D, to.k + J0 * padded(p.D), to.k_unfit + J0);
  }

  struct State {   // one tile of rows across all blocks of keys
    E* q;          // [padded(D) / 2][planes][lanes] pairs
    float* out;    // [padded(Dv)][lanes], not yet divided by l
    float *m, *l;  // [lanes]
  };
  struct Buffers {
    State state[kMostTiles];
    float *s, *rescale;
    float *sum, *sum_l;  // a block's O and l, if sums have two levels
    E *k, *p, *rows;
    ScoreScratch<float> score;
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t d = padded(p.D), dv = padded(p.Dv);
    for (int64_t t = 0; t < tiles_per_task(p); ++t)
      b.state[t] = {take.array<E>(d * kLanesUsed), take.array<float>(dv * kLanesUsed),
                    take.array<float>(kLanesUsed), take.array<float>(kLanesUsed)};
    b.s = take.array<float>(kChunks * kChunkKeys * kLanesUsed);
    b.rescale = take.array<float>(kLanesUsed);
    b.sum = take.array<float>(P == 1 ? 0 : dv * kLanesUsed);
    b.sum_l = take.array<float>(kLanesUsed);
    b.k = take.array<E>(P == 1 ? std::min(kBlockKeys, round_up(p.N, kStep)) * d : 0);
    b.p = take.array<E>(kBlockKeys * kLanesUsed);
    b.rows = take.array<E>(16 * d);
    b.score = ScoreScratch<float>::of(take, p, p.mask.data ? kChunkKeys * 16 : 0);
    return take.used;
  }

  // Returns a bit for each of these rows that tiles cannot serve.
  static uint32_t begin(const Params& p, const Rows& rows, const State& st, E* rows_buf) {
    uint8_t unfit[kLanesUsed] = {};
    Op::transposed(plane(p.q, rows.b, rows.h), rows.i0, rows.count, 0, p.D, kLanesUsed, st.q,
                   rows_buf, unfit);
    std::fill_n(st.out, padded(p.Dv) * kLanesUsed, 0.0f);
    // A sink acts as a first key without a value.
    const float sink = sink_of<float>(p.sinks, rows.h);
    std::fill_n(st.m, kLanesUsed, sink);
    std::fill_n(st.l, kLanesUsed, sink == -kInf<float> ? 0.0f : 1.0f);
    if (P == 1) return 0;
    const Packed keys = packed(p, rows.b, key_head(p, rows.h));
    const KeyFits fits{keys.k_unfit, keys.v_unfit, 0};
    const bool some = see_unfit_key(p, rows, {0, p.N}, fits);
    uint32_t unfit_rows = 0;
    for (int64_t i = 0; i < rows.count; ++i)
      if (unfit[i] || (some && see_unfit_key(p, rows.one(i), {0, p.N}, fits)))
        unfit_rows |= uint32_t(1) << i;
    return unfit_rows;
  }

  // One tile of rows against one block of keys; `k` starts at key J0.
  static void attend(const Params& p, const Rows& rows, const Keys& keys, int64_t J0,
                     Broadcast<E> k, const State& st, const Buffers& buf) {
    const E* v = packed(p, rows.b, key_head(p, rows.h)).v;
    const int64_t dv = padded(p.Dv);
    float *into = P == 1 ? st.out : buf.sum, *into_l = P == 1 ? st.l : buf.sum_l;
    std::fill_n(buf.sum_l, kLanesUsed, 0.0f);
    int64_t summed = keys.j0;              // P of the keys before is in O, or in buf.sum
    typename Softmax::Probabilities made;  // P of the previous chunk, complete or in part
    const auto sum = [&](int64_t end) {
      if (end == summed) return;
      const auto go = [&](auto to) {
        Op::template multiply_add<decltype(to)::value>(
            v + summed * dv, kStep, kStep * dv, buf.p + (summed - keys.j0) * kLanesUsed, kLanesUsed,
            (end - summed + kStep - 1) / kStep, dv, kLanesUsed, into, kLanesUsed,
            beside<DueForLastStep>(made));
      };
      if (P > 1 && summed == keys.j0)
        go(std::integral_constant<Sums, Sums::overwrite>{});
      else
        go(std::integral_constant<Sums, Sums::go_on>{});
      summed = end;
    };
    const auto rescale = [&](float* x, int64_t rows) {
      for (int64_t at = 0; at < rows * kLanesUsed; at += 16)
        store(x + at, load(x + at) * load(buf.rescale + at % kLanesUsed));
    };
    const auto add = [&](const float* x, int64_t rows, float* to) {
      for (int64_t at = 0; at < rows * kLanesUsed; at += 16)
        store(to + at, load(to + at) + load(x + at));
    };
    for (int64_t j = keys.j0, c = 0; j < keys.end(); j += kChunkKeys, ++c) {
      const Keys chunk{j, std::min(kChunkKeys, keys.end() - j)};
      float* s = buf.s + c % kChunks * kChunkKeys * kLanesUsed;
      T::prefetch_mask(p, rows, chunk);
      tile_products<NV, P>({k.data + (j - J0) * k.stride, k.stride}, st.q, p.D, chunk.count, s,
                           beside<Meanwhile>(made));
      made.rest();
      const float factor = T::score_unscaled(p, rows, chunk, s, nullptr, buf.score);
      if (Softmax::move(chunk.count, s, factor, st.m, st.l, buf.rescale)) {
        sum(j);
        rescale(st.out, dv);
        if (P > 1 && j > keys.j0) rescale(buf.sum, dv), rescale(buf.sum_l, 1);
      }
      E* to = buf.p + (j - keys.j0) * kLanesUsed;
      if (p.dropout_p > 0)
        Softmax::probabilities_after(chunk.count, s, factor, st.m, into_l, to,
                                     [&] { T::dropout(p, rows, chunk, s, nullptr); });
      else
        made = {chunk.count, s, factor, st.m, into_l, to};
      if (!kMeanwhile) made.rest();
    }
    sum(keys.end());
    made.rest();  // not yet complete if V has no columns
    if (P > 1) add(buf.sum, dv, st.out), add(buf.sum_l, 1, st.l);
  }

  static void finish(const Params& p, const Rows& rows, const State& st) {
    write_normalisers(p, rows, st.m, st.l);
    for (int64_t i = 0; i < rows.count; ++i) {
      const float l = st.l[i];
      st.l[i] = l == 0 ? 0.0f : 1 / l;
    }
    if (p.Dv > 0)
      write_transposed(st.out, kLanesUsed, st.l, plane(p.out, rows.b, rows.h), rows.i0, rows.count,
                       0, p.Dv);
  }

  // Computes the rows that tiles cannot serve with the vector kernels, several at a time, but only
  // rows that see the same unfit keys: a zero weight times such a value may be NaN.
  static void on_vectors(const Params& p, const Rows& rows, uint32_t which, char* scratch) {
    using Vectors = Forward<Plain<float>>;
    typename Vectors::Buffers buf;
    Vectors::carve(p, scratch, buf);
    const Packed keys = packed(p, rows.b, key_head(p, rows.h));
    const KeyFits fits{keys.k_unfit, keys.v_unfit, 0};
    for (int64_t i = 0; i < rows.count; ++i) {
      if (!(which >> i & 1)) continue;
      Rows some = rows.one(i);
      while (i + 1 < rows.count && which >> (i + 1) & 1 &&
             see_same_unfit_keys(p, some.one(0), rows.one(i + 1), fits))
        ++i, ++some.count;
      buf.state[0].rows = some;
      // `carve` has sized the buffers for one vector, or for two at least.
      buf.state[0].lanes = p.M <= kLanes<float> ? kLanes<float> : kLanesUsed;
      over_keys_on_vectors(p, 1, buf);
    }
  }

  static void run(const Params& p, int64_t task, char* scratch) {
    const amx::Tiles registers;
    Buffers buf;
    carve(p, scratch, buf);
    const int64_t heads = p.B * p.H, bh = apart(task % heads, heads, p.threads);
    const int64_t block = blocks(p) - 1 - task / heads;  // causal: the last rows see most
    const int64_t b = bh / p.H, h = bh % p.H, hk = key_head(p, h);
    const int64_t begin_row = block * rows_per_task(p);
    const int64_t end_row = std::min(p.M, begin_row + rows_per_task(p));
    uint32_t not_served[kMostTiles];
    const auto each = [&](auto f) {
      for (int64_t t = 0, i = begin_row; i < end_row; ++t, i += kLanesUsed)
        f(Rows{b, h, i, std::min(kLanesUsed, end_row - i)}, t);
    };
    const auto each_tile = [&](auto f) {  // that have a row which tiles serve
      each([&](const Rows& rows, int64_t t) {
        if (not_served[t] != (uint64_t(1) << rows.count) - 1) f(rows, t);
      });
    };
    const KeyRange seen = key_range(p, b, begin_row, end_row);
    UnmaskedKeys<kMostTiles> visible;
    do {
      const auto each_due = [&](auto f) {
        each_tile([&](const Rows& rows, int64_t t) {
          if (visible.due(t)) f(rows, t);
        });
      };
      each([&](const Rows& rows, int64_t t) {
        if (visible.due(t)) not_served[t] = begin(p, rows, buf.state[t], buf.rows);
      });
      for (int64_t J0 = seen.lo / kBlockKeys * kBlockKeys; J0 < seen.hi; J0 += kBlockKeys) {
        if (interrupted(p)) return;
        bool any = false;
        each_due([&](const Rows& rows, int64_t t) {
          // Start at a chunk boundary, whatever the rows: a row's pivot moves chunk by chunk.
          any |= visible.find(t, p, rows, visible_keys<Mul>(p, rows, J0, kBlockKeys, kChunkKeys));
        });
        if (!any) continue;
        const int64_t count = std::min(J0 + kBlockKeys, seen.hi) - J0;
        Broadcast<E> k{packed(p, b, hk).k + J0 * padded(p.D), padded(p.D)};
        if constexpr (P == 1) k = Op::along(keys_of(p, b, hk), J0, count, p.D, buf.k);
        each_due([&](const Rows& rows, int64_t t) {
          if (visible.of[t].count > 0) attend(p, rows, visible.of[t], J0, k, buf.state[t], buf);
        });
      }
      each_due(
          [&](const Rows& rows, int64_t t) { visible.check_skipped(t, p, rows, buf.state[t].m); });
    } while (visible.again());
    each_tile([&](const Rows& rows, int64_t t) { finish(p, rows, buf.state[t]); });
    if constexpr (P > 1)
      each([&](const Rows& rows, int64_t t) {
        on_vectors(p, rows, not_served[t], scratch);
        for (int64_t i = 0; i < rows.count; ++i) mark_scores(p, rows, i, not_served[t] >> i & 1);
      });
  }

  static Plan plan(const Params& p) {
    Plan plan;
    Buffers unused;
    typename Forward<Plain<float>>::Buffers of_vectors;
    size_t scratch = carve(p, nullptr, unused);
    if (P > 1) scratch = std::max(scratch, Forward<Plain<float>>::carve(p, nullptr, of_vectors));
    plan.workspace = packed(p).bytes;
    MaskClasses::add(p, plan);
    plan.add({p.B * p.Hk * key_blocks(p), kStep * size_t(padded(p.Dv)) * sizeof(E), pack});
    plan.add({p.B * p.H * blocks(p), scratch, run});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
