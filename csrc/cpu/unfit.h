// Rows that tiles cannot multiply, because a number of theirs is no sum of planes (amx_planes.h),
// and who must meet them on vectors for it: rows that see such a key, or are such rows themselves.
#pragma once
#include "scratch.h"
#include "tile.h"

namespace fa {
namespace FA_ISA {

enum Fit : uint8_t { kFits = 0, kUnfit = 1 };
inline bool any_unfit(const uint8_t* fits, int64_t n) {
  uint8_t all = kFits;
  for (int64_t i = 0; i < n; ++i) all |= fits[i];
  return all != kFits;
}

// Is a key hidden from each of these rows, by the band or by a mask?
inline bool hidden(const FaParams& p, const Rows& rows, int64_t j) {
  const Plane mask = plane(p.mask, rows.b, rows.h);
  for (int64_t i = rows.i0; i < rows.end(); ++i) {
    const KeyRange seen = key_range(p, rows.b, i, i + 1);
    if (seen.lo <= j && j < seen.hi &&
        !(mask.data && read<float>(mask.data, mask.dtype, mask.at(i, j)) == -kInf<float>))
      return false;
  }
  return true;
}
// Fits of the keys of a block and of their values, from its first key on; `v` may be null.
struct KeyFits {
  const uint8_t *k, *v;
  int64_t J0;
};
// Must these rows meet these keys on vectors? Not for a key that is hidden from all of them: on
// tiles it is zeros, and not even a NaN of its is seen.
inline bool meet_unfit(const FaParams& p, const Rows& rows, const Keys& keys, const KeyFits& fits) {
  const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
  const int64_t begin = std::max(keys.j0, seen.lo), end = std::min(keys.end(), seen.hi);
  if (!any_unfit(fits.k + (begin - fits.J0), end - begin) &&
      !(fits.v && any_unfit(fits.v + (begin - fits.J0), end - begin)))
    return false;
  for (int64_t j = begin; j < end; ++j) {
    const bool unfit = fits.k[j - fits.J0] != kFits || (fits.v && fits.v[j - fits.J0] != kFits);
    if (unfit && !hidden(p, rows, j)) return true;
  }
  return false;
}

// What the vector kernels' products need where they stand in for tiles: one operand turned, the
// other as rows, whatever the tensors' layouts.
struct VectorScratch {
  float *turned, *rows, *keys;  // [columns][32 lanes], [16][columns], [128][columns]
  static VectorScratch of(Scratch& take, int64_t columns) {
    return {take.array<float>(32 * columns), take.array<float>(16 * columns),
            take.array<float>(128 * columns)};
  }
};

// S[key][lane], or dP, as the vector kernels have it.
template <int NV>
void products_on_vectors(const Plane& x, const Keys& keys, const Plane& y, const Rows& rows,
                         int64_t columns, float factor, const VectorScratch& buf, float* s) {
  using Op = Operand<Plain<float>>;
  Op::transposed(y, rows.i0, rows.count, 0, columns, NV * 16, buf.turned, buf.rows);
  const Broadcast<float> k = Op::along(x, keys.j0, keys.count, columns, buf.keys);
  DotProducts<Plain<float>, NV>::run(k, buf.turned, columns, keys.count, factor, s);
}

}  // namespace FA_ISA
}  // namespace fa
