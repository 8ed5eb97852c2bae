// Which keys a tile of rows sees: those that remain where the band, the lengths or a mask hide keys
// from all of its rows.
#pragma once
#include "../../common/band.h"
#include "../base/product.h"
#include "mask_classes.h"

namespace fa {
namespace FA_ISA {

// Keys per tile. A multiple of 4, so that tiles share no Philox group (unless the larger call has
// keys before this one's) and no pair; measured: 96 to 128 best for both float32 and bfloat16.
constexpr int64_t kTileKeys = 128;

struct Rows {
  int64_t b, h, i0, count;
  FA_INLINE int64_t end() const { return i0 + count; }
  FA_INLINE Rows one(int64_t i) const { return {b, h, i0 + i, 1}; }
};
struct Keys {
  int64_t j0, count;
  uint8_t classes = 0;  // of the mask's numbers for the rows at hand (or more); 0: not known yet
  FA_INLINE int64_t end() const { return j0 + count; }
};

// The keys of [J0, J0 + width) that the band and the lengths leave visible to some of these rows.
// The first is rounded down to a multiple of `first`, so up to first - 1 hidden keys come before.
template <class Mul>
FA_INLINE Keys visible_keys(const Params& p, const Rows& rows, int64_t J0,
                            int64_t width = kTileKeys, int64_t first = Sizes<Mul>::first_key) {
  const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
  if (seen.empty()) return {J0, 0};
  const int64_t lo = std::max(J0, seen.lo / first * first), hi = std::min(J0 + width, seen.hi);
  return {lo, std::max<int64_t>(hi - lo, 0)};
}

// What a band leaves of a tile's keys to some of its rows, in whole groups of four keys: no pair or
// quad of bfloat16 reaches across two groups.
struct SeenKeys {
  // The ends of the band of the tile's first row, relative to the tile's first key and not cut to the
  // tile; the number of the tile's keys.
  int64_t lo, hi, count;
  static FA_INLINE SeenKeys of(const Params& p, const Rows& rows, const Keys& keys) {
    const int64_t at = rows.i0 + diagonal(p, rows.b) - keys.j0;
    return {at - p.left, at + p.right + 1, keys.count};
  }
  // Of rows [i, i + n) of the tile.
  FA_INLINE KeyRange by(int64_t i, int64_t n) const {
    const int64_t first = std::max<int64_t>(lo + i, 0) / 4 * 4;
    const int64_t end = (std::max<int64_t>(hi + i + n - 1, 0) + 3) / 4 * 4;
    return {std::min(first, count), std::min(end, count)};
  }
};

// The keys of a tile in strips, each of them seen by other vectors of the tile's NV vectors of
// rows. A band moves on from row to row, so its ends never fall from one vector to the next, and
// the vectors that see a key are adjacent.
template <class R, int NV>
struct Strips {
  int64_t lo[NV], hi[NV];  // the keys of each vector
  static FA_INLINE Strips whole(int64_t keys) {
    Strips all;
    for (int v = 0; v < NV; ++v) all.lo[v] = 0, all.hi[v] = keys;
    return all;
  }
  static FA_INLINE Strips of(const SeenKeys& seen) {
    Strips all;
    for (int v = 0; v < NV; ++v) {
      const KeyRange keys = seen.by(v * kLanes<R>, kLanes<R>);
      all.lo[v] = keys.lo, all.hi[v] = keys.hi;
    }
    return all;
  }
  // Calls f(first key, end, first vector, number of vectors as a constant) for each strip, in
  // order.
  template <class F>
  FA_INLINE void each(F f) const {
    const int64_t last = hi[NV - 1];
    for (int64_t j = lo[0], next; j < last; j = next) {
      int v = 0, end = NV;
      while (hi[v] <= j) ++v;
      while (lo[end - 1] > j) --end;
      next = std::min(hi[v], end < NV ? lo[end] : last);
      if (v < end) with_count<NV>(end - v, [&](auto n) { f(j, next, v, n); });
    }
  }
  template <int N, class F>
  static FA_INLINE void with_count(int n, F f) {
    if constexpr (N > 1)
      if (n < N) return with_count<N - 1>(n, f);
    f(std::integral_constant<int, N>{});
  }
};

// The classes of the mask's numbers for these rows and keys, as one set. If the mask was not
// classified, it is scanned if there are few rows (or one row for all queries, padding); else the
// result is kOther.
FA_INLINE uint8_t classes_in(const Params& p, const Rows& rows, const Keys& keys) {
  if (!p.mask.data) return kVisible;
  if (keys.classes) return keys.classes;
  if (MaskClasses::suit(p))
    return MaskClasses::of(p).classes_in(rows.b, rows.h, rows.i0, rows.end(), keys.j0, keys.end());
  const Plane a = plane(p.mask, rows.b, rows.h);
  if (p.M > MaskClasses::kFewRows && a.row != 0) return kOther;
  return MaskClasses::scan(a, rows.i0, rows.end(), keys.j0, keys.end());
}
// The class of these rows and keys, neither of them empty, in the blocks of a mask_mod.
inline int64_t block_class(const Params& p, const Rows& rows, int64_t j0, int64_t j1) {
  const Plane of = plane(p.mod.classes, rows.b, rows.h);
  bool none = true, all = true;
  for (int64_t stripe = rows.i0 / 32; stripe <= (rows.end() - 1) / 32; ++stripe)
    for (int64_t x = j0 / 64; x <= (j1 - 1) / 64; ++x) {
      const int8_t pairs = static_cast<const int8_t*>(of.data)[of.at(stripe, x)];
      none &= pairs == FA_NO_PAIR;
      all &= pairs == FA_ALL_PAIRS;
    }
  return none ? FA_NO_PAIR : all ? FA_ALL_PAIRS : FA_SOME_PAIRS;
}
// True if the mask_mod hides all of these keys from all of these rows.
FA_INLINE bool hidden_by_mod(const Params& p, const Rows& rows, const Keys& keys) {
  return p.mod.classes.data && block_class(p, rows, keys.j0, keys.end()) == FA_NO_PAIR;
}
// `keys`, without the keys at both ends that the mask_mod hides from all of these rows.
inline Keys shown_keys(const Params& p, const Rows& rows, const Keys& keys) {
  if (!p.mod.classes.data || keys.count <= 0) return keys;
  if (p.M <= MaskClasses::kFewRows)  // kernels for few rows take all of a block or nothing
    return {keys.j0, hidden_by_mod(p, rows, keys) ? 0 : keys.count, keys.classes};
  int64_t lo = keys.j0, hi = keys.end();
  while (lo < hi && hidden_by_mod(p, rows, {lo, 1})) lo = (lo / 64 + 1) * 64;
  while (lo < hi && hidden_by_mod(p, rows, {hi - 1, 1})) hi = (hi - 1) / 64 * 64;
  return lo < hi ? Keys{lo, hi - lo, keys.classes} : Keys{keys.j0, 0};
}
FA_INLINE bool hidden(uint8_t classes, uint8_t hiding = kHidden) { return !(classes & ~hiding); }

// The classes that hide keys from these rows; `scores` are the rows' largest scores, or their LSEs.
// finfo.min is among them if each score is so far above it that exp(finfo.min + s - score) is 0 for
// every scaled product s of q and k below 2^126.
template <class R>
FA_INLINE uint8_t hiding_classes(const R* scores, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i)
    if (!(scores[i] > R(-0x1p126))) return kHidden;
  return kHidden | kLeast;
}
// `all_keys`, without the keys at both ends that a mask or a mask_mod hides from all of these rows.
// `hiding`: the classes that hide a key.
FA_INLINE Keys unmasked_keys(const Params& p, const Rows& rows, const Keys& all_keys,
                             uint8_t hiding = kHidden) {
  const Keys keys = shown_keys(p, rows, all_keys);
  if (!p.mask.data || keys.count <= 0) return keys;
  if (!MaskClasses::suit(p)) {
    const uint8_t all = classes_in(p, rows, keys);
    return {keys.j0, hidden(all, hiding) ? 0 : keys.count, all};
  }
  constexpr int64_t step = MaskClasses::kKeys;
  int64_t lo = keys.j0, hi = keys.end();
  const auto skipped = [&](int64_t j) { return hidden(classes_in(p, rows, {j, 1}), hiding); };
  while (lo < hi && skipped(lo)) lo = (lo / step + 1) * step;
  while (lo < hi && skipped(hi - 1)) hi = (hi - 1) / step * step;
  return lo < hi ? Keys{lo, hi - lo} : Keys{keys.j0, 0};
}

// True if one of these rows needs its keys of finfo.min: its largest score (`scores`) is not far
// above finfo.min, and it is not a row that sees nothing because -inf hides all keys.
template <class R>
[[gnu::noinline, gnu::cold]] bool needs_least(const Params& p, const Rows& rows, const R* scores) {
  const Plane a = plane(p.mask, rows.b, rows.h);
  for (int64_t i = 0; i < rows.count; ++i) {
    if (scores[i] > R(-0x1p126)) continue;
    const Rows row = rows.one(i);
    const KeyRange seen = key_range(p, row.b, row.i0, row.end());
    if (scores[i] != -kInf<R> || !hidden(MaskClasses::scan(a, row.i0, row.end(), seen.lo, seen.hi)))
      return true;
  }
  return false;
}

// The visible keys of each tile of a forward task. A key of finfo.min counts only for a row in which
// no other score is far above it, and scores are not known before the task has run. So the first
// round skips these keys, and a second round computes the tiles again that have such a row:
//
//   do
//     for each block of keys, for each tile t that is `due`: if (find(t, ...)) compute it
//     for each tile t: check_skipped(t, ..., the rows' largest scores)
//   while (again());
template <int kTiles>
struct UnmaskedKeys {
  Keys of[kTiles];
  uint32_t tiles = ~0u, skipped = 0, not_enough = 0;  // bits of tiles; skipped: keys of finfo.min
  uint8_t hiding = kHidden | kLeast;
  FA_INLINE bool due(int64_t t) const { return tiles >> t & 1; }
  FA_INLINE bool find(int64_t t, const Params& p, const Rows& rows, const Keys& keys) {
    of[t] = unmasked_keys(p, rows, keys, hiding);
    if (of[t].count != keys.count && hiding != kHidden &&
        of[t].count != unmasked_keys(p, rows, {keys.j0, keys.count, of[t].classes}).count)
      skipped |= uint32_t(1) << t;
    return of[t].count > 0;
  }
  // m: the rows' largest scores.
  template <class R>
  FA_INLINE void check_skipped(int64_t t, const Params& p, const Rows& rows, const R* m) {
    if (skipped >> t & 1 && hiding_classes(m, rows.count) == kHidden && needs_least(p, rows, m))
      not_enough |= uint32_t(1) << t;
  }
  FA_INLINE bool again() {
    tiles = not_enough;
    skipped = not_enough = 0;
    hiding = kHidden;
    return tiles;
  }
};

}  // namespace FA_ISA
}  // namespace fa
