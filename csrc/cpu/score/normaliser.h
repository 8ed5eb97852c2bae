// The logarithm of a row's sum of exponentials: forward writes it, the passes after it read it.
#pragma once
#include "../base/exp_tanh.h"
#include "../base/matrix_view.h"
#include "../mask/visible_keys.h"

namespace fa {
namespace FA_ISA {

// Two numbers, of one lane each: `lse` and what its rounding cut off. Where scores are as large as a
// mask of finfo.min, lse alone has lost the sum.
template <class R>
struct Normaliser {
  R *lse, *tail;
  FA_INLINE Normaliser from(int64_t lane) const { return {lse + lane, tail + lane}; }
};
// Writes those of some rows: m has their largest scores, l their sums relative to m, 0 if nothing
// was seen. Both have whole vectors.
template <class R>
void write_normalisers(const Params& p, const Rows& rows, const R* m, const R* l) {
  constexpr int W = kLanes<R>;
  const Plane to = plane(p.lse, rows.b, rows.h);
  R* data = static_cast<R*>(p.lse.data);  // its dtype is the one that the kernel computes in
  for (int64_t i = 0; i < rows.count; i += W) {
    const Vec<R> top = load(m + i), sum = load(l + i), logarithm = log(sum);
    const Vec<R> lse = sum == R(0) ? splat(-kInf<R>) : top + logarithm;
    const Vec<R> tail = absolute<R>(lse) < kInf<R> ? (top - lse) + logarithm : Vec<R>{};
    for (int64_t x = 0; x < std::min<int64_t>(W, rows.count - i); ++x) {
      data[to.at(rows.i0 + i + x, 0)] = lse[x];
      data[to.at(rows.i0 + i + x, 1)] = tail[x];
    }
  }
}
template <class R>
void write_normaliser(const Params& p, int64_t b, int64_t h, int64_t i, R m, R l) {
  const Vec<R> top = splat(m), sum = splat(l);
  write_normalisers(p, {b, h, i, 1}, reinterpret_cast<const R*>(&top),
                    reinterpret_cast<const R*>(&sum));
}
// Reads those of some rows; lse is +inf for lanes that see nothing or have no row.
template <class R>
void read_normaliser(const Params& p, const Rows& rows, int64_t lanes, Normaliser<R> to) {
  const Plane from = plane(p.lse, rows.b, rows.h);
  std::fill(to.lse, to.lse + lanes, kInf<R>);
  std::fill(to.tail, to.tail + lanes, R(0));
  for (int64_t l = 0; l < rows.count; ++l) {
    const R* data = static_cast<const R*>(from.data);
    const R lse = data[from.at(rows.i0 + l, 0)];
    if (lse == -kInf<R>) continue;
    to.lse[l] = lse;
    to.tail[l] = data[from.at(rows.i0 + l, 1)];
  }
}

}  // namespace FA_ISA
}  // namespace fa
