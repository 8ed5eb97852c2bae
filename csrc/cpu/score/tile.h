// The score pipeline of the CPU kernels: the one place here that implements features. What happens
// to a tile of scores, keys x lanes (lanes are query rows), forward and backward:
//
//   where   visible_keys and unmasked_keys skip keys (visible_keys.h); `band` is exact (band.h)
//   what    `score`: softcap, ALiBi, mask, band, in this order; `product_gradient`, backward
//   after   `dropout`: draws (philox.h)
//
// Forward, decoding, backward and weights call these, so a feature is written once. A branch is
// taken per tile, never per element.
#pragma once
#include "../../common/philox.h"
#include "../base/bf16_quads.h"
#include "normaliser.h"
#include "score_mod.h"

namespace fa {
namespace FA_ISA {

// True if the score of a row depends on a product and its key alone, not on the head.
FA_INLINE bool heads_alike(const Params& p) {
  return !p.mod.code && !p.slopes.data && p.dropout_p == 0 &&
         (!p.mask.data || (p.mask.stride[1] == 0 && p.mask.stride[2] == 0));
}

// The factor of a head's products of q and k, and of dS in the gradients of these. Where several heads
// are multiplied at once it is that of their first one: heads are alike in it.
template <class R>
FA_INLINE R scale_of(const Params& p, [[maybe_unused]] int64_t h) {
  return R(p.scale);
}
// A head's sink, a logit without a key, or its tangent; `absent` if the call has none.
template <class R>
FA_INLINE R sink_of(const FaTensor& sinks, int64_t h, R absent = -kInf<R>) {
  return sinks.data ? read<R>(sinks.data, sinks.dtype, h * sinks.stride[1]) : absent;
}

// True if the derivative of a score by its scaled product may differ from 1.
FA_INLINE bool has_derivative(const Params& p) {
  return p.softcap > 0 || (p.mod.code && code_of(p.mod).derivative);
}

template <class R>
struct ScoreScratch {
  R* rows = nullptr;  // kLanes x kTileKeys, of the mask
  R* mod = nullptr;   // of a score_mod
  R* products =
      nullptr;  // [keys][lanes]: the scaled products, if the gradient of a score_mod reads
                // them; `score` writes them
  static ScoreScratch of(Scratch& take, const Params& p, int64_t rows) {
    R* of_mask = take.array<R>(rows);
    R* of_mod = take.array<R>(ScoreMod<R>::scratch_numbers(p));
    if (take.base) ScoreMod<R>::begin(p, of_mod);
    return {of_mask, of_mod, nullptr};
  }
};

template <class R, int NV>
struct Tile {
  static constexpr int W = kLanes<R>, lanes = NV * W;
  using V = Vec<R>;

  template <class F>
  static FA_INLINE void each(int64_t keys, R* s, F f) {
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        R* at = s + j * lanes + v * W;
        store(at, V(f(j, v, load(at))));
      }
  }

  // i' - j0 of each lane, as numbers.
  static FA_INLINE void positions(const Params& p, const Rows& rows, const Keys& keys, V* at) {
    const R first = R(rows.i0 + diagonal(p, rows.b) - keys.j0);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      for (int l = 0; l < W; ++l) at[v][l] = first + R(v * W + l);
  }

  // s = c tanh(s / c); `derivative` and `second`, if not null, receive the first two by s.
  static void softcap(R c, int64_t keys, R* s, R* derivative, R* second) {
    const R inverse = R(1) / c;
    each(keys, s, [&](int64_t j, int v, V x) {
      const V t = tanh<R>(x * inverse);
      if (derivative) store(derivative + j * lanes + v * W, V(R(1) - t * t));
      if (second) store(second + j * lanes + v * W, V((R(-2) * inverse) * (t - t * t * t)));
      return t * c;
    });
  }

  static void alibi(const Params& p, const Rows& rows, const Keys& keys, R* s) {
    const R m = read<R>(p.slopes.data, p.slopes.dtype,
                        rows.b * p.slopes.stride[0] + rows.h * p.slopes.stride[1]);
    V at[NV];
    positions(p, rows, keys, at);
    each(keys.count, s, [&](int64_t j, int v, V x) { return x - absolute<R>(at[v] - R(j)) * m; });
  }

  // s = act(s, the element of the mask, or of its tangent).
  template <class Act>
  static FA_INLINE void with_mask(const Plane& a, const Rows& rows, const Keys& keys, R* s,
                                  const ScoreScratch<R>& scratch, Act act) {
    if (a.row == 0) {  // one row serves every query: O(N) to read
      copy_rows(a, 0, 1, keys.j0, keys.count, scratch.rows, keys.count);
      each(keys.count, s, [&](int64_t j, int, V x) { return act(x, splat(scratch.rows[j])); });
    } else {
      Operand<Plain<R>>::each_lanes(a, rows.i0, rows.count, keys.j0, keys.count, lanes,
                                    scratch.rows, [&](int64_t j, int64_t l, V add) {
                                      R* at = s + j * lanes + l;
                                      store(at, V(act(load(at), add)));
                                    });
    }
  }
  // Calls f with what a mask does to a score.
  template <class F>
  static FA_INLINE void with_act(const Params& p, F f) {
    if (p.mask.dtype == FA_BOOL)  // hides even a NaN score, as masked_fill does
      f([](V x, V add) { return add < R(0) ? add : x; });
    else
      f([](V x, V add) { return x + add; });
  }
  static void mask(const Params& p, const Rows& rows, const Keys& keys, R* s,
                   const ScoreScratch<R>& scratch) {
    const Plane a = plane(p.mask, rows.b, rows.h);
    with_act(p, [&](auto act) { with_mask(a, rows, keys, s, scratch, act); });
  }
  // The same for scores in the layout of few_rows.h, `count` rows of kTileKeys. Past the last key it
  // adds nothing.
  static void mask_rows(const Params& p, const Rows& rows, const Keys& keys, int64_t count, R* s,
                        const ScoreScratch<R>& scratch) {
    const Plane a = plane(p.mask, rows.b, rows.h);
    const int64_t end = round_up(keys.count, W);
    with_act(p, [&](auto act) {
      for (int64_t l = 0; l < count; ++l, s += kTileKeys) {
        if (l == 0 || a.row != 0)
          copy_rows(a, rows.i0 + l, 1, keys.j0, keys.count, scratch.rows, end);
        for (int64_t j = 0; j < end; j += W)
          store(s + j, V(act(load(s + j), load(scratch.rows + j))));
      }
    });
  }

  // -inf where the band hides a key, and `outside` in the groups of four keys that no lane of a
  // vector sees: they are in none of its strips. Only keys at the band's ends are compared lane by
  // lane.
  static void band(const Params& p, const Rows& rows, const Keys& keys, R* s, R outside) {
    V lane;
    for (int l = 0; l < W; ++l) lane[l] = R(l);
    const int64_t first = rows.i0 + diagonal(p, rows.b) - keys.j0;
    for (int v = 0; v < NV; ++v) {
      // The keys of this tile that the vector's first lane sees, [lo, hi]: cut to the tile while they
      // are integers, because far positions are no exact numbers in R.
      const auto cut = [&](int64_t j) { return std::clamp<int64_t>(j, -W, kTileKeys); };
      const int64_t lo = cut(first + v * W - p.left), hi = cut(first + v * W + p.right);
      const V low = lane + R(lo), high = lane + R(hi);
      const auto until = [&](int64_t from, int64_t end, auto f) {
        end = std::min(end, keys.count);
        for (R* at = s + from * lanes + v * W; from < end; ++from, at += lanes) f(R(from), at);
        return from;
      };
      const auto hide = [&](R, R* at) { store(at, splat(outside)); };
      const auto compare = [&](R j, R* at) {
        store(at, ((j >= low) & (j <= high)) ? load(at) : splat(-kInf<R>));
      };
      int64_t j = until(0, std::max<int64_t>(lo, 0) / 4 * 4, hide);
      j = until(j, lo + W - 1, compare);
      j = std::max(j, std::min(hi + 1, keys.count));  // all lanes see those between
      j = until(j, (std::max<int64_t>(hi + W, 0) + 3) / 4 * 4, compare);
      until(j, keys.count, hide);
    }
  }

  static bool masked(const Params& p, const Rows& rows, const Keys& keys) {
    return p.mask.data && classes_in(p, rows, keys) != kVisible;
  }
  // Prefetches what `mask` will read, if the mask is too large for a cache: its rows are far apart,
  // so hardware does not prefetch them.
  static FA_INLINE void prefetch_mask(const Params& p, const Rows& rows, const Keys& keys) {
    Plane a = plane(p.mask, rows.b, rows.h);
    if (!a.data || a.row == 0 || p.M * p.N < 1 << 18 || !masked(p, rows, keys)) return;
    a.origin += keys.j0 * a.step;
    prefetch(a, rows.i0, rows.count, keys.count);
  }
  static bool banded(const Params& p, const Rows& rows, const Keys& keys) {
    const KeyRange all = common_range(p, rows.b, rows.i0, rows.end());
    return keys.j0 < all.lo || keys.end() > all.hi;
  }
  // True if nothing but a mask makes another score of a scaled product.
  static bool plain_but_for_mask(const Params& p, const Rows& rows, const Keys& keys) {
    return !(p.softcap > 0 || p.slopes.data || banded(p, rows, keys)) &&
           !(p.mod.code && !ScoreMod<R>::plain(p, rows, keys));
  }
  // True if a scaled product is the score itself.
  static bool plain(const Params& p, const Rows& rows, const Keys& keys) {
    return plain_but_for_mask(p, rows, keys) && !masked(p, rows, keys);
  }
  // Scaled products to scores, -inf where a row may not look. `derivative` and `second` (of the
  // scores by the scaled products, the first and the second one) may be null. `outside`: see `band`.
  static void score(const Params& p, const Rows& rows, const Keys& keys, R* s, R* derivative,
                    const ScoreScratch<R>& scratch, R* second = nullptr, R outside = -kInf<R>) {
    const typename ScoreMod<R>::Call mod{p,          rows, keys, lanes, {s, derivative, second},
                                         scratch.mod};
    if (scratch.products) std::copy_n(s, keys.count * lanes, scratch.products);
    if (p.mod.code) ScoreMod<R>::score(mod);
    if (p.softcap > 0) softcap(R(p.softcap), keys.count, s, derivative, second);
    if (p.slopes.data) alibi(p, rows, keys, s);
    if (masked(p, rows, keys)) mask(p, rows, keys, s, scratch);
    if (p.mod.code) ScoreMod<R>::mask(mod);
    if (banded(p, rows, keys)) band(p, rows, keys, s, outside);
    if (p.mod.code && ScoreMod<R>::has_check(p)) check_indices(p, rows, keys, scratch);
  }
  // Reports an index out of range at a pair that neither the mask nor the band hides. The scores do
  // not say which: those that the functions themselves hide may be hidden by such an index.
  [[gnu::noinline]] static void check_indices(const Params& p, const Rows& rows, const Keys& keys,
                                              const ScoreScratch<R>& scratch) {
    R* seen = ScoreMod<R>::seen(p, scratch.mod);
    std::fill_n(seen, keys.count * lanes, R(0));
    if (masked(p, rows, keys)) mask(p, rows, keys, seen, scratch);
    if (banded(p, rows, keys)) band(p, rows, keys, seen, -kInf<R>);
    ScoreMod<R>::check({p, rows, keys, lanes, {seen, nullptr, nullptr}, scratch.mod});
  }

  // Adds to the gradient of a score_mod's captured numbers, from the gradient of scores.
  static void captured_gradients(const Params& p, const Rows& rows, const Keys& keys, R* ds,
                                 const ScoreScratch<R>& scratch, R* gradient) {
    ScoreMod<R>::gradients(
        {p, rows, keys, lanes, {scratch.products, ds, nullptr}, scratch.mod, gradient});
  }

  // The tangents of scores, from those of the scaled products; `second` becomes the tangent of
  // `derivative`. They are arbitrary where a score is hidden, and in lanes past the last row.
  static void score_tangents(const Params& p, const Rows& rows, const Keys& keys, R* s_t,
                             const R* derivative, R* second, const ScoreScratch<R>& scratch) {
    if (has_derivative(p))
      each(keys.count, s_t, [&](int64_t j, int v, V x) {
        R* bent = second + j * lanes + v * W;
        store(bent, V(x * load(bent)));
        return x * load(derivative + j * lanes + v * W);
      });
    if (p.mask_t.data)
      with_mask(plane(p.mask_t, rows.b, rows.h), rows, keys, s_t, scratch,
                [](V x, V add) { return x + add; });
  }

  // The same from products without their scale. Returns the factor that s must still be multiplied
  // by: the scale, if no feature changes the scores.
  static R score_unscaled(const Params& p, const Rows& rows, const Keys& keys, R* s, R* derivative,
                          const ScoreScratch<R>& scratch) {
    const R scale = scale_of<R>(p, rows.h);
    if (scale > 0 && plain(p, rows, keys)) return scale;
    each(keys.count, s, [&](int64_t, int, V x) { return x * scale; });
    score(p, rows, keys, s, derivative, scratch);
    return R(1);
  }

  // Backward, for one vector: from the gradient of scores to that of the scaled products.
  static FA_INLINE V product_gradient(const Params& p, V ds, const R* derivative) {
    if (!has_derivative(p)) return ds;
    // A lane past the last row may have NaN for derivative (of tanh(0 * inf)): its dS stays 0.
    return ds == V{} ? V{} : ds * load(derivative);
  }
  static void product_gradient(const Params& p, int64_t keys, R* ds, const R* derivative) {
    if (!has_derivative(p)) return;
    each(keys, ds, [&](int64_t j, int v, V x) {
      return product_gradient(p, x, derivative + j * lanes + v * W);
    });
  }

  // One step of the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022,
  // Algorithm 1): in each strip s becomes exp(s - m), m and l are updated, and `rescale` is the
  // factor for sums under the old maximum.
  static void online_softmax(const Strips<R, NV>& strips, R* s, R* m, R* l, R* rescale) {
    V top[NV], sum[NV], pivot[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) top[v] = load(m + v * W);
    strips.each([&](int64_t j, int64_t end, int v, auto n) {
      largest<n>(end - j, s + j * lanes + v * W, top + v);
    });
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      // A row that has seen nothing keeps 0 for its pivot: -inf - (-inf) is NaN.
      pivot[v] = top[v] == -kInf<R> ? V{} : top[v];
      const V c = exp(V(load(m + v * W) - pivot[v]));
      store(rescale + v * W, c);
      store(m + v * W, top[v]);
      sum[v] = V{};
    }
    strips.each([&](int64_t j, int64_t end, int v, auto n) {
      exponentials<n>(end - j, s + j * lanes + v * W, pivot + v, sum + v);
    });
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(l + v * W, load(l + v * W) * load(rescale + v * W) + sum[v]);
  }
  // For N vectors of each key.
  template <int N>
  static FA_INLINE void largest(int64_t keys, const R* s, V* top) {
    V here[N];
    std::copy_n(top, N, here);
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) here[v] = max_or_second(load(s + j * lanes + v * W), here[v]);
    std::copy_n(here, N, top);
  }
  template <int N>
  static FA_INLINE void exponentials(int64_t keys, R* s, const V* pivot, V* sum) {
    V top[N], here[N];
    std::copy_n(pivot, N, top);
    std::copy_n(sum, N, here);
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const V e = exp(V(load(s + j * lanes + v * W) - top[v]));
        here[v] += e;
        store(s + j * lanes + v * W, e);
      }
    std::copy_n(here, N, sum);
  }

  // s becomes the probabilities exp(s - lse - tail), in this order: first the large numbers cancel.
  // Unscaled, s is first multiplied by `factor`, and rounded as if a feature had multiplied it: so
  // it is the same number as in the row's normaliser.
  template <bool Unscaled = false>
  static void probabilities(int64_t keys, Normaliser<R> normaliser, R* s, R factor = R(1)) {
    V lse[NV], tail[NV];
    for (int v = 0; v < NV; ++v) {
      lse[v] = load(normaliser.lse + v * W);
      tail[v] = load(normaliser.tail + v * W);
    }
    // Not exp(-inf): the score of a lane without a row may be NaN.
    each(keys, s, [&](int64_t, int v, V x) {
      if constexpr (Unscaled) x = rounded_product(x, factor);
      return lse[v] == kInf<R> ? V{} : exp(V((x - lse[v]) - tail[v]));
    });
  }

  // Room for whole vectors of words, which have more lanes than vectors of doubles.
  static constexpr int kMaxLanes = round_up(lanes, kLanes<uint32_t>);

  // Philox words for four keys from j on of the larger call, for its head and item; 4 x kMaxLanes.
  static void philox(const Params& p, const Rows& rows, uint32_t head, uint32_t item, int64_t j,
                     uint32_t* words) {
    const uint64_t seed = static_cast<uint64_t>(*p.seed);
    for (int l = 0; l < lanes; l += kLanes<uint32_t>) {
      Words c0 = splat(uint32_t(j >> 2)), c1, c2 = splat(head), c3 = splat(item);
      for (int x = 0; x < kLanes<uint32_t>; ++x) c1[x] = uint32_t(p.at_row + rows.i0 + l + x);
      uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
      for (int r = 0; r < Philox::rounds; ++r, k0 += Philox::weyl0, k1 += Philox::weyl1) {
        Words hi0, lo0, hi1, lo1;
        multiply_wide(c0, Philox::mul0, hi0, lo0);
        multiply_wide(c2, Philox::mul1, hi1, lo1);
        c0 = hi1 ^ c1 ^ splat(k0);
        c1 = lo1;
        c2 = hi0 ^ c3 ^ splat(k1);
        c3 = lo0;
      }
      store(words + l, c0);
      store(words + kMaxLanes + l, c1);
      store(words + 2 * kMaxLanes + l, c2);
      store(words + 3 * kMaxLanes + l, c3);
    }
  }

  // Drops elements of `a`, and the same ones of `b` when given, scaling the rest.
  static void dropout(const Params& p, const Rows& rows, const Keys& keys, R* a, R* b) {
    const Dropout rule = dropout_rule(p.dropout_p);
    const R factor = R(rule.factor);
    uint32_t words[4 * kMaxLanes];
    const int64_t first = p.at_key + keys.j0;
    const uint32_t head = drawn(p.at_head, rows.h, p.heads_again);
    const uint32_t item = drawn(p.at_item, rows.b, p.items_again);
    for (int64_t j = -(first % 4); j < keys.count; j += 4) {
      philox(p, rows, head, item, first + j, words);
      const int64_t n = std::min<int64_t>(4, keys.count - j);
      for (int64_t r = std::max<int64_t>(0, -j); r < n; ++r) {
        const uint32_t* w = words + r * kMaxLanes;
        R* ar = a + (j + r) * lanes;
        for (int l = 0; l < lanes; ++l) ar[l] = w[l] >= rule.threshold ? ar[l] * factor : R(0);
        if (!b) continue;
        R* br = b + (j + r) * lanes;
        for (int l = 0; l < lanes; ++l) br[l] = w[l] >= rule.threshold ? br[l] * factor : R(0);
      }
    }
  }
};

// Calls f with the number of vectors that `rows` query rows fill, as a constant.
template <class R, class F>
FA_INLINE void with_vectors(int64_t rows, F f) {
  const int64_t nv = (rows + kLanes<R> - 1) / kLanes<R>;
  if (nv <= 1) return f(std::integral_constant<int, 1>{});
  if (nv == 2) return f(std::integral_constant<int, 2>{});
  if (nv == 3) return f(std::integral_constant<int, 3>{});
  if constexpr (kTileVectors > 3) f(std::integral_constant<int, 4>{});
}
template <class R>
constexpr int64_t kTileRows = kTileVectors * kLanes<R>;

// Calls f(number of vectors, rows, first lane) for each part of a tile's rows.
template <class Mul, class F>
FA_INLINE void each_part(const Rows& rows, F f) {
  using R = typename Mul::Real;
  constexpr int64_t part = Sizes<Mul>::part;
  if constexpr (part == Sizes<Mul>::rows)
    with_vectors<R>(rows.count, [&](auto nv) { f(nv, rows, int64_t(0)); });
  else
    for (int64_t l = 0; l < rows.count; l += part)
      f(std::integral_constant<int, part / kLanes<R>>{},
        Rows{rows.b, rows.h, rows.i0 + l, std::min(part, rows.count - l)}, l);
}

}  // namespace FA_ISA
}  // namespace fa
