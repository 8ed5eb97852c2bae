// Attention weights: the probabilities after dropout, from q, k and the normaliser of a forward
// pass; per head, or averaged over heads with no per-head M x N buffer.
#pragma once
#include "../backward/gradient.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct Weights {
  using G = Gradient<Mul>;
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using Op = Operand<Mul>;

  struct Buffers {
    const Params& p;
    Scratch take;
    static constexpr int64_t lanes = G::kPart, tile = kTileKeys * lanes;
    int64_t d = G::padded(p.D);
    E* q = take.array<E>(d / Mul::pair * lanes);
    E* k = take.array<E>(kTileKeys * d / Mul::pair);
    E* rows = take.array<E>(Sizes<Mul>::staged * d);
    R* s = take.array<R>(tile);
    R* sum = take.array<R>(tile);
    Normaliser<R> normaliser = {take.array<R>(lanes), take.array<R>(lanes)};
    R* factor = take.array<R>(lanes);
    ScoreScratch<R> score = ScoreScratch<R>::of(take, p, p.mask.data ? kTileKeys * kLanes<R> : 0);
    E* few_q = take.array<E>(G::few(p) ? p.M * d : 0);  // this and the next: of few_rows.h
    R* few_s = take.array<R>(G::few(p) ? kTileKeys * kLanes<R> : 0);
    uint8_t* k_unfit = take.array<uint8_t>(G::kPlanes ? kTileKeys : 0);  // the keys without planes
    VectorScratch vectors = G::kPlanes ? VectorScratch::of(take, d) : VectorScratch{};
  };

  // One tile of rows of one head, or of all heads, against every key.
  static void run(const Params& p, int64_t task, char* scratch) {
    [[maybe_unused]] const typename Mul::Registers registers;
    const Buffers buf{p, {scratch}};
    const int64_t heads = p.average_heads ? p.H : 1, per_item = p.average_heads ? 1 : p.H;
    const int64_t t = task % G::tiles(p), first = task / G::tiles(p) % per_item,
                  b = task / G::tiles(p) / per_item;
    const Rows rows = G::tile_rows(p, b, first, t);
    std::fill(buf.factor, buf.factor + G::kPart, R(1) / R(heads));
    each_part<Mul>(rows, [&](auto nv, const Rows& part, int64_t) {
      constexpr int NV = decltype(nv)::value;
      using T = Tile<R, NV>;
      for (int64_t J0 = 0; J0 < p.N; J0 += kTileKeys) {
        if (interrupted(p)) return;
        const int64_t count = std::min(kTileKeys, p.N - J0);
        std::fill(buf.sum, buf.sum + count * T::lanes, R(0));
        for (int64_t h = first; h < first + heads; ++h)
          add<NV>(p, {b, h, part.i0, part.count}, J0, buf);
        write_transposed(buf.sum, T::lanes, buf.factor, plane(p.weights, b, first), part.i0,
                         part.count, J0, count);
      }
    });
  }

  template <int NV>
  static void add(const Params& p, const Rows& rows, int64_t J0, const Buffers& buf) {
    using T = Tile<R, NV>;
    read_normaliser(p, rows, T::lanes, buf.normaliser);
    const Keys keys = G::seen_keys(p, rows, J0, buf.normaliser.lse);
    if (keys.count <= 0) return;
    products<NV>(p, rows, keys, plane(p.q, rows.b, rows.h), plane(p.k, rows.b, key_head(p, rows.h)),
                 buf);
    T::score(p, rows, keys, buf.s, nullptr, buf.score);
    T::probabilities(keys.count, buf.normaliser, buf.s);
    if (p.dropout_p > 0) T::dropout(p, rows, keys, buf.s, nullptr);
    R* sum = buf.sum + (keys.j0 - J0) * T::lanes;
    for (int64_t x = 0; x < keys.count * T::lanes; ++x) sum[x] += buf.s[x];
  }

  // buf.s = scale q k
  template <int NV>
  static void products(const Params& p, const Rows& rows, const Keys& keys, const Plane& q,
                       const Plane& k, const Buffers& buf) {
    constexpr int64_t lanes = Tile<R, NV>::lanes;
    Broadcast<E> staged;
    [[maybe_unused]] uint8_t q_unfit[lanes] = {};
    if constexpr (G::kPlanes) {
      staged = Op::along(k, keys.j0, keys.count, p.D, buf.k, buf.k_unfit);
      Op::transposed(q, rows.i0, rows.count, 0, p.D, lanes, buf.q, buf.rows, q_unfit);
    } else {
      staged = Op::along(k, keys.j0, keys.count, p.D, buf.k);
      if constexpr (G::kMayBeFew)
        if (G::few(p)) {
          using Few = FewRows<Mul>;
          Few::stage(q, rows.i0, rows.count, p.D, buf.few_q);
          return Few::tile(staged, keys.count, p.D, buf.few_q, rows.count, scale_of<R>(p, rows.h),
                           buf.few_s, buf.s);
        }
      Op::transposed(q, rows.i0, rows.count, 0, p.D, lanes, buf.q, buf.rows);
    }
    DotProducts<Mul, NV>::run(staged, buf.q, p.D, keys.count, scale_of<R>(p, rows.h), buf.s);
    if constexpr (G::kPlanes)
      if (const uint32_t which = scored_on_vectors(p, rows, keys, {buf.k_unfit, nullptr, keys.j0},
                                                   q_unfit, buf.normaliser.tail))
        products_on_vectors<NV>(p, k, keys, buf.k_unfit, q, rows, which, p.D,
                                scale_of<R>(p, rows.h), buf.vectors, buf.s);
  }

  static Plan plan(const Params& p) {
    Plan plan;
    plan.workspace = MaskClasses::bytes(p);
    MaskClasses::add(p, plan);
    const int64_t planes = p.B * (p.average_heads ? 1 : p.H);
    plan.add({planes * G::tiles(p), Buffers{p, {nullptr}}.take.used, run});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
