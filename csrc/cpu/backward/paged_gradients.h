// The backward pass of sequences of one row with keys and values in pages, as where each row selects
// its keys. Sequences share pages, so dK and dV are sums over sequences, added in place:
//
//   rows    S = scale Q K^T, dP = dO V^T, P, dS, and dQ = scale dS K     a sequence and key head
//   pages   dV += dropout(P)^T dO, dK += scale dS^T Q                    a range of the pages
//
// P and dS pass from the first phase to the second in the workspace. A task of the second owns its
// pages and takes the sequences in order: the result depends neither on the number of tasks nor on
// how the caller divides the sequences among calls.
#pragma once
#include "../score/sequence.h"
#include "few_gradients.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
struct PagedGradients {
  using R = typename Mul::Real;
  using Few = FewGradients<Mul>;
  using Sum = WeightedSum<Mul>;
  static constexpr int W = kLanes<R>;
  static constexpr int64_t kAtOnce = FewRows<Mul>::kKeys;
  static constexpr int64_t kKeys = 32, kAhead = 8;  // keys at a time; the distance of prefetches

  static int64_t group(const Params& p) { return p.H / std::max<int64_t>(p.Hk, 1); }
  // Of P and dS in the workspace.
  static int64_t row_length(const Params& p) { return round_up(p.N, kTileKeys); }

  // [sequences][H][row_length] each.
  struct Workspace {
    R *p, *ds;
    uint8_t* ascending;  // [sequences]: is the table of the sequence in ascending order?
    size_t bytes;
  };
  static Workspace workspace(const Params& p) {
    Scratch take{static_cast<char*>(p.workspace)};
    Workspace w;
    w.p = take.array<R>(p.B * p.H * row_length(p));
    w.ds = take.array<R>(p.B * p.H * row_length(p));
    w.ascending = take.array<uint8_t>(p.B);
    w.bytes = take.used;
    return w;
  }
  // From the row of the first head of a sequence and key head on.
  static Workspace workspace(const Params& p, int64_t b, int64_t hk) {
    const Workspace w = workspace(p);
    const int64_t at = (b * p.H + hk * group(p)) * row_length(p);
    return {w.p + at, w.ds + at, w.ascending, w.bytes};
  }
  static bool has_row(const Params& p, int64_t b) { return p.cu_q[b + 1] > p.cu_q[b]; }

  // --- rows ---------------------------------------------------------------------------
  struct RowBuffers : Few::Buffers {
    R *lse, *tail, *delta;  // [heads]
  };
  static size_t carve_rows(const Params& p, char* base, RowBuffers& b) {
    Params one = p;
    one.M = 1;
    const size_t used = Few::carve(one, base, b);
    Scratch take{base, used};
    b.lse = take.array<R>(group(p) * W);  // readers fill whole vectors
    b.tail = take.array<R>(group(p) * W);
    b.delta = take.array<R>(group(p));
    return take.used;
  }
  static void rows(const Params& p, int64_t task, char* scratch) {
    const int64_t b = task / p.Hk, hk = task % p.Hk;
    if (!has_row(p, b)) return;
    RowBuffers buf;
    carve_rows(p, scratch, buf);
    const Params one = sequence(p, b);
    const typename Few::Task of(one, hk);
    Few::stage_rows(one, of, buf);
    for (int64_t h = 0; h < group(p); ++h) {
      const Rows row{0, of.h0 + h, 0, 1};
      read_normaliser<R>(one, row, W, {buf.lse + h * W, buf.tail + h * W});
      buf.delta[h] = R(0);
      Backward<Mul>::delta_from_output(one, row, buf.delta + h);
    }
    const int64_t count = (one.N + p.page - 1) / p.page;
    if (hk == 0) workspace(p).ascending[b] = std::is_sorted(one.pages, one.pages + count);
    std::fill(buf.dq, buf.dq + group(p) * Sum::columns(p.D), R(0));
    for (int64_t j = 0; j < one.N; j += kTileKeys)
      block(one, of, {j, std::min(kTileKeys, one.N - j)}, workspace(p, b, hk), row_length(p), buf);
    for (int64_t h = 0; h < group(p); ++h)
      Few::write_dq(one, 0, of.h0 + h, 0, buf.dq + h * Sum::columns(p.D), buf.written);
  }
  // One block of keys: adds to dQ, and leaves P and dS in the workspace.
  static void block(const Params& one, const typename Few::Task& of, const Keys& keys,
                    const Workspace& w, int64_t ldw, const RowBuffers& buf) {
    const KeyPlane key = keys_of(one, 0, of.hk), value = values_of(one, 0, of.hk);
    const auto k = Sum::stage(key, keys.j0, keys.count, one.D, buf.k);
    const auto v = Operand<Mul>::along(value, keys.j0, keys.count, one.Dv, buf.v);
    const int64_t n = group(one);
    for (int64_t j = 0; j < keys.count; j += kAtOnce) {
      const int64_t some = std::min(kAtOnce, keys.count - j);
      FewRows<Mul>::products({k.data + j * k.stride, k.stride}, some, one.D, buf.q, n, R(one.scale),
                             buf.s + j);
      FewRows<Mul>::products({v.data + j * v.stride, v.stride}, some, one.Dv, buf.dout, n, R(1),
                             buf.ds + j);
    }
    for (int64_t h = 0; h < n; ++h) {
      const int64_t x = h * kTileKeys;
      Few::gradients(one, {0, of.h0 + h, 0, 1}, keys, {buf.lse + h * W, buf.tail + h * W},
                     buf.delta + h,
                     {buf.s + x, buf.ds + x, buf.dropped ? buf.dropped + x : nullptr}, buf);
      const R* weights = buf.dropped ? buf.dropped : buf.s;
      const int64_t to = h * ldw + keys.j0;
      std::copy_n(weights + x, keys.count, w.p + to);
      std::copy_n(buf.ds + x, keys.count, w.ds + to);
    }
    const auto* ds = Sum::operand(buf.ds, n, buf.ds_operand);
    for (int64_t j = 0; j < keys.count; j += kAtOnce)
      Sum::add(ds, j, {k.data + j * k.stride, k.stride}, std::min(kAtOnce, keys.count - j), n,
               one.D, buf.dq);
  }

  // --- pages --------------------------------------------------------------------------
  // Each range reads the rows of all sequences that have a page there: measured, ranges that fit a
  // near cache are 5 to 18% slower than one for all pages.
  static int64_t ranges(const Params& p) {
    return std::clamp<int64_t>(p.threads > 1 ? 4 * p.threads : 1, 1, std::max<int64_t>(p.P, 1));
  }
  struct PageBuffers {  // [heads][Few::numbers(columns)]
    const Params& p;
    Scratch take;
    R* q = take.array<R>(group(p) * Few::numbers(p.D));
    R* dout = take.array<R>(group(p) * Few::numbers(p.Dv));
  };
  static void pages(const Params& p, int64_t task, char* scratch) {
    const PageBuffers buf{p, {scratch}};
    const int64_t hk = task % p.Hk, range = task / p.Hk;
    const int64_t lo = p.P * range / ranges(p), hi = p.P * (range + 1) / ranges(p);
    for (int64_t b = 0; b < p.B; ++b) {
      if (interrupted(p)) return;
      if (!has_row(p, b)) continue;
      bool staged = false;
      each_run(p, b, lo, hi, [&](int64_t first, int64_t end) {
        if (!staged) stage(p, b, hk, buf);
        staged = true;
        const int64_t keys_end = std::min(end * p.page, p.lengths[b]);
        for (int64_t j = first * p.page; j < keys_end; j += kKeys)
          add_keys(p, b, hk, j, std::min(kKeys, keys_end - j), buf);
      });
    }
  }
  // Calls f(first, end) for the entries of a sequence's table with pages in [lo, hi).
  template <class F>
  static FA_INLINE void each_run(const Params& p, int64_t b, int64_t lo, int64_t hi, F f) {
    const int64_t* table = p.pages + b * p.blocks;
    const int64_t* last = table + (p.lengths[b] + p.page - 1) / p.page;
    if (table == last) return;
    if (workspace(p).ascending[b]) {
      if (table[0] >= hi || last[-1] < lo) return;
      const int64_t* first = std::lower_bound(table, last, lo);
      const int64_t* end = std::lower_bound(first, last, hi);
      if (first < end) f(first - table, end - table);
      return;
    }
    const auto mine = [&](int64_t page) { return page >= lo && page < hi; };
    for (const int64_t* first = table; first < last;) {
      first = std::find_if(first, last, mine);
      const int64_t* end = std::find_if_not(first, last, mine);
      if (first < end) f(first - table, end - table);
      first = end;
    }
  }
  static void stage(const Params& p, int64_t b, int64_t hk, const PageBuffers& buf) {
    for (int64_t h = 0; h < group(p); ++h) {
      const int64_t row = p.cu_q[b], d = Few::numbers(p.D), dv = Few::numbers(p.Dv);
      copy_rows(plane(p.q, 0, hk * group(p) + h), row, 1, 0, p.D, buf.q + h * d, d);
      copy_rows(plane(p.dout, 0, hk * group(p) + h), row, 1, 0, p.Dv, buf.dout + h * dv, dv);
    }
  }
  // Adds the terms of keys [j, j + n) of a sequence to dK and dV.
  static void add_keys(const Params& p, int64_t b, int64_t hk, int64_t j, int64_t n,
                       const PageBuffers& buf) {
    const Workspace w = workspace(p, b, hk);
    R* rows[kKeys + kAhead];
    if (p.dv.data) {
      find(p, p.dv, b, hk, j, n, rows);
      add_products(p, w.p + j, buf.dout, rows, n, p.Dv, R(1));
    }
    if (p.dk.data) {
      find(p, p.dk, b, hk, j, n, rows);
      add_products(p, w.ds + j, buf.q, rows, n, p.D, scale_of<R>(p, hk * (p.H / p.Hk)));
    }
  }
  // The addresses of rows in pages; the last one again for prefetches past the end.
  static void find(const Params& p, const FaTensor& t, int64_t b, int64_t hk, int64_t j, int64_t n,
                   R** rows) {
    const int64_t* table = p.pages + b * p.blocks;
    for (int64_t x = 0; x < n; ++x)
      rows[x] = static_cast<R*>(t.data) + table[(j + x) / p.page] * t.stride[0] + hk * t.stride[1] +
                (j + x) % p.page * t.stride[2];
    std::fill(rows + n, rows + n + kAhead, rows[n - 1]);
  }
  struct AddRows {  // rows[r][column..end) += sum * factor
    R* const* rows;
    int64_t column, end;
    R factor;
    FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
      const int64_t c = column + v * W;
      R* at = rows[r] + c;
      __builtin_prefetch(rows[r + kAhead] + c, 1, 2);
      if (c + W <= end) {
        store(at, Vec<R>(load(at) + sum * factor));
      } else {
        for (int64_t l = 0; c + l < end; ++l) at[l] += sum[l] * factor;
      }
    }
  };
  // rows[key][c] += factor sum_head x[head][key] y[head][c].
  template <int NV = kRegisterVectors>
  static void add_products(const Params& p, const R* x, const R* y, R* const* rows, int64_t n,
                           int64_t columns, R factor, int64_t c = 0) {
    constexpr int64_t step = NV * W;
    const int64_t ld = Few::numbers(columns);
    for (; c + step <= ld; c += step)
      product<Plain<R>, Unit::along_r, NV>({x, row_length(p)}, y + c, ld, group(p), n,
                                           AddRows{rows, c, columns, factor});
    if constexpr (NV > 1)
      if (c < ld) add_products<(NV + 1) / 2>(p, x, y, rows, n, columns, factor, c);
  }

  static Plan plan(const Params& p) {
    Plan plan;
    RowBuffers of_rows;
    plan.workspace = workspace(p).bytes;
    plan.add({p.H ? p.B * p.Hk : 0, carve_rows(p, nullptr, of_rows), rows});
    const bool wanted = p.H && (p.dk.data || p.dv.data);
    plan.add({wanted ? p.Hk * ranges(p) : 0, PageBuffers{p, {nullptr}}.take.used, pages});
    return plan;
  }
};

}  // namespace FA_ISA
}  // namespace fa
