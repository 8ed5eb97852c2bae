// Decoding on tiles: rows and heads that share a key head fill the lanes of one tile of scores, up
// to 16 of them, so that grouped heads cost what one does. S^T = K Q^T reads K as it lies; for
// O += P V, V's rows are only paired, and P, which is small, is turned. Chunks and their merge are
// those of decode.h.
#pragma once
#include "amx_softmax.h"
#include "decode.h"

namespace fa {
namespace FA_ISA {

template <>
struct WeightedSum<AmxBf16> {
  static int64_t columns(int64_t Dv) { return round_up(Dv, kStep); }
};

struct AmxDecode : Decode<AmxBf16> {
  using Softmax = AmxSoftmax<1>;
  static constexpr int64_t kLanesUsed = 16;

  static bool suits(const FaParams& p) { return p.M > 0 && p.M <= kLanesUsed; }

  static int64_t heads_per_tile(const FaParams& p) {
    return std::clamp<int64_t>(kLanesUsed / std::max<int64_t>(p.M, 1), 1,
                               std::max<int64_t>(group(p), 1));
  }
  static int64_t tiles(const FaParams& p) {
    return (group(p) + heads_per_tile(p) - 1) / heads_per_tile(p);
  }
  // Lane x * M + i is row i of head h + x.
  struct Heads {
    int64_t b, h, count, M;
    FA_INLINE Rows rows(int64_t x) const { return {b, h + x, 0, M}; }
  };
  template <class F>
  static void each_tile(const FaParams& p, int64_t b, int64_t hk, F f) {
    const int64_t most = heads_per_tile(p), end = (hk + 1) * group(p);
    int64_t t = 0;
    for (int64_t h = hk * group(p); h < end; h += most)
      f(t++, Heads{b, h, std::min(most, end - h), p.M});
  }

  struct State {   // one tile of lanes
    uint16_t* q;   // [padded(D) / 2][16] pairs
    float *out;    // [16][columns(Dv)], not yet divided by l
    float *m, *l;  // [16]
  };
  struct Buffers {
    uint16_t* q;
    float *out, *m, *l;              // of all tiles
    float *s, *one, *rescale;        // [kTileKeys][16], the same for one head
    uint16_t *k, *v, *p, *turned, *rows;
    ScoreScratch<float> score;
    State state(const FaParams& p, int64_t t) const {
      return {q + t * round_up(p.D, kStep) * 16, out + t * 16 * Sum::columns(p.Dv), m + t * 16,
              l + t * 16};
    }
  };
  static size_t carve(const FaParams& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t lanes = tiles(p) * 16, d = round_up(p.D, kStep), dv = Sum::columns(p.Dv);
    b.q = take.array<uint16_t>(lanes * d);
    b.out = take.array<float>(lanes * dv);
    b.m = take.array<float>(lanes);
    b.l = take.array<float>(lanes);
    b.s = take.array<float>(kTileKeys * 16);
    b.one = take.array<float>(kTileKeys * 16);
    b.rescale = take.array<float>(16);
    b.k = take.array<uint16_t>(kTileKeys * d);
    b.v = take.array<uint16_t>(kTileKeys * dv);
    b.p = take.array<uint16_t>(kTileKeys * 16);
    b.turned = take.array<uint16_t>(kTileKeys * 16);
    b.rows = take.array<uint16_t>(kStep * std::max(d, dv));
    b.score = {take.array<float>(p.mask.data ? kTileKeys * 16 : 0)};
    return take.used;
  }

  static void begin(const FaParams& p, const Heads& heads, const State& st, uint16_t* rows_buf) {
    const uint16_t* from[16];
    const int64_t d = round_up(p.D, kStep);
    for (int64_t l = 0; l < 16; ++l)
      from[l] = Op::row(plane(p.q, heads.b, heads.h + l / heads.M), l % heads.M, 0,
                        l < heads.count * heads.M, p.D, rows_buf + l * d);
    Op::transpose_rows(from, d, 16, st.q);
    std::fill_n(st.out, 16 * Sum::columns(p.Dv), 0.0f);
    std::fill_n(st.m, 16, -kInf<float>);
    std::fill_n(st.l, 16, 0.0f);
  }

  // f(rows, tile) on the lanes of each head alone, as the score pipeline has them.
  template <class F>
  static void each_head(const Heads& heads, int64_t keys, float* s, float* one, F f) {
    for (int64_t x = 0; x < heads.count; ++x) {
      const __mmask16 mine = ((1u << heads.M) - 1) << x * heads.M;
      for (int64_t j = 0; j < keys; ++j)
        _mm512_storeu_ps(one + j * 16, _mm512_maskz_compress_ps(mine, load(s + j * 16)));
      f(heads.rows(x), one);
      for (int64_t j = 0; j < keys; ++j)
        store(s + j * 16, (Vec<float>)_mm512_mask_expand_ps(load(s + j * 16), mine,
                                                            load(one + j * 16)));
    }
  }

  // As T::score_unscaled, for every head by itself, or for all of one row if they are alike.
  static float score(const FaParams& p, const Heads& heads, const Keys& keys, const Buffers& buf) {
    if (heads.count == 1 || (heads.M == 1 && heads_alike(p)))
      return T::score_unscaled(p, heads.rows(0), keys, buf.s, nullptr, buf.score);
    bool plain = p.scale > 0;
    for (int64_t x = 0; x < heads.count; ++x) plain = plain && T::plain(p, heads.rows(x), keys);
    if (plain) return float(p.scale);
    T::each(keys.count, buf.s, [&](int64_t, int, Vec<float> x) { return x * float(p.scale); });
    each_head(heads, keys.count, buf.s, buf.one, [&](const Rows& rows, float* s) {
      T::score(p, rows, keys, s, nullptr, buf.score);
    });
    return 1;
  }

  // Calls f(first key, keys) for each step, with the rows of the next on their way to the cache.
  template <class F>
  static void each_step(const Plane& a, const Keys& keys, int64_t columns, F f) {
    for (int64_t j = 0; j < keys.count; j += kStep) {
      prefetch(a, keys.j0 + j + kStep, kStep, columns);
      f(j, std::min(kStep, keys.count - j));
    }
  }

  static void attend(const FaParams& p, const Heads& heads, const Keys& keys,
                     Broadcast<uint16_t> k, const State& st, const Buffers& buf) {
    const int64_t dv = Sum::columns(p.Dv), steps = (keys.count + kStep - 1) / kStep;
    each_step(plane(p.k, heads.b, key_head(p, heads.h)), keys, p.D, [&](int64_t j, int64_t n) {
      tile_products<1>({k.data + j * k.stride, k.stride}, st.q, p.D, n, buf.s + j * 16);
    });
    const float factor = score(p, heads, keys, buf);
    if (Softmax::move(keys.count, buf.s, factor, st.m, st.l, buf.rescale))
      for (int64_t at = 0; at < 16 * dv; at += 16)
        store(st.out + at, load(st.out + at) * buf.rescale[at / dv]);
    Softmax::probabilities(keys.count, buf.s, factor, st.m, st.l, p.dropout_p > 0, buf.p, [&] {
      each_head(heads, keys.count, buf.s, buf.one, [&](const Rows& rows, float* s) {
        T::dropout(p, rows, keys, s, nullptr);
      });
    });
    for (int64_t at = 0; at < steps * 512; at += 512) {  // to [steps][16 lanes][32]
      Vec<int32_t> block[16];
      std::memcpy(block, buf.p + at, sizeof block);
      transpose_registers<int32_t>(block);
      std::memcpy(buf.turned + at, block, sizeof block);
    }
    Op::multiply_add(buf.turned, kStep, 16 * kStep, buf.v, dv, steps, 16, dv, st.out, dv);
  }

  // One chunk of keys against every row that sees them.
  static void run_chunk(const FaParams& p, int64_t task, char* scratch) {
    const amx::Tiles registers;
    Buffers buf;
    carve(p, scratch, buf);
    const int64_t hk = task % p.Hk, b = task / p.Hk % p.B, chunk = task / p.Hk / p.B;
    const auto all = [&](auto f) {
      each_tile(p, b, hk, [&](int64_t t, const Heads& heads) { f(heads, buf.state(p, t)); });
    };
    all([&](const Heads& heads, const State& st) { begin(p, heads, st, buf.rows); });
    each_block(p, b, chunk, [&](const Keys& keys) {
      const Broadcast<uint16_t> k = Op::along(plane(p.k, b, hk), keys.j0, keys.count, p.D, buf.k);
      const Plane v = plane(p.v, b, hk);
      each_step(v, keys, p.Dv, [&](int64_t j, int64_t n) {
        Op::across(v, keys.j0 + j, n, p.Dv, buf.v + j * Sum::columns(p.Dv), buf.rows);
      });
      all([&](const Heads& heads, const State& st) {
        const bool one = heads.count == 1 || heads_alike(p);
        if (!one || shown(p, heads.rows(0), keys) != Shown::none)
          attend(p, heads, keys, k, st, buf);
      });
    });
    const Parts to = parts(p);
    const int64_t dv = Sum::columns(p.Dv);
    all([&](const Heads& heads, const State& st) {
      for (int64_t l = 0; l < heads.count * heads.M; ++l) {
        const int64_t at = part(p, chunk, b, heads.h + l / heads.M, l % heads.M);
        std::copy_n(st.out + l * dv, dv, to.out + at * dv);
        to.m[at] = st.m[l];
        to.l[at] = st.l[l];
      }
    });
  }

  static Plan plan(const FaParams& p) {
    Buffers unused;
    return Decode::plan(p, carve(p, nullptr, unused), run_chunk);
  }
};

}  // namespace FA_ISA
}  // namespace fa
