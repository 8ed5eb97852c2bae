// Forward on tiles. S^T = K Q^T reads K as it lies; O^T += V^T P reads V^T, which a phase of its
// own packs once for every row and head that shares it. Scores are made for a few keys at a time
// and exponentiated while they are in the nearest cache; P is gathered for a block of keys, so that
// O is taken up once for all of them. All four of one tile stay under 40 KB at D = 64.
#pragma once
#include "amx_softmax.h"
#include "plan.h"
#include "scratch.h"

namespace fa {
namespace FA_ISA {

struct AmxForward {
  using Op = Operand<AmxBf16>;
  static constexpr int NV = 2;
  using T = Tile<float, NV>;
  using Softmax = AmxSoftmax<NV>;
  static constexpr int64_t kLanesUsed = T::lanes, kBlockKeys = 256, kChunkKeys = 64;
  static_assert(kChunkKeys <= kTileKeys && kChunkKeys % kStep == 0, "a tile of whole steps");

  // Tiles that share each block of keys, as in forward.h; they fit the second cache with it.
  static constexpr int64_t kMostTiles = 8;
  static int64_t tiles_per_task(const FaParams& p) {
    const int64_t tiles = (p.M + kLanesUsed - 1) / kLanesUsed;
    return std::clamp<int64_t>(p.B * p.H * tiles / (4 * p.threads), 1, kMostTiles);
  }
  static int64_t rows_per_task(const FaParams& p) { return tiles_per_task(p) * kLanesUsed; }
  static int64_t blocks(const FaParams& p) {
    return (p.M + rows_per_task(p) - 1) / rows_per_task(p);
  }
  static int64_t key_blocks(const FaParams& p) { return (p.N + kBlockKeys - 1) / kBlockKeys; }
  static int64_t padded(int64_t d) { return round_up(d, kStep); }

  // V^T of one key head: [steps of keys][padded(Dv)][32]. Keys past the length are 0.
  static uint16_t* values(const FaParams& p, int64_t b, int64_t hk) {
    const int64_t size = round_up(p.N, kStep) * padded(p.Dv);
    return static_cast<uint16_t*>(p.workspace) + (b * p.Hk + hk) * size;
  }
  static void pack_values(const FaParams& p, int64_t task, char* scratch) {
    const int64_t hk = task % p.Hk, b = task / p.Hk % p.B, J0 = task / p.Hk / p.B * kBlockKeys;
    const int64_t end = std::min(J0 + kBlockKeys, key_length(p, b));
    if (J0 < end)
      Op::turned(plane(p.v, b, hk), J0, end - J0, p.Dv, values(p, b, hk) + J0 * padded(p.Dv),
                 reinterpret_cast<uint16_t*>(scratch));
  }

  struct State {   // one tile of rows across all blocks of keys
    uint16_t* q;   // [padded(D) / 2][lanes] pairs
    float *out;    // [padded(Dv)][lanes], not yet divided by l
    float *m, *l;  // [lanes]
  };
  struct Buffers {
    State state[kMostTiles];
    float *s, *rescale;
    uint16_t *k, *p, *rows;
    ScoreScratch<float> score;
  };
  static size_t carve(const FaParams& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t d = padded(p.D), dv = padded(p.Dv);
    for (int64_t t = 0; t < tiles_per_task(p); ++t)
      b.state[t] = {take.array<uint16_t>(d * kLanesUsed), take.array<float>(dv * kLanesUsed),
                    take.array<float>(kLanesUsed), take.array<float>(kLanesUsed)};
    b.s = take.array<float>(kChunkKeys * kLanesUsed);
    b.rescale = take.array<float>(kLanesUsed);
    b.k = take.array<uint16_t>(std::min(kBlockKeys, round_up(p.N, kStep)) * d);
    b.p = take.array<uint16_t>(kBlockKeys * kLanesUsed);
    b.rows = take.array<uint16_t>(16 * d);
    b.score = {take.array<float>(p.mask.data ? kChunkKeys * 16 : 0)};
    return take.used;
  }

  static void begin(const FaParams& p, const Rows& rows, const State& st, uint16_t* rows_buf) {
    Op::transposed(plane(p.q, rows.b, rows.h), rows.i0, rows.count, 0, p.D, kLanesUsed, st.q,
                   rows_buf);
    std::fill_n(st.out, padded(p.Dv) * kLanesUsed, 0.0f);
    // A sink is a key that was seen first and has no value.
    const float sink = p.sinks.data ? read<float>(p.sinks.data, p.sinks.dtype,
                                                  rows.h * p.sinks.stride[1])
                                    : -kInf<float>;
    std::fill_n(st.m, kLanesUsed, sink);
    std::fill_n(st.l, kLanesUsed, sink == -kInf<float> ? 0.0f : 1.0f);
  }

  // One tile of rows against one block of keys; `k` starts at key J0.
  static void attend(const FaParams& p, const Rows& rows, const Keys& keys, int64_t J0,
                     Broadcast<uint16_t> k, const State& st, const Buffers& buf) {
    const uint16_t* v = values(p, rows.b, key_head(p, rows.h));
    const int64_t dv = padded(p.Dv);
    int64_t summed = keys.j0;  // P of the keys before is in O
    const auto sum = [&](int64_t end) {
      if (end == summed) return;
      Op::multiply_add(v + summed * dv, kStep, kStep * dv, buf.p + (summed - keys.j0) * kLanesUsed,
                       kLanesUsed, (end - summed + kStep - 1) / kStep, dv, kLanesUsed, st.out,
                       kLanesUsed);
      summed = end;
    };
    for (int64_t j = keys.j0; j < keys.end(); j += kChunkKeys) {
      const Keys chunk{j, std::min(kChunkKeys, keys.end() - j)};
      tile_products<NV>({k.data + (j - J0) * k.stride, k.stride}, st.q, p.D, chunk.count, buf.s);
      const float factor = T::score_unscaled(p, rows, chunk, buf.s, nullptr, buf.score);
      if (Softmax::move(chunk.count, buf.s, factor, st.m, st.l, buf.rescale)) {
        sum(j);
        for (int64_t at = 0; at < dv * kLanesUsed; at += 16)
          store(st.out + at, load(st.out + at) * load(buf.rescale + at % kLanesUsed));
      }
      Softmax::probabilities(chunk.count, buf.s, factor, st.m, st.l, p.dropout_p > 0,
                             buf.p + (j - keys.j0) * kLanesUsed,
                             [&] { T::dropout(p, rows, chunk, buf.s, nullptr); });
    }
    sum(keys.end());
  }

  static void finish(const FaParams& p, const Rows& rows, const State& st) {
    for (int64_t i = 0; i < rows.count; ++i) {
      const float l = st.l[i];
      write_normaliser(p, rows.b, rows.h, rows.i0 + i, st.m[i], l);
      st.l[i] = l == 0 ? 0.0f : 1 / l;
    }
    if (p.Dv > 0)
      write_transposed(st.out, kLanesUsed, st.l, plane(p.out, rows.b, rows.h), rows.i0, rows.count,
                       0, p.Dv);
  }

  static void run(const FaParams& p, int64_t task, char* scratch) {
    const amx::Tiles registers;
    Buffers buf;
    carve(p, scratch, buf);
    const int64_t heads = p.B * p.H, bh = task % heads;
    const int64_t block = blocks(p) - 1 - task / heads;  // causal: the last rows see most
    const int64_t b = bh / p.H, h = bh % p.H, hk = key_head(p, h);
    const int64_t begin_row = block * rows_per_task(p);
    const int64_t end_row = std::min(p.M, begin_row + rows_per_task(p));
    const auto each_tile = [&](auto f) {
      for (int64_t t = 0, i = begin_row; i < end_row; ++t, i += kLanesUsed)
        f(Rows{b, h, i, std::min(kLanesUsed, end_row - i)}, buf.state[t]);
    };
    each_tile([&](const Rows& rows, const State& st) { begin(p, rows, st, buf.rows); });
    const KeyRange seen = key_range(p, b, begin_row, end_row);
    for (int64_t J0 = seen.lo / kBlockKeys * kBlockKeys; J0 < seen.hi; J0 += kBlockKeys) {
      const int64_t count = std::min(J0 + kBlockKeys, seen.hi) - J0;
      const Broadcast<uint16_t> k = Op::along(plane(p.k, b, hk), J0, count, p.D, buf.k);
      each_tile([&](const Rows& rows, const State& st) {
        const Keys keys = visible_keys<AmxBf16>(p, rows, J0, kBlockKeys);
        if (keys.count > 0 && shown(p, rows, keys) != Shown::none)
          attend(p, rows, keys, J0, k, st, buf);
      });
    }
    each_tile([&](const Rows& rows, const State& st) { finish(p, rows, st); });
  }

  static Plan plan(const FaParams& p) {
    Plan plan;
    Buffers unused;
    plan.workspace = p.B * p.Hk * round_up(p.N, kStep) * padded(p.Dv) * sizeof(uint16_t);
    plan.add({p.B * p.Hk * key_blocks(p), size_t(kStep * padded(p.Dv)) * sizeof(uint16_t),
              pack_values});
    plan.add({p.B * p.H * blocks(p), carve(p, nullptr, unused), run});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
