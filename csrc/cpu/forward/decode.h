// Decoding: few query rows, many keys. The cost is reading K and V, so they are read once, in
// place, for all query heads that share them. The keys are split into chunks, which
// threads share, and the softmaxes of chunks are merged (Flash-Decoding, Dao et al. 2023).
#pragma once
#include <optional>

#include "../base/plan.h"
#include "../base/scratch.h"
#include "../score/tile.h"
#include "e4m3_rows.h"
#include "int4_rows.h"
#include "int8_rows.h"

namespace fa {
namespace FA_ISA {

// `Stored` is the type of keys and values in memory.
template <class Mul, class Stored = typename Mul::Element>
struct Decode {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using S = Stored;
  using Op = Operand<Mul>;
  using T = Tile<R, 1>;
  using Few = typename ProductsOf<Mul, S>::Few;
  using Sum = typename ProductsOf<Mul, S>::Sum;
  static constexpr int pair = Mul::pair, W = kLanes<R>;
  static constexpr int64_t kKeys = Few::kKeys;

  // Independent of the number of threads: the order of every sum must not depend on it.
  static constexpr int64_t kChunkKeys = 4 * kTileKeys;
  static int64_t chunks(const Params& p) {
    return std::max<int64_t>(1, (p.N + kChunkKeys - 1) / kChunkKeys);
  }
  // True if this key is inside a chunk, not at its end. What follows the end is another task's.
  static bool goes_on(int64_t key) { return key % kChunkKeys; }
  static int64_t group(const Params& p) { return p.H / std::max<int64_t>(p.Hk, 1); }

  // How many heads are lanes of one tile: all, if their scores differ by q alone.
  static int64_t heads_per_tile(const Params& p) {
    return p.M == 1 && heads_alike(p) ? std::clamp<int64_t>(group(p), 1, W) : 1;
  }

  struct Lanes {  // of one tile: rows of one head, or the one row of several
    Rows rows;
    int64_t heads, count;
    FA_INLINE int64_t head(int64_t l) const { return rows.h + (heads > 1 ? l : 0); }
    FA_INLINE int64_t row(int64_t l) const { return rows.i0 + (heads > 1 ? 0 : l); }
  };
  // Calls f(tile, lanes) for every tile of the query heads that share key head hk.
  template <class F>
  static void each_tile(const Params& p, int64_t b, int64_t hk, F f) {
    const int64_t most = heads_per_tile(p), end = (hk + 1) * group(p);
    int64_t t = 0;
    for (int64_t h = hk * group(p); h < end; h += most)
      for (int64_t i = 0; i < p.M; i += W) {
        const int64_t heads = std::min(most, end - h), rows = std::min<int64_t>(W, p.M - i);
        f(t++, Lanes{{b, h, i, rows}, heads, heads > 1 ? heads : rows});
      }
  }
  static int64_t tiles(const Params& p) {
    return (group(p) + heads_per_tile(p) - 1) / heads_per_tile(p) * ((p.M + W - 1) / W);
  }

  struct Buffers {
    E* q;                    // [tiles][W][padded(D)]
    R *out, *m, *l;          // [tiles][W][columns(Dv)], [tiles][W]: out not yet divided by l
    R *s, *turned;           // [W][kTileKeys], [kTileKeys][W]
    S *k, *v;                // rows that are not read in place
    R *k_scales, *v_scales;  // [kTileKeys]
    typename Sum::Weights* p;
    ScoreScratch<R> score;
  };
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t rows = tiles(p) * W, keys = kTileKeys, d = Few::padded(p.D);
    b.q = take.array<E>(rows * d);
    b.out = take.array<R>(rows * Sum::columns(p.Dv));
    b.m = take.array<R>(rows);
    b.l = take.array<R>(rows);
    b.s = take.array<R>(keys * W);
    b.turned = take.array<R>(keys * W);
    b.k = take.array<S>(keys * d);
    b.v = take.array<S>(Sum::staged(keys, p.Dv));
    b.k_scales = take.array<R>(has_scales<S> ? keys : 0);
    b.v_scales = take.array<R>(has_scales<S> ? keys : 0);
    b.p = take.array<typename Sum::Weights>(Sum::kWeights);
    b.score = ScoreScratch<R>::of(take, p, p.mask.data ? keys * W : 0);
    return take.used;
  }

  // The results of the chunks, for the merge.
  struct Parts {
    R *out, *m, *l;  // [chunks][B H M][columns(Dv)], [chunks][B H M]
    size_t bytes;
  };
  static Parts parts(const Params& p) {
    Scratch take{static_cast<char*>(p.workspace)};
    const int64_t rows = chunks(p) * p.B * p.H * p.M;
    Parts parts;
    parts.out = take.array<R>(rows * Sum::columns(p.Dv));
    parts.m = take.array<R>(rows);
    parts.l = take.array<R>(rows);
    parts.bytes = take.used;
    return parts;
  }
  static int64_t part(const Params& p, int64_t chunk, int64_t b, int64_t h, int64_t i) {
    return ((chunk * p.B + b) * p.H + h) * p.M + i;
  }

  static void begin(const Params& p, const Lanes& lanes, int64_t t, const Buffers& buf) {
    const int64_t d = Few::padded(p.D), dv = Sum::columns(p.Dv);
    for (int64_t l = 0; l < lanes.count; ++l)
      Few::stage(plane(p.q, lanes.rows.b, lanes.head(l)), lanes.row(l), 1, p.D,
                 buf.q + (t * W + l) * d);
    std::fill(buf.out + t * W * dv, buf.out + (t + 1) * W * dv, R(0));
    std::fill(buf.m + t * W, buf.m + (t + 1) * W, -kInf<R>);
    std::fill(buf.l + t * W, buf.l + (t + 1) * W, R(0));
  }

  // Rows of keys, and of values, as products read them: in place, or copied to `to`.
  static Broadcast<S> keys_at(const Params& p, const KeyPlane& k, int64_t j, int64_t n, S* to) {
    if constexpr (std::is_same_v<S, E>)
      return Op::along(k, j, n, p.D, to);
    else
      return stored_at(k, j, n, stored_size<S>(p.D), to);
  }
  static Broadcast<S> values_at(const Params& p, const KeyPlane& v, int64_t j, int64_t n, S* to) {
    if constexpr (std::is_same_v<S, E>)
      return Sum::stage(v, j, n, p.Dv, to);
    else
      return stored_at(v, j, n, stored_size<S>(p.Dv), to);
  }
  static Broadcast<S> stored_at(const KeyPlane& a, int64_t j, int64_t n, int64_t size, S* to) {
    if (a.step == 1 && a.one_block(j, n)) return {static_cast<const S*>(a.data) + a.at(j), a.row};
    copy_stored(a, j, n, size, to);
    return {to, size};
  }
  // A block of them, kKeys rows at a time; if the block lies in one page, it is read in place.
  // make(j, n, buffer of row j): rows j to j + n of the block.
  struct Staged {
    Broadcast<S> of[kTileKeys / kKeys];
    template <class Make>
    Staged(const KeyPlane& a, const Keys& keys, S* buf, int64_t row, Make make) {
      const bool whole = a.one_block(keys.j0, keys.count);
      const Broadcast<S> all = whole ? make(0, keys.count, buf) : Broadcast<S>{};
      for (int64_t j = 0; j < keys.count; j += kKeys)
        of[j / kKeys] = whole ? Broadcast<S>{all.data + j * all.stride, all.stride}
                              : make(j, std::min(kKeys, keys.count - j), buf + j * row);
    }
  };
  // The scales of a block's rows, 0 past the last.
  static void read_scales(const KeyPlane& a, const Keys& keys, R* to) {
    R* at = to;
    if (a.scale.row == 1 && a.one_block(keys.j0, keys.count))
      at = std::copy_n(a.scale_of(keys.j0), keys.count, to);
    else
      a.each_scaled(keys.j0, keys.count, 0,
                    [&](const uint8_t*, const uint8_t*, float by) { *at++ = by; });
    std::fill(at, to + round_up(keys.count, Few::kPadded), R(0));
    if (S::factor != 1)
      for (int64_t j = 0; j < keys.count; ++j) to[j] *= S::factor;
  }
  // S or P of some rows times a factor of each key.
  static void multiply(int64_t rows, int64_t keys, const R* by, R* s) {
    for (int64_t l = 0; l < rows; ++l, s += kTileKeys)
      for (int64_t j = 0; j < keys; j += W) store(s + j, Vec<R>(load(s + j) * load(by + j)));
  }

  static void attend(const Params& p, const Lanes& lanes, int64_t t, const Keys& keys,
                     const Staged& k, const Staged& v, const Buffers& buf) {
    const int64_t dv = Sum::columns(p.Dv), hk = key_head(p, lanes.rows.h);
    const E* q = buf.q + t * W * Few::padded(p.D);
    R* out = buf.out + t * W * dv;
    constexpr int64_t size = sizeof(S);
    for (int64_t j = 0; j < keys.count; j += kKeys) {
      const int64_t n = std::min(kKeys, keys.count - j);
      const Broadcast<S> with = v.of[j / kKeys];
      Later later;
      if (t == 0) later = {reinterpret_cast<const char*>(with.data), with.stride * size, size};
      with_rows(k.of[j / kKeys], n, p.D, [&](auto rows) {
        Few::products(rows, n, p.D, q, lanes.count, scale_of<R>(p, lanes.rows.h), buf.s + j, later);
      });
    }
    if (has_scales<S>) multiply(lanes.count, keys.count, buf.k_scales, buf.s);
    Few::score(p, lanes.rows, keys, lanes.count, buf.s, buf.turned, nullptr, buf.score);
    for (int64_t l = 0; l < lanes.count; ++l) {
      const R rescale =
          Few::softmax(keys.count, buf.s + l * kTileKeys, buf.m[t * W + l], buf.l[t * W + l]);
      for (int64_t c = 0; c < dv; ++c) out[l * dv + c] *= rescale;
    }
    if (p.dropout_p > 0) dropout(p, lanes, keys, buf);
    if (has_scales<S>) multiply(lanes.count, keys.count, buf.v_scales, buf.s);
    const auto* probabilities = Sum::operand(buf.s, lanes.count, buf.p, keys.count);
    for (int64_t j = 0; j < keys.count; j += kKeys) {
      const int64_t n = std::min(kKeys, keys.count - j);
      Later later;
      if (t == 0 && goes_on(keys.end()))
        later = Later::of(keys_of(p, lanes.rows.b, hk), keys.end() + j, kKeys, stored_size<S>(p.D));
      with_rows(v.of[j / kKeys], n, p.Dv, [&](auto rows) {
        Sum::add(probabilities, j, rows, n, lanes.count, p.Dv, out, later);
      });
    }
  }
  // Dropout of a tile of ones gives the factors of P.
  static void dropout(const Params& p, const Lanes& lanes, const Keys& keys, const Buffers& buf) {
    std::fill(buf.turned, buf.turned + keys.count * W, R(1));
    T::dropout(p, lanes.rows, keys, buf.turned, nullptr);
    Few::turn_back(buf.turned, keys.count, lanes.count, [&](int64_t at, Vec<R> factor) {
      store(buf.s + at, Vec<R>(load(buf.s + at) * factor));
    });
  }

  // Calls f(keys) for each block of a chunk that some row of item b sees.
  template <class F>
  static FA_INLINE void each_block(const Params& p, int64_t b, int64_t chunk, F f) {
    const KeyRange seen = key_range(p, b, 0, p.M);
    const int64_t end = std::min((chunk + 1) * kChunkKeys, seen.hi);
    for (int64_t J0 = chunk * kChunkKeys; J0 < end; J0 += kTileKeys) {
      const int64_t lo = std::max(J0, seen.lo), hi = std::min(J0 + kTileKeys, end);
      const Keys keys{lo, hi - lo};
      if (keys.count > 0) f(keys);
    }
  }

  // One chunk of keys against every row that sees them.
  static void run_chunk(const Params& p, int64_t task, char* scratch) {
    Buffers buf;
    carve(p, scratch, buf);
    const int64_t hk = task % p.Hk, b = task / p.Hk % p.B, chunk = task / p.Hk / p.B;
    each_tile(p, b, hk, [&](int64_t t, const Lanes& lanes) { begin(p, lanes, t, buf); });
    const KeyPlane key = keys_of(p, b, hk), value = values_of(p, b, hk);
    each_block(p, b, chunk, [&](const Keys& keys) {
      std::optional<Staged> k, v;  // set once a tile sees them
      each_tile(p, b, hk, [&](int64_t t, const Lanes& lanes) {
        const Keys visible{keys.j0, keys.count, classes_in(p, lanes.rows, keys)};
        if (hidden(visible.classes) || hidden_by_mod(p, lanes.rows, keys)) return;
        if (!k) {
          k.emplace(key, keys, buf.k, Few::padded(p.D), [&](int64_t j, int64_t n, S* to) {
            return keys_at(p, key, keys.j0 + j, n, to);
          });
          v.emplace(value, keys, buf.v, Sum::staged(1, p.Dv), [&](int64_t j, int64_t n, S* to) {
            return values_at(p, value, keys.j0 + j, n, to);
          });
          if constexpr (has_scales<S>) {
            read_scales(key, keys, buf.k_scales);
            read_scales(value, keys, buf.v_scales);
          }
        }
        attend(p, lanes, t, visible, *k, *v, buf);
      });
    });
    const Parts to = parts(p);
    const int64_t dv = Sum::columns(p.Dv);
    each_tile(p, b, hk, [&](int64_t t, const Lanes& lanes) {
      for (int64_t l = 0; l < lanes.count; ++l) {
        const int64_t at = part(p, chunk, b, lanes.head(l), lanes.row(l));
        Sum::natural(buf.out + (t * W + l) * dv, p.Dv, to.out + at * dv);
        to.m[at] = buf.m[t * W + l];
        to.l[at] = buf.l[t * W + l];
      }
    });
  }

  // Merges the parts of one head's rows; a sink is one more part, without a value.
  static void merge(const Params& p, int64_t task, char* scratch) {
    R* const sum = reinterpret_cast<R*>(scratch);
    const int64_t b = task / p.H, h = task % p.H, dv = Sum::columns(p.Dv);
    const Parts from = parts(p);
    const R sink = sink_of<R>(p.sinks, h);
    for (int64_t i = 0; i < p.M; ++i) {
      R m = sink;
      for (int64_t c = 0; c < chunks(p); ++c) m = std::max(m, from.m[part(p, c, b, h, i)]);
      const R pivot = m == -kInf<R> ? R(0) : m;
      R l = exp_one(sink - pivot);
      std::fill(sum, sum + dv, R(0));
      for (int64_t c = 0; c < chunks(p); ++c) {
        const int64_t at = part(p, c, b, h, i);
        const R weight = exp_one(from.m[at] - pivot);
        l += weight * from.l[at];
        for (int64_t x = 0; x < dv; ++x) sum[x] += weight * from.out[at * dv + x];
      }
      write_normaliser(p, b, h, i, m, l);
      const R factor = l == R(0) ? R(0) : R(1) / l;
      for (int64_t x = 0; x < dv; ++x) sum[x] *= factor;
      const Plane out = plane(p.out, b, h);
      write_row(p.out.data, out.dtype, out.at(i), out.step, p.Dv, sum);
    }
  }

  static Plan plan(const Params& p) {
    Buffers unused;
    return plan(p, carve(p, nullptr, unused), run_chunk);
  }
  static Plan plan(const Params& p, size_t scratch, decltype(Phase::run) of_chunk) {
    Plan plan;
    plan.workspace = parts(p).bytes;
    // Key heads without a query head have no rows, and tiles of none cannot be counted.
    plan.add({p.H ? p.B * p.Hk * chunks(p) : 0, scratch, of_chunk});
    plan.add({p.B * p.H, Sum::columns(p.Dv) * sizeof(R), merge});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
