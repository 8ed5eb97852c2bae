// Queries and keys before attention: a norm of each row and the rotation of its pairs of columns, in
// either order, and their gradients. A task has a few tokens, with all heads. Rows are read into
// buffers in the type of computation, and rounded once as they are written, so a result may lie in
// place of its input. Rows are computed in groups of a few: their sums become one vector, and no row
// waits for a root or a division of another. Gradients of weights are sums over a task's rows, added
// in the order of tasks. A norm's factors are computed again in the backward pass, which reads the
// row in any case.
#pragma once
#include <algorithm>
#include <cmath>

#include "../base/plan.h"
#include "../base/product.h"
#include "../base/scratch.h"
#include "../base/stored.h"

namespace fa {
namespace FA_ISA {

// The even and the odd lanes of two vectors, and the reverse.
template <class E, int... L>
FA_INLINE void unzip(Vec<E>& a, Vec<E>& b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  const Vec<E> even = __builtin_shufflevector(a, b, (2 * L)...);
  const Vec<E> odd = __builtin_shufflevector(a, b, (2 * L + 1)...);
#else
  using I = Vec<Int<std::conditional_t<sizeof(E) == 4, float, double> > >;
  const Vec<E> even = __builtin_shuffle(a, b, I{(2 * L)...});
  const Vec<E> odd = __builtin_shuffle(a, b, I{(2 * L + 1)...});
#endif
  a = even, b = odd;
}
template <class E, int... L>
FA_INLINE void zip(Vec<E>& a, Vec<E>& b, std::integer_sequence<int, L...>) {
  constexpr int W = kLanes<E>;
#if defined(__clang__)
  const Vec<E> low = __builtin_shufflevector(a, b, (L % 2 * W + L / 2)...);
  const Vec<E> high = __builtin_shufflevector(a, b, (L % 2 * W + (W + L) / 2)...);
#else
  using I = Vec<Int<std::conditional_t<sizeof(E) == 4, float, double> > >;
  const Vec<E> low = __builtin_shuffle(a, b, I{(L % 2 * W + L / 2)...});
  const Vec<E> high = __builtin_shuffle(a, b, I{(L % 2 * W + (W + L) / 2)...});
#endif
  a = low, b = high;
}

// The numbers of a row of X as those of computation, R: a vector, or one.
template <class X>
struct RowOf {
  using R = X;
  static FA_INLINE Vec<R> vector(const X* p) { return load(p); }
  static FA_INLINE R one(const X* p) { return *p; }
  static FA_INLINE void put(X* p, Vec<R> v) { store(p, v); }
  static FA_INLINE void put(X* p, R v) { *p = v; }
};
template <class X>
struct RowOfHalves {
  using R = float;
  static FA_INLINE Vec<R> vector(const X* p) {
    typename X::Packed bits;
    std::memcpy(&bits, p, sizeof bits);
    return X::widened(bits);
  }
};
template <>
struct RowOf<StoredBf16> : RowOfHalves<StoredBf16> {
  static FA_INLINE R one(const StoredBf16* p) { return from_bf16(p->bits); }
  static FA_INLINE void put(StoredBf16* p, Vec<R> v) {
    R numbers[kLanes<R>];
    store(numbers, v);
    narrow_bf16(numbers, kLanes<R>, &p->bits);
  }
  static FA_INLINE void put(StoredBf16* p, R v) { p->bits = to_bf16(v); }
};
template <>
struct RowOf<StoredF16> : RowOfHalves<StoredF16> {
  static FA_INLINE R one(const StoredF16* p) { return from_f16(p->bits); }
  static FA_INLINE void put(StoredF16* p, Vec<R> v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
    R numbers[kLanes<R>];
    store(numbers, v);
    narrow_f16(numbers, kLanes<R>, &p->bits);
#endif
  }
  static FA_INLINE void put(StoredF16* p, R v) { p->bits = to_f16(v); }
};

// X: what q and k are stored in.
template <class X>
struct NormRope {
  using R = typename RowOf<X>::R;
  static constexpr int W = kLanes<R>;
  static constexpr int64_t kTokens = 64;
  // Rows of one group. More would keep memory waiting while they are computed: a few are faster as
  // soon as rows do not come from a near cache, measured.
  static constexpr int64_t kGroupBytes = 2048;
  static constexpr auto kSequence = std::make_integer_sequence<int, W>{};

  static int64_t tasks(const FaNormRope& p) { return (p.B * p.M + kTokens - 1) / kTokens; }
  static int64_t whole(int64_t n) { return (n + W - 1) / W * W; }

  // The places of rows that are computed side by side.
  struct Group {
    int count = 0;
    int64_t token[W], head[W];
  };
  struct Buffers {
    const FaNormRope& p;
    Scratch take;
    explicit Buffers(const FaNormRope& of, char* base) : p(of), take{base} {}
    int64_t item[kTokens], row[kTokens];  // of each token
    Group now, next;
    R scale[W], mean[W], along[W];
    R* x = take.array<R>(W * whole(p.D));  // rows: zeros after the last column
    R* g = take.array<R>(W * whole(p.D));
    R* spare = take.array<R>(whole(p.D));  // one
    R* weight = take.array<R>(whole(p.D));
    R* cos = take.array<R>(kTokens * p.R / 2);
    R* sin = take.array<R>(kTokens * p.R / 2);
  };
  static size_t scratch(const FaNormRope& p) { return Buffers(p, nullptr).take.used; }
  static size_t workspace(const FaNormRope& p) {  // [2][tasks][D]: sums for the weights' gradients
    return p.backward ? 2 * tasks(p) * p.D * sizeof(double) : 0;
  }
  static double* sums(const FaNormRope& p, int part, int64_t task, char* workspace) {
    return reinterpret_cast<double*>(workspace) + (part * tasks(p) + task) * p.D;
  }

  static void run(const FaNormRope& p, int64_t task, char* base, char* workspace) {
    Buffers buf(p, base);
    const int64_t first = task * kTokens, n = std::min(kTokens, p.B * p.M - first);
    for (int64_t t = 0; t < n; ++t) {
      buf.item[t] = (first + t) / p.M, buf.row[t] = (first + t) % p.M;
      if (p.R) read_tables(p, t, buf);
    }
    for (int part = 0; part < 2; ++part) {
      const FaNormRopePart& of = p.part[part];
      double* dw = of.dweight ? sums(p, part, task, workspace) : nullptr;
      if (dw) std::fill_n(dw, p.D, 0.0);
      if (of.norm) read_weight(p, of, buf.weight);
      // In the order of memory: heads may lie beside each other, or tokens.
      const bool heads_inside = of.y.stride[1] < of.y.stride[2];
      const int64_t most = std::clamp<int64_t>(kGroupBytes / (p.D * sizeof(X)), 1, W);
      int64_t t = 0, h = 0, left = n * of.H;
      const auto take = [&] {
        Group& group = buf.next;
        group.count = int(std::min(most, left));
        left -= group.count;
        for (int r = 0; r < group.count; ++r) {
          group.token[r] = t, group.head[r] = h;
          if (heads_inside)
            ++h == of.H ? h = 0, ++t : 0;
          else
            ++t == n ? t = 0, ++h : 0;
        }
      };
      for (take(); buf.next.count;) {
        buf.now = buf.next;
        take();
        p.backward ? gradient(p, of, buf.now.count, dw, buf) : forward(p, of, buf.now.count, buf);
      }
    }
  }
  // The weights' gradients: sums over tasks, in their order.
  static void finish(const FaNormRope& p, char* workspace) {
    for (int part = 0; part < 2; ++part) {
      R* to = static_cast<R*>(p.part[part].dweight);
      if (!to) continue;
      double* total = sums(p, part, 0, workspace);
      for (int64_t task = 1; task < tasks(p); ++task) {
        const double* more = sums(p, part, task, workspace);
        for (int64_t d = 0; d < p.D; ++d) total[d] += more[d];
      }
      for (int64_t d = 0; d < p.D; ++d) to[d] = tasks(p) ? R(total[d]) : R(0);
    }
  }

  // --- rows --------------------------------------------------------------------------
  // f(i, V) for the columns from i on that a V holds, a vector or one number. The last vector begins
  // earlier, so it shares columns with the one before.
  template <class F>
  static FA_INLINE void over(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, Vec<R>{});
    if (i < n && n >= W) return f(n - W, Vec<R>{});
    for (; i < n; ++i) f(i, R{});
  }
  template <class Y>
  static FA_INLINE Vec<R> get(const Y* p, Vec<R>) {
    return RowOf<Y>::vector(p);
  }
  template <class Y>
  static FA_INLINE R get(const Y* p, R) {
    return RowOf<Y>::one(p);
  }
  // Pairs of numbers that lie beside each other, from p on, or apart, at p and q.
  template <bool Beside, class Y>
  static FA_INLINE void put_pairs(Y* p, Y* q, Vec<R> a, Vec<R> b) {
    if (Beside) zip<R>(a, b, kSequence);
    RowOf<Y>::put(p, a), RowOf<Y>::put(Beside ? p + W : q, b);
  }
  template <bool Beside, class Y>
  static FA_INLINE void put_pairs(Y* p, Y* q, R a, R b) {
    RowOf<Y>::put(p, a), RowOf<Y>::put(Beside ? p + 1 : q, b);
  }

  static FA_INLINE int64_t place(const FaTensor& x, const Group& group, int r, const Buffers& buf) {
    const int64_t t = group.token[r];
    return buf.item[t] * x.stride[0] + group.head[r] * x.stride[1] + buf.row[t] * x.stride[2];
  }
  static FA_INLINE void clear_rest(const FaNormRope& p, R* x) {
    for (int64_t d = p.D; d < whole(p.D); ++d) x[d] = R(0);
  }
  template <int WRITES>
  static FA_INLINE void prefetch(const FaNormRope& p, const FaTensor& x, const Group& group, int r,
                                 const Buffers& buf) {
    if (r >= group.count || x.stride[3] != 1) return;
    const auto* row =
        reinterpret_cast<const char*>(static_cast<const X*>(x.data) + place(x, group, r, buf));
    for (int64_t i = 0; i < p.D * int64_t{sizeof(X)}; i += 64) __builtin_prefetch(row + i, WRITES);
  }
  // What becomes of rows as they are read.
  enum Turn { kAsTheyAre, kRotated, kRotatedBack };
  template <Turn TURN>
  static FA_INLINE void read_rows(const FaNormRope& p, const FaTensor& x, int rows,
                                  const Buffers& buf, R* to) {
    for (int r = 0; r < rows; ++r, to += whole(p.D)) {
      const int64_t at = place(x, buf.now, r, buf);
      const X* row = static_cast<const X*>(x.data) + at;
      R* read = TURN == kAsTheyAre ? to : buf.spare;
      if (x.stride[3] == 1)
        over(p.D, [&](int64_t d, auto v) { RowOf<R>::put(read + d, get(row + d, v)); });
      else
        read_row<R>(x.data, x.dtype, at, x.stride[3], p.D, read);
      if (TURN != kAsTheyAre) rotate<TURN == kRotatedBack>(p, read, NoFactor{}, r, to, buf);
      clear_rest(p, to);
    }
  }
  // write(y, r) for the place y of each row, or for a buffer if its columns are apart. Meanwhile the
  // lines of the next rows come.
  template <class F>
  static FA_INLINE void write_rows(const FaNormRope& p, const FaNormRopePart& of, int rows,
                                   Buffers& buf, F write) {
    const FaTensor& y = p.backward ? of.dx : of.y;
    for (int r = 0; r < rows; ++r) {
      if (of.x.data) prefetch<0>(p, of.x, buf.next, r, buf);
      prefetch<1>(p, y, buf.next, r, buf);
      if (p.backward) prefetch<0>(p, of.y, buf.next, r, buf);
      const int64_t at = place(y, buf.now, r, buf);
      if (y.stride[3] == 1) {
        write(static_cast<X*>(y.data) + at, r);
      } else {
        write(buf.spare, r);
        write_row<R>(y.data, y.dtype, at, y.stride[3], p.D, buf.spare);
      }
    }
  }
  static void read_weight(const FaNormRope& p, const FaNormRopePart& of, R* to) {
    std::fill_n(to, whole(p.D), R(1));
    if (!of.weight.data) return;
    read_row<R>(of.weight.data, of.weight.dtype, 0, of.weight.stride[3], p.D, to);
    for (int64_t d = 0; d < p.D; ++d) to[d] += R(p.offset);
  }
  static void read_tables(const FaNormRope& p, int64_t t, const Buffers& buf) {
    int64_t row = buf.row[t];
    if (p.cu) row -= *(std::upper_bound(p.cu, p.cu + p.sequences + 1, row) - 1);
    const int64_t n = p.R / 2;
    const auto read = [&](const FaTensor& table, R* to) {
      const int64_t at = buf.item[t] * table.stride[0] + row * table.stride[2];
      read_row<R>(table.data, table.dtype, at, table.stride[3], n, to + t * n);
    };
    read(p.cos, buf.cos), read(p.sin, buf.sin);
  }

  static void forward(const FaNormRope& p, const FaNormRopePart& of, int rows, Buffers& buf) {
    const int64_t ld = whole(p.D);
    if (of.norm && p.R && p.rope_first)
      read_rows<kRotated>(p, of.x, rows, buf, buf.x);
    else
      read_rows<kAsTheyAre>(p, of.x, rows, buf, buf.x);
    if (!of.norm)
      return write_rows(p, of, rows, buf, [&](auto* y, int r) {
        rotate<false>(p, buf.x + r * ld, NoFactor{}, r, y, buf);
      });
    centre_and_scale(p, of.norm, rows, buf);
    write_rows(p, of, rows, buf, [&](auto* y, int r) {
      const Factor factor{buf.scale[r], buf.weight};
      if (p.R && !p.rope_first)
        rotate<false>(p, buf.x + r * ld, factor, r, y, buf);
      else
        copy(0, p.D, buf.x + r * ld, factor, y);
    });
  }
  static void gradient(const FaNormRope& p, const FaNormRopePart& of, int rows, double* dw,
                       Buffers& buf) {
    const int64_t ld = whole(p.D);
    if (of.norm && p.R && !p.rope_first)
      read_rows<kRotatedBack>(p, of.y, rows, buf, buf.g);
    else
      read_rows<kAsTheyAre>(p, of.y, rows, buf, buf.g);
    if (of.norm) {
      if (p.R && p.rope_first)
        read_rows<kRotated>(p, of.x, rows, buf, buf.x);
      else
        read_rows<kAsTheyAre>(p, of.x, rows, buf, buf.x);
      centre_and_scale(p, of.norm, rows, buf);
      gradient_of_weight(p, of.norm, rows, dw, buf);
    }
    write_rows(p, of, rows, buf, [&](auto* y, int r) {
      const R* g = buf.g + r * ld;
      const Slopes slopes{buf.scale[r], buf.mean[r], buf.along[r], buf.x + r * ld};
      if (!of.norm)
        rotate<true>(p, g, NoFactor{}, r, y, buf);
      else if (p.R && p.rope_first)
        rotate<true>(p, g, slopes, r, y, buf);
      else
        copy(0, p.D, g, slopes, y);
    });
  }

  // --- the norm ----------------------------------------------------------------------
  // to[r] = the sum of f(x, d) over the columns d of row r.
  template <class F>
  static FA_INLINE void sum_rows(const FaNormRope& p, int rows, const R* x, R* to, F f) {
    Vec<R> sums[W] = {};
    for (int r = 0; r < rows; ++r, x += whole(p.D)) {
      Vec<R> even{}, odd{};
      int64_t d = 0;
      for (; d + W < p.D; d += 2 * W) even += f(x, d), odd += f(x, d + W);
      if (d < p.D) even += f(x, d);
      sums[r] = even + odd;
    }
    store(to, sum_lanes<R>(sums));
  }
  // Subtracts the mean, of a layer norm. The factor of each row becomes its scale.
  static FA_INLINE void centre_and_scale(const FaNormRope& p, int64_t norm, int rows,
                                         Buffers& buf) {
    if (norm == FA_LAYER_NORM) {
      sum_rows(p, rows, buf.x, buf.mean, [](const R* x, int64_t d) { return load(x + d); });
      for (int r = 0; r < rows; ++r) {
        R* x = buf.x + r * whole(p.D);
        const Vec<R> mean = splat(buf.mean[r] / R(p.D));
        for (int64_t d = 0; d < p.D; d += W) store(x + d, Vec<R>(load(x + d) - mean));
        clear_rest(p, x);
      }
    }
    const auto square = [](const R* x, int64_t d) { return Vec<R>(load(x + d) * load(x + d)); };
    sum_rows(p, rows, buf.x, buf.scale, square);
    for (int r = 0; r < W; ++r) buf.scale[r] = R(1) / std::sqrt(buf.scale[r] / R(p.D) + R(p.eps));
  }
  // What numbers of a row are multiplied by as they are read.
  struct NoFactor {
    template <class V>
    FA_INLINE V operator()(V x, int64_t) const {
      return x;
    }
  };
  struct Factor {
    R r;
    const R* weight;
    FA_INLINE Vec<R> operator()(Vec<R> x, int64_t d) const {
      return x * splat(r) * load(weight + d);
    }
    FA_INLINE R operator()(R x, int64_t d) const { return x * r * weight[d]; }
  };
  // gw, the gradient of the norm times its weights, becomes that of x: r (gw - mean(gw) - n mean(gw n))
  // with n the normed row; mean(gw) is of a layer norm alone.
  struct Slopes {
    R r, mean, along;
    const R* n;
    FA_INLINE Vec<R> operator()(Vec<R> gw, int64_t d) const {
      return splat(r) * (gw - splat(mean) - load(n + d) * splat(along));
    }
    FA_INLINE R operator()(R gw, int64_t d) const { return r * (gw - mean - n[d] * along); }
  };
  // g becomes g times the weights, x is normed; dw += g x.
  static FA_INLINE void gradient_of_weight(const FaNormRope& p, int64_t norm, int rows, double* dw,
                                           Buffers& buf) {
    std::fill_n(buf.spare, whole(p.D), R(0));
    for (int r = 0; r < rows; ++r) {
      R *x = buf.x + r * whole(p.D), *g = buf.g + r * whole(p.D), *sum = buf.spare;
      for (int64_t d = 0; d < p.D; d += W) {
        const Vec<R> n = load(x + d) * splat(buf.scale[r]), at = load(g + d);
        store(sum + d, Vec<R>(load(sum + d) + at * n));
        store(x + d, n);
        store(g + d, Vec<R>(at * load(buf.weight + d)));
      }
    }
    for (int64_t d = 0; dw && d < p.D; ++d) dw[d] += double(buf.spare[d]);
    const R *x = buf.x, *g = buf.g;
    const auto product = [=](const R* row, int64_t d) {
      return Vec<R>(load(row + d) * load(x + (row - g) + d));
    };
    sum_rows(p, rows, g, buf.along, product);
    if (norm == FA_LAYER_NORM)
      sum_rows(p, rows, g, buf.mean, [](const R* row, int64_t d) { return load(row + d); });
    else
      std::fill_n(buf.mean, W, R(0));
    for (int r = 0; r < W; ++r) buf.mean[r] /= R(p.D), buf.along[r] /= R(p.D);
  }

  // --- the rotation ------------------------------------------------------------------
  template <class F, class Y>
  static FA_INLINE void copy(int64_t first, int64_t end, const R* x, F factor, Y* y) {
    over(end - first, [&](int64_t i, auto v) {
      RowOf<Y>::put(y + first + i, factor(get(x + first + i, v), first + i));
    });
  }
  // The rotated row, or with Back the reverse of it. x and y do not overlap.
  template <bool Back, class F, class Y>
  static FA_INLINE void rotate(const FaNormRope& p, const R* x, F factor, int r, Y* y,
                               const Buffers& buf) {
    const int64_t n = p.R / 2, first = buf.now.token[r] * n;
    const R *cos = buf.cos + first, *sin = buf.sin + first;
    if (p.start) copy(0, p.start, x, factor, y);
    if (!p.interleaved)
      turn<Back, false, false>(n, p.start, cos, sin, x, factor, y);
    else if (!p.deinterleave)
      turn<Back, true, true>(n, p.start, cos, sin, x, factor, y);
    else
      turn<Back, !Back, Back>(n, p.start, cos, sin, x, factor, y);
    if (p.start + p.R < p.D) copy(p.start + p.R, p.D, x, factor, y);
  }
  // n pairs of columns. In, Out: those of x and of y lie beside each other, or n apart.
  template <bool Back, bool In, bool Out, class F, class Y>
  static FA_INLINE void turn(int64_t n, int64_t start, const R* cos, const R* sin, const R* x,
                             F factor, Y* y) {
    over(n, [&](int64_t i, auto v) {
      using V = decltype(v);
      const int64_t in = start + (In ? 2 * i : i), out = start + (Out ? 2 * i : i);
      const V c = get(cos + i, v), s = get(sin + i, v);
      V a, b;
      pairs_of<In>(x, in, n, factor, a, b);
      const V first = Back ? a * c + b * s : a * c - b * s;
      const V second = Back ? b * c - a * s : b * c + a * s;
      put_pairs<Out>(y + out, y + out + n, first, second);
    });
  }
  template <bool In, class F>
  static FA_INLINE void pairs_of(const R* x, int64_t at, int64_t n, F factor, Vec<R>& a,
                                 Vec<R>& b) {
    const int64_t other = at + (In ? W : n);
    a = factor(load(x + at), at), b = factor(load(x + other), other);
    if (In) unzip<R>(a, b, kSequence);
  }
  template <bool In, class F>
  static FA_INLINE void pairs_of(const R* x, int64_t at, int64_t n, F factor, R& a, R& b) {
    const int64_t other = at + (In ? 1 : n);
    a = factor(x[at], at), b = factor(x[other], other);
  }
};

}  // namespace FA_ISA
}  // namespace fa
