// Finds the query rows that tiles cannot compute; the vector kernels compute them. These are rows
// with a number that cannot be split into bfloat16 terms exactly (bf16_split.h: it is unfit), and
// rows that see a key with such a number.
#pragma once
#include "../base/scratch.h"
#include "../score/tile.h"

namespace fa {
namespace FA_ISA {

enum Fit : uint8_t { kFits = 0, kUnfit = 1 };
inline bool any_unfit(const uint8_t* fits, int64_t n) {
  uint8_t all = kFits;
  for (int64_t i = 0; i < n; ++i) all |= fits[i];
  return all != kFits;
}

// True if a key is hidden from each of these rows, by the band or by a mask.
inline bool hidden(const Params& p, const Rows& rows, int64_t j) {
  const Plane mask = plane(p.mask, rows.b, rows.h);
  for (int64_t i = rows.i0; i < rows.end(); ++i) {
    const KeyRange seen = key_range(p, rows.b, i, i + 1);
    if (seen.lo <= j && j < seen.hi &&
        !(mask.data && read<float>(mask.data, mask.dtype, mask.at(i, j)) == -kInf<float>))
      return false;
  }
  return true;
}
// For each key from J0 on: is its row of k, and of v, unfit? `v` may be null.
struct KeyFits {
  const uint8_t *k, *v;
  int64_t J0;
};
// True if an unfit key is visible to one of these rows: then the vector kernels compute the rows. On tiles a hidden key is replaced by zeros, and not even a NaN in it has an effect.
inline bool see_unfit_key(const Params& p, const Rows& rows, const Keys& keys,
                          const KeyFits& fits) {
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

// True if two rows see the same unfit keys. A key that is in the band of one row only counts as a
// difference, whatever the mask. Needs fits.v, and fits.J0 = 0.
inline bool see_same_unfit_keys(const Params& p, const Rows& one, const Rows& other,
                                const KeyFits& fits) {
  const KeyRange a = key_range(p, one.b, one.i0, one.end());
  const KeyRange b = key_range(p, other.b, other.i0, other.end());
  const auto any = [&](int64_t begin, int64_t end) {
    return any_unfit(fits.k + begin, end - begin) || any_unfit(fits.v + begin, end - begin);
  };
  if (any(std::min(a.lo, b.lo), std::max(a.lo, b.lo))) return false;
  if (any(std::min(a.hi, b.hi), std::max(a.hi, b.hi))) return false;
  const Plane mask = plane(p.mask, one.b, one.h);
  if (!mask.data || mask.row == 0) return true;
  const auto masked = [&](const Rows& row, int64_t j) {
    return read<float>(mask.data, mask.dtype, mask.at(row.i0, j)) == -kInf<float>;
  };
  for (int64_t j = std::max(a.lo, b.lo); j < std::min(a.hi, b.hi); ++j)
    if ((fits.k[j] | fits.v[j]) != kFits && masked(one, j) != masked(other, j)) return false;
  return true;
}

// A row's scores must be the same numbers in every pass, or P = exp(score - LSE) is off by the
// rounding of scores, which has no bound. So forward records for each row which kernels made them.
// The LSE is stored as two floats, the value and its rounding error (the tail). The last bit of the
// tail is 1 if vector kernels made the scores; a tail of 0 becomes the least normal number first.
inline void mark_scores(const Params& p, const Rows& rows, int64_t i, bool on_vectors) {
  float* tail = static_cast<float*>(p.lse.data) + plane(p.lse, rows.b, rows.h).at(rows.i0 + i, 1);
  const uint32_t was = bits(*tail), least = 0x00800000;
  *tail = number(on_vectors ? ((was & 0x7fffffff) ? was : least) | 1 : was & ~1u);
}
// The rows for which the vector kernels made the scores of these keys, a bit for each. A lane of
// the vectors is a row.
inline uint32_t scored_on_vectors(const Params& p, const Rows& rows, const Keys& keys,
                                  const KeyFits& k, const uint8_t* q_unfit, const float* tail) {
  uint32_t which = 0;
  const bool some = see_unfit_key(p, rows, keys, k);
  for (int64_t i = 0; i < rows.count; ++i)
    if ((bits(tail[i]) & 1) || q_unfit[i] != kFits ||
        (some && see_unfit_key(p, rows.one(i), keys, k)))
      which |= uint32_t(1) << i;
  return which;
}

// Buffers for products on vectors in place of tiles: one operand transposed, the other as rows,
// whatever the tensors' layouts; and the products.
struct VectorScratch {
  float *turned, *rows, *keys, *made;  // [columns][32], [16][columns], [128][columns], [128][32]
  static VectorScratch of(Scratch& take, int64_t columns) {
    return {take.array<float>(32 * columns), take.array<float>(16 * columns),
            take.array<float>(kTileKeys * columns), take.array<float>(kTileKeys * 32)};
  }
};

// The keys, with zeros for an unfit one that none of the rows sees: it may be NaN or infinite. `unfit` begins with the first key.
inline Broadcast<float> keys_on_vectors(const Params& p, const Plane& x, const Keys& keys,
                                        const Rows& rows, int64_t columns, const uint8_t* unfit,
                                        float* buf) {
  const auto along = Operand<Plain<float>>::along(x, keys.j0, keys.count, columns, buf);
  if (!any_unfit(unfit, keys.count)) return along;
  if (along.data != buf) copy_rows(x, keys.j0, keys.count, 0, columns, buf, columns);
  for (int64_t j = 0; j < keys.count; ++j)
    if (unfit[j] != kFits && hidden(p, rows, keys.j0 + j))
      std::fill_n(buf + j * columns, columns, 0.0f);
  return {buf, columns};
}
// S[key][lane], or dP, of the lanes in `which`, as the vector kernels compute it.
template <int NV>
void products_on_vectors(const Params& p, const Plane& x, const Keys& keys, const uint8_t* unfit,
                         const Plane& y, const Rows& rows, uint32_t which, int64_t columns,
                         float factor, const VectorScratch& buf, float* s) {
  Operand<Plain<float>>::transposed(y, rows.i0, rows.count, 0, columns, NV * 16, buf.turned,
                                    buf.rows);
  const Broadcast<float> k = keys_on_vectors(p, x, keys, rows, columns, unfit, buf.keys);
  DotProducts<Plain<float>, NV>::run(k, buf.turned, columns, keys.count, factor, buf.made);
  for (int64_t at = 0; at < keys.count * NV * 16; ++at)
    if ((which >> (at % (NV * 16))) & 1) s[at] = buf.made[at];
}

}  // namespace FA_ISA
}  // namespace fa
