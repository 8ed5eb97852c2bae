// Where a tile of rows looks: which keys are left between those that the band, the lengths or a
// mask hide from all of its rows.
#pragma once
#include "../band.h"
#include "classes.h"
#include "product.h"

namespace fa {
namespace FA_ISA {

// Keys per tile. A multiple of 4, so that tiles share no Philox group (but where the larger call has
// keys before this one's) and no pair; measured: 96 to 128 best for both float32 and bfloat16.
constexpr int64_t kTileKeys = 128;

struct Rows {
  int64_t b, h, i0, count;
  FA_INLINE int64_t end() const { return i0 + count; }
  FA_INLINE Rows one(int64_t i) const { return {b, h, i0 + i, 1}; }
};
struct Keys {
  int64_t j0, count;
  FA_INLINE int64_t end() const { return j0 + count; }
};

// The keys of [J0, J0 + width) that some of these rows see, from a multiple of `first` on.
template <class Mul>
FA_INLINE Keys visible_keys(const FaParams& p, const Rows& rows, int64_t J0,
                            int64_t width = kTileKeys, int64_t first = Sizes<Mul>::first_key) {
  const KeyRange seen = key_range(p, rows.b, rows.i0, rows.end());
  if (seen.empty()) return {J0, 0};
  const int64_t lo = std::max(J0, seen.lo / first * first), hi = std::min(J0 + width, seen.hi);
  return {lo, std::max<int64_t>(hi - lo, 0)};
}

// What a mask holds for these rows and keys: the union of its classes, or where there are too few
// rows for them, what a boolean mask with one row for all queries (padding) has.
FA_INLINE uint8_t held(const FaParams& p, const Rows& rows, const Keys& keys) {
  if (!p.mask.data) return kVisible;
  if (MaskClasses::suit(p))
    return MaskClasses::of(p).held(rows.b, rows.h, rows.i0, rows.end(), keys.j0, keys.end());
  const Plane a = plane(p.mask, rows.b, rows.h);
  if (a.dtype != FA_BOOL || a.row != 0) return kOther;
  const uint8_t* flags = static_cast<const uint8_t*>(a.data);
  uint8_t all = 0;
  for (int64_t j = keys.j0; j < keys.end() && !mixed(all); ++j)
    all |= OfBool::held(flags[a.at(0, j)]);
  return all;
}
FA_INLINE bool hidden(uint8_t held, uint8_t as = kHidden) { return !(held & ~as); }

// What hides keys from rows with these scores, their largest or their LSE: finfo.min, too, where
// each of them is so far above it that no probability is left, of any product below 2^126.
template <class R>
FA_INLINE uint8_t hides(const R* scores, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i)
    if (!(scores[i] > R(-0x1p126))) return kHidden;
  return kHidden | kLeast;
}
// The keys but the first and the last ones that a mask hides from all of these rows.
FA_INLINE Keys shown_keys(const FaParams& p, const Rows& rows, const Keys& keys,
                          uint8_t as = kHidden) {
  if (!p.mask.data || keys.count <= 0) return keys;
  if (!MaskClasses::suit(p)) return {keys.j0, hidden(held(p, rows, keys)) ? 0 : keys.count};
  constexpr int64_t step = MaskClasses::kKeys;
  int64_t lo = keys.j0, hi = keys.end();
  const auto hides = [&](int64_t j) { return hidden(held(p, rows, {j, 1}), as); };
  while (lo < hi && hides(lo)) lo = (lo / step + 1) * step;
  while (lo < hi && hides(hi - 1)) hi = (hi - 1) / step * step;
  return lo < hi ? Keys{lo, hi - lo} : Keys{keys.j0, 0};
}

// Those of each tile of a task of forward, where it is not known yet who sees a score: first as if
// all keys of finfo.min were hidden, then once more for tiles with a row that sees nothing else.
template <int kTiles>
struct ShownKeys {
  Keys of[kTiles];
  uint32_t tiles = ~0u, skipped = 0, not_enough = 0;  // bits of tiles; skipped: keys of finfo.min
  uint8_t as = kHidden | kLeast;
  FA_INLINE bool due(int64_t t) const { return tiles >> t & 1; }
  FA_INLINE bool find(int64_t t, const FaParams& p, const Rows& rows, const Keys& keys) {
    of[t] = shown_keys(p, rows, keys, as);
    if (of[t].count != keys.count && as != kHidden &&
        of[t].count != shown_keys(p, rows, keys).count)
      skipped |= uint32_t(1) << t;
    return of[t].count > 0;
  }
  FA_INLINE void look_again(int64_t t, uint8_t hides) {
    if (skipped >> t & 1 && hides == kHidden) not_enough |= uint32_t(1) << t;
  }
  FA_INLINE bool again() {
    tiles = not_enough;
    skipped = not_enough = 0;
    as = kHidden;
    return tiles;
  }
};

}  // namespace FA_ISA
}  // namespace fa
