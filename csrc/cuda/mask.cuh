// Loads masks, a lane's part of a tile at a time, before the products that they are added to, so
// that the latency of memory overlaps with these.
#pragma once
#include "score.cuh"

namespace fa {

// The mask's elements for each of a lane's 2 n pairs of passing rows or keys, as in memory: two
// bytes or two of 16 bits. Elements of 32 bits are not loaded ahead.
template <int n>
using MaskPairs = uint32_t[n][2];

// The lines of a mask along which a lane's elements pass: those of its staying rows, or keys. Past
// the last row or key it is the last one's, and is not used.
struct MaskLines {
  const unsigned char* lines[2];
  int in_pairs;  // are two neighbouring keys in one word, or in half of one?

  MaskLines() = default;
  template <class Places>
  FA_DEVICE explicit MaskLines(const Places& at) {
    const FaParams& p = at.head(0).p;
    const int64_t* stride = p.mask.stride;
    const int64_t size = p.mask.dtype == FA_BOOL ? 1 : p.mask.dtype == FA_F32 ? 4 : 2;
    const int last = static_cast<int>(Places::kKeysStay ? p.N : p.M) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Head& head = at.head(2 * half);
      const int stays = Places::kKeysStay ? at.j(0, 2 * half) : at.i(0, 2 * half);
      lines[half] = static_cast<const unsigned char*>(p.mask.data) +
                    size * (head.b * stride[0] + head.h * stride[1] +
                            min(stays, last) * stride[Places::kKeysStay ? 3 : 2]);
    }
    const bool even = ((stride[0] | stride[1] | stride[2] | p.N) & 1) == 0;
    in_pairs = !Places::kKeysStay && stride[3] == 1 && even &&
               reinterpret_cast<uintptr_t>(p.mask.data) % static_cast<uintptr_t>(2 * size) == 0;
  }
};

// visit(k, e, element) for all that exist, one by one.
template <class T, int n, class Places, class Visit>
FA_DEVICE void each_of_mask(const MaskLines& mask, const Places& at, Visit visit) {
  const FaParams& p = at.head(0).p;
  const int64_t step = p.mask.stride[Places::kKeysStay ? 2 : 3];
  const int end = static_cast<int>(Places::kKeysStay ? p.M : p.N);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* from = reinterpret_cast<const T*>(mask.lines[half]) + at.passes * step;
#pragma unroll
    for (int k = 0; k < n; ++k)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e, from += e % 2 ? step : 7 * step)
        if (at.passing(k, e) < end) visit(k, e, *from);
  }
}

template <class T, int n, class Places>
FA_DEVICE void load_mask_by_one(MaskPairs<n>& pairs, const MaskLines& mask, const Places& at) {
#pragma unroll
  for (int k = 0; k < n; ++k) pairs[k][0] = pairs[k][1] = 0;
  each_of_mask<T, n>(mask, at, [&](int k, int e, T x) {
    pairs[k][e / 2] |= static_cast<uint32_t>(x) << 8 * sizeof(T) * (e % 2);
  });
}

// The lane's first key is one of the first 8 of its tile, which begins at a multiple of 8.
template <class Pair, int n, class Places>
FA_DEVICE void load_mask_by_pairs(MaskPairs<n>& pairs, const MaskLines& mask, const Places& at) {
  const int end = static_cast<int>(at.head(0).p.N);
  const bool whole = at.passes / 8 * 8 + 8 * n <= end;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto* from = reinterpret_cast<const Pair*>(mask.lines[half]) + at.passes / 2;
    if (whole) {
#pragma unroll
      for (int k = 0; k < n; ++k) pairs[k][half] = from[4 * k];
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) pairs[k][half] = at.passing(k, 0) < end ? from[4 * k] : 0u;
    }
  }
}

template <int n, class Places>
FA_DEVICE void load_mask(MaskPairs<n>& pairs, const MaskLines& mask, const Places& at) {
  const int64_t dtype = at.head(0).p.mask.dtype;
  if (dtype == FA_F32) return;
  if (!Places::kKeysStay && mask.in_pairs) {
    if (dtype == FA_BOOL)
      load_mask_by_pairs<uint16_t>(pairs, mask, at);
    else
      load_mask_by_pairs<uint32_t>(pairs, mask, at);
  } else if (dtype == FA_BOOL) {
    load_mask_by_one<uint8_t>(pairs, mask, at);
  } else {
    load_mask_by_one<uint16_t>(pairs, mask, at);
  }
}

// Adds the mask to logits of this unit; where a bool mask hides, the gradient is 0.
template <int n, class Places, class Gradient>
FA_DEVICE void add_mask(float (&s)[n][4], const Places& at, const MaskLines& mask,
                        const MaskPairs<n>& pairs, float unit, Gradient gradient) {
  const auto add = [&](int k, int e, float x) { s[k][e] = fmaf(s[k][e], unit, x); };
  const auto half = [&](int k, int e) {
    return static_cast<uint16_t>(pairs[k][e / 2] >> 16 * (e % 2));
  };
  switch (at.head(0).p.mask.dtype) {
    case FA_BOOL:
      return each_of(s, [&](int k, int e) {
        if (pairs[k][e / 2] & 0xFFu << 8 * (e % 2)) return;
        s[k][e] = -INFINITY;  // whatever the score was: it may be NaN
        gradient.hide(k, e);
      });
    case FA_BF16:
      return each_of(s, [&](int k, int e) { add(k, e, ptx::widen(ptx::BF16(), half(k, e))); });
    case FA_F16:
      return each_of(s, [&](int k, int e) { add(k, e, ptx::widen(ptx::F16(), half(k, e))); });
    default:
      return each_of_mask<float, n>(mask, at, add);
  }
}

// True if something other than a positive scale and a band changes the scores or the weights. Plain
// kernels take the maximum of products, which only a positive scale preserves.
inline bool is_general(const FaParams& p) {
  return p.mask.data || p.slopes.data || p.softcap > 0 || p.dropout_p > 0 ||
         !(static_cast<float>(p.scale) > 0);
}

// Products become logits, before the band. Gradients by logits, if there are any, become those by
// the scaled products: times the derivative of softcap, and 0 where a bool mask hides the key. A
// mask that is known to hide nothing need not be read.
template <int n, class Places, class Gradient>
FA_DEVICE void logits(float (&s)[n][4], const Places& at, const MaskLines& mask,
                      const MaskPairs<n>& pairs, Gradient gradient, bool read = true) {
  const Head& head = at.head(0);
  const FaParams& p = head.p;
  const bool added = p.slopes.data || (p.mask.data && read && p.mask.dtype != FA_BOOL);
  float unit = 1.0f;  // factor of s: the first term that is added applies the scale
  if (p.softcap > 0)
    cap(s, head, gradient);
  else if (added)
    unit = head.scale;
  else
    each_of(s, [&](int k, int e) { s[k][e] *= head.scale; });
  if (p.slopes.data) add_alibi(s, at, unit);
  if (p.mask.data && read) add_mask(s, at, mask, pairs, p.slopes.data ? 1.0f : unit, gradient);
}

}  // namespace fa
