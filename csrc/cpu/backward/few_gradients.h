// The backward pass of calls with few query rows. Its time is that of reading K and V and of
// writing dK and dV, so each is read or written once, in place. A task has a chunk of keys, as in
// decode.h, and all query rows that share them. Lanes are columns, as in few_rows.h:
//
//   S = scale Q K^T, dP = dO V^T; P and dS as in gradient.h   [rows][keys]
//   dV = dropout(P)^T dO, dK = scale dS^T Q                   sums over the rows
//   dQ = scale dS K                                           parts, a chunk each, added in order
#pragma once
#include "../forward/decode.h"
#include "backward.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct FewGradients {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  using G = Gradient<Mul>;
  using T = Tile<R, 1>;
  using Few = FewRows<Mul>;
  using Sum = WeightedSum<Mul>;
  using Chunks = Decode<Mul>;
  static constexpr int pair = Mul::pair, W = kLanes<R>;

  static int64_t rows(const Params& p) { return Chunks::group(p) * p.M; }

  struct Buffers {
    E *q, *dout;             // [rows][Few::padded(columns)], as products read them
    R *q_rows, *dout_rows;   // [rows][numbers(columns)], as sums over the rows read them
    E *k, *v;                // of one block of keys
    R *s, *ds;               // [rows][kTileKeys]: the products, then P and dS
    R* dropped;              // [rows][kTileKeys]: dropout(P); null without dropout
    R *turned, *derivative;  // [kTileKeys][W], of one head; derivative is null where it is 1
    E* ds_operand;           // dS as the sum over the keys reads it
    R* dq;                   // [rows][Sum::columns(D)]
    R* written;              // [W][numbers(columns)]: rows of a result of another layout
    Keys* seen;              // [heads]: the keys of the block that each head sees
    ScoreScratch<R> score;
  };
  static int64_t numbers(int64_t columns) { return round_up(columns, W); }
  static size_t carve(const Params& p, char* base, Buffers& b) {
    Scratch take{base};
    const int64_t n = rows(p), keys = kTileKeys;
    b.q = take.array<E>(n * Few::padded(p.D));
    b.dout = take.array<E>(n * Few::padded(p.Dv));
    b.q_rows = take.array<R>(n * numbers(p.D));
    b.dout_rows = take.array<R>(n * numbers(p.Dv));
    b.k = take.array<E>(Sum::staged(keys, p.D));
    b.v = take.array<E>(keys * Few::padded(p.Dv));
    b.s = take.array<R>(n * keys);
    b.ds = take.array<R>(n * keys);
    b.dropped = p.dropout_p > 0 ? take.array<R>(n * keys) : nullptr;
    b.turned = take.array<R>(keys * W);
    b.derivative = has_derivative(p) ? take.array<R>(keys * W) : nullptr;
    b.ds_operand = take.array<E>(pair == 1 ? 0 : n * keys / pair);
    b.dq = take.array<R>(n * Sum::columns(p.D));
    b.written = take.array<R>(W * numbers(std::max(p.D, p.Dv)));
    b.seen = take.array<Keys>(Chunks::group(p));
    b.score = ScoreScratch<R>::of(take, p, p.mask.data ? keys * W : 0);
    return take.used;
  }

  // [chunks][B H M][Sum::columns(D)], after the workspace that all gradients share.
  static R* parts(const Params& p, size_t& bytes) {
    Scratch take{static_cast<char*>(p.workspace), G::workspace(p).bytes};
    const int64_t chunks = Chunks::chunks(p);
    R* parts = take.array<R>(chunks == 1 ? 0 : chunks * p.B * p.H * p.M * Sum::columns(p.D));
    bytes = take.used;
    return parts;
  }

  struct Task {
    int64_t b, hk, h0, chunk;
    Task(const Params& p, int64_t task) {
      b = task / p.Hk % p.B;
      hk = task % p.Hk;
      h0 = hk * Chunks::group(p);
      chunk = task / p.Hk / p.B;
    }
  };
  static void run(const Params& p, int64_t number, char* scratch) {
    Buffers buf;
    carve(p, scratch, buf);
    const Task of(p, apart(number, p.B * p.Hk * Chunks::chunks(p), p.threads));
    stage_rows(p, of, buf);
    std::fill(buf.dq, buf.dq + rows(p) * Sum::columns(p.D), R(0));
    const int64_t end = std::min((of.chunk + 1) * Chunks::kChunkKeys, p.N);
    for (int64_t J0 = of.chunk * Chunks::kChunkKeys; J0 < end; J0 += kTileKeys) {
      const int64_t J1 = std::min(J0 + kTileKeys, end);
      const Keys seen = visible_keys<Mul>(p, {of.b, of.h0, 0, p.M}, J0);
      const bool any = seen.count > 0 && block(p, of, seen, buf);
      clear(p, of, J0, any ? seen.j0 : J1);
      if (any) clear(p, of, seen.end(), J1);
    }
    write_sums(p, of, buf);
  }
  static void write_sums(const Params& p, const Task& of, const Buffers& buf) {
    const int64_t d = Sum::columns(p.D);
    size_t bytes;
    R* to = parts(p, bytes);
    for (int64_t row = 0; row < rows(p); ++row) {
      const int64_t h = of.h0 + row / p.M, i = row % p.M;
      if (Chunks::chunks(p) == 1)
        write_dq(p, of.b, h, i, buf.dq + row * d, buf.written);
      else
        std::copy_n(buf.dq + row * d, d, to + Chunks::part(p, of.chunk, of.b, h, i) * d);
    }
  }
  static void stage_rows(const Params& p, const Task& of, const Buffers& buf) {
    for (int64_t h = 0; h < Chunks::group(p); ++h) {
      const Plane q = plane(p.q, of.b, of.h0 + h), dout = plane(p.dout, of.b, of.h0 + h);
      const int64_t first = h * p.M;
      Few::stage(q, 0, p.M, p.D, buf.q + first * Few::padded(p.D));
      Few::stage(dout, 0, p.M, p.Dv, buf.dout + first * Few::padded(p.Dv));
      copy_rows(q, 0, p.M, 0, p.D, buf.q_rows + first * numbers(p.D), numbers(p.D));
      copy_rows(dout, 0, p.M, 0, p.Dv, buf.dout_rows + first * numbers(p.Dv), numbers(p.Dv));
    }
  }
  // dK and dV of keys that no row sees.
  static void clear(const Params& p, const Task& of, int64_t j, int64_t end) {
    static constexpr R zeros[FA_CPU_MAX_HEAD_DIM] = {};
    const Plane dk = plane(p.dk, of.b, of.hk), dv = plane(p.dv, of.b, of.hk);
    for (; j < end; ++j) {
      write_row(p.dk.data, dk.dtype, dk.at(j), dk.step, p.D, zeros);
      write_row(p.dv.data, dv.dtype, dv.at(j), dv.step, p.Dv, zeros);
    }
  }

  // Computes the gradients of a block of keys. False if a mask hides all of it: then nothing is
  // read or written.
  static bool block(const Params& p, const Task& of, const Keys& keys, const Buffers& buf) {
    const auto w = G::workspace(p);
    const auto head = [&](int64_t h) { return Rows{of.b, of.h0 + h, 0, p.M}; };
    const auto lane = [&](int64_t h) { return G::tile_index(p, of.b, of.h0 + h, 0) * G::kRows; };
    bool any = false;
    for (int64_t h = 0; h < Chunks::group(p); ++h) {
      const int64_t J0 = keys.j0 / kTileKeys * kTileKeys;
      buf.seen[h] = G::seen_keys(p, head(h), J0, w.normaliser.lse + lane(h));
      any |= buf.seen[h].count > 0;
    }
    if (!any) return false;
    const Broadcast<E> k = Sum::stage(plane(p.k, of.b, of.hk), keys.j0, keys.count, p.D, buf.k);
    products(p, of, keys, k, buf);
    for (int64_t h = 0; h < Chunks::group(p); ++h) {
      const int64_t at = h * p.M * kTileKeys;
      const Scores scores{buf.s + at, buf.ds + at, buf.dropped ? buf.dropped + at : nullptr};
      if (buf.seen[h].count > 0)
        gradients(p, head(h), buf.seen[h], w.normaliser.from(lane(h)), w.delta + lane(h), scores,
                  buf);
      else
        scores.clear(p.M);
    }
    sums(p, of, keys, k, buf);
    return true;
  }

  static void products(const Params& p, const Task& of, const Keys& keys, Broadcast<E> k,
                       const Buffers& buf) {
    const Plane values = plane(p.v, of.b, of.hk), dv = plane(p.dv, of.b, of.hk);
    const auto v = Operand<Mul>::along(values, keys.j0, keys.count, p.Dv, buf.v);
    for (int64_t j = 0; j < keys.count; j += Few::kKeys) {
      const int64_t n = std::min(Few::kKeys, keys.count - j);
      Few::products({k.data + j * k.stride, k.stride}, n, p.D, buf.q, rows(p),
                    scale_of<R>(p, of.h0), buf.s + j, later(values, keys.j0 + j, pair));
      Few::products({v.data + j * v.stride, v.stride}, n, p.Dv, buf.dout, rows(p), R(1), buf.ds + j,
                    later(dv, keys.j0 + j, pair));
    }
  }

  static void sums(const Params& p, const Task& of, const Keys& keys, Broadcast<E> k,
                   const Buffers& buf) {
    const Plane key = plane(p.k, of.b, of.hk);
    const Plane dk = plane(p.dk, of.b, of.hk), dv = plane(p.dv, of.b, of.hk);
    const R* weights = buf.dropped ? buf.dropped : buf.s;
    const int64_t n = rows(p);
    outer(dv, keys, weights, buf.dout_rows, n, p.Dv, R(1), later(dk, keys.j0), buf);
    outer(dk, keys, buf.ds, buf.q_rows, n, p.D, scale_of<R>(p, of.h0), {}, buf);
    const E* ds = Sum::operand(buf.ds, n, buf.ds_operand);
    for (int64_t j = 0; j < keys.count; j += Few::kKeys) {
      const int64_t next = keys.end() + j;
      Sum::add(ds, j, {k.data + j * k.stride, k.stride}, std::min(Few::kKeys, keys.count - j), n,
               p.D, buf.dq, next + Few::kKeys <= p.N ? later(key, next) : Later{});
    }
  }

  // Rows to prefetch, from this one on, because they will be read or written later; the caller
  // counts columns in units of `numbers`.
  static FA_INLINE Later later(const Plane& a, int64_t row, int64_t numbers = 1) {
    const int64_t size = item_size(a.dtype);
    if (a.step != 1) return {};
    return {static_cast<const char*>(a.data) + a.at(row) * size, a.row * size, numbers * size};
  }

  struct Scores {  // of one head, [rows][kTileKeys] each
    R *s, *ds, *dropped;
    void clear(int64_t rows) const {
      for (R* x : {s, ds, dropped})
        if (x) std::fill(x, x + rows * kTileKeys, R(0));
    }
  };
  // Turns the products into P, and dP into dS.
  static void gradients(const Params& p, const Rows& rows, const Keys& keys,
                        Normaliser<R> normaliser, const R* delta, const Scores& at,
                        const Buffers& buf) {
    const int64_t end = round_up(keys.count, Few::kPadded);
    Few::score(p, rows, keys, rows.count, at.s, buf.turned, buf.derivative, buf.score);
    for (int64_t i = 0; i < rows.count; ++i) {
      R* s = at.s + i * kTileKeys;
      const R lse = normaliser.lse[i], tail = normaliser.tail[i];
      for (int64_t j = 0; j < end; j += W)
        store(s + j, lse == kInf<R> ? Vec<R>{} : exp(Vec<R>((load(s + j) - lse) - tail)));
    }
    if (p.dropout_p > 0) dropout(p, rows, keys, at, buf);
    for (int64_t i = 0; i < rows.count; ++i) {
      const R* s = at.s + i * kTileKeys;
      R* ds = at.ds + i * kTileKeys;
      for (int64_t j = 0; j < end; j += W) {
        const Vec<R> x = load(s + j) * (load(ds + j) - delta[i]);
        store(ds + j, normaliser.lse[i] == kInf<R> ? Vec<R>{} : normal_or_zero<R>(x));
      }
      std::fill(ds + keys.count, ds + end, R(0));  // pairs are read to their end
      if (MaskGradient<Mul>::is_ds(p)) {
        const Plane to = plane(p.dmask, rows.b, rows.h);
        write_row(p.dmask.data, to.dtype, to.at(i, keys.j0), to.step, keys.count, ds);
      }
    }
    if (has_derivative(p))
      Few::turn_back(buf.derivative, keys.count, rows.count, [&](int64_t x, Vec<R> derivative) {
        R by[W];
        store(by, derivative);
        store(at.ds + x, T::product_gradient(p, load(at.ds + x), by));
      });
  }
  // Dropout of a tile of ones gives the factors of P and dP.
  static void dropout(const Params& p, const Rows& rows, const Keys& keys, const Scores& at,
                      const Buffers& buf) {
    std::fill(buf.turned, buf.turned + keys.count * W, R(1));
    T::dropout(p, rows, keys, buf.turned, nullptr);
    Few::turn_back(buf.turned, keys.count, rows.count, [&](int64_t x, Vec<R> factor) {
      const auto dropped = factor == Vec<R>{};  // 0 even if the number is not finite
      store(at.dropped + x, dropped ? Vec<R>{} : load(at.s + x) * factor);
      store(at.ds + x, dropped ? Vec<R>{} : load(at.ds + x) * factor);
    });
  }

  // to[key][c] = factor sum_row x[row][key] y[row][c], for a block of keys.
  static void outer(const Plane& to, const Keys& keys, const R* x, const R* y, int64_t rows,
                    int64_t columns, R factor, Later later, const Buffers& buf) {
    const int64_t ld = numbers(columns);
    const bool here = readable_in_place<R>(to) && ld == columns;
    void* data = const_cast<void*>(to.data);
    for (int64_t j = 0; j < keys.count; j += W, later.data += W * later.row) {
      const int64_t n = std::min<int64_t>(W, keys.count - j);
      R* c = here ? static_cast<R*>(data) + to.at(keys.j0 + j) : buf.written;
      outer_columns({x + j, kTileKeys}, y, ld, rows, n, ld, {c, here ? to.row : ld, factor}, later);
      for (int64_t i = 0; i < n && !here; ++i)
        write_row(data, to.dtype, to.at(keys.j0 + j + i), to.step, columns, c + i * ld);
    }
  }
  struct Written {
    Overwrite<R> sum;
    Later later;
    FA_INLINE void operator()(int64_t r, int v, Vec<R> x) const {
      later.ask(r, v * W);
      sum(r, v, x);
    }
  };
  template <int NV = kRegisterVectors>
  static void outer_columns(Broadcast<R> x, const R* y, int64_t ldy, int64_t rows, int64_t keys,
                            int64_t columns, Overwrite<R> to, Later later) {
    constexpr int64_t step = NV * W;
    for (; columns >= step; columns -= step, y += step, to.c += step) {
      product<Plain<R>, Unit::along_r, NV>(x, y, ldy, rows, keys, Written{to, later});
      later.data += step * later.size;
    }
    if constexpr (NV > 1)
      if (columns > 0) outer_columns<(NV + 1) / 2>(x, y, ldy, rows, keys, columns, to, later);
  }

  // `sum` is in the order that `natural` undoes; `row` has room for a row in natural order.
  static void write_dq(const Params& p, int64_t b, int64_t h, int64_t i, const R* sum, R* row) {
    Sum::natural(sum, p.D, row);
    for (int64_t c = 0; c < p.D; ++c) row[c] *= scale_of<R>(p, h);
    const Plane to = plane(p.dq, b, h);
    write_row(p.dq.data, to.dtype, to.at(i), to.step, p.D, row);
  }
  // Sums the parts of one head's rows.
  static void join(const Params& p, int64_t task, char* scratch) {
    size_t bytes;
    const R* from = parts(p, bytes);
    const int64_t b = task / p.H, h = task % p.H, d = Sum::columns(p.D);
    R *const sum = reinterpret_cast<R*>(scratch), *const row = sum + d;
    for (int64_t i = 0; i < p.M; ++i) {
      std::fill(sum, sum + d, R(0));
      for (int64_t c = 0; c < Chunks::chunks(p); ++c) {
        const R* part = from + Chunks::part(p, c, b, h, i) * d;
        for (int64_t x = 0; x < d; ++x) sum[x] += part[x];
      }
      write_dq(p, b, h, i, sum, row);
    }
  }

  static Plan plan(const Params& p) {
    using All = Backward<Mul>;
    Plan plan;
    Buffers unused;
    parts(p, plan.workspace);
    plan.add({p.B * p.H * G::tiles(p), 0, All::prepare});
    plan.add({p.B * p.Hk * Chunks::chunks(p), carve(p, nullptr, unused), run});
    if (Chunks::chunks(p) > 1) plan.add({p.B * p.H, 2 * Sum::columns(p.D) * sizeof(R), join});
    All::add_others(p, plan, MaskGradient<Mul>::is_ds(p));
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
