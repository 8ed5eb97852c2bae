// Classifies a dense mask, once per pass: a byte for every 32 rows x 64 keys of each of its planes
// says which kinds of numbers are there (mask_bits.h). Heads that share a plane share its bytes.
// Passes skip keys that are hidden from all rows of a tile, and do not read a mask where it hides
// nothing.
#pragma once
#include "../../common/mask_bits.h"
#include "../base/matrix_view.h"
#include "../base/plan.h"
#include "../base/scratch.h"

namespace fa {
namespace FA_ISA {

template <class F>
FA_INLINE void with_bits(int64_t dtype, F f) {
  switch (dtype) {
    case FA_BOOL:
      return f(OfBool{});
    case FA_BF16:
      return f(OfBF16{});
    case FA_F16:
      return f(OfF16{});
    case FA_F32:
      return f(OfF32{});
    default:
      return f(OfF64{});
  }
}

struct MaskClasses {
  static constexpr int64_t kRows = 32, kKeys = 64, kFewRows = 16;
  uint8_t* data;       // [planes][stripes of kRows][keys / kKeys]
  int64_t item, head;  // planes from one to the next
  int64_t stripes, keys;

  // For a few rows, tiles are scanned one by one (`scan`): an extra phase would cost more. Below
  // 2^13 scores there is too little to skip: measured, with 96 to 127 rows and keys a causal mask
  // gains a sixth, one that hides nothing 5 to 10%; a random mask for each head loses 4%.
  static bool suit(const Params& p) {
    return p.mask.data && p.M > kFewRows && p.M * p.N >= 1 << 13;
  }
  static MaskClasses of(const Params& p) {
    const int64_t heads = p.mask.stride[1] == 0 ? 1 : p.H;
    return {static_cast<uint8_t*>(p.workspace), p.mask.stride[0] == 0 ? 0 : heads,
            p.mask.stride[1] == 0 ? 0 : 1, p.mask.stride[2] == 0 ? 1 : (p.M + kRows - 1) / kRows,
            (p.N + kKeys - 1) / kKeys};
  }
  static int64_t planes(const Params& p) {
    return (p.mask.stride[0] == 0 ? 1 : p.B) * (p.mask.stride[1] == 0 ? 1 : p.H);
  }
  static int64_t bytes(const Params& p) {
    const MaskClasses all = of(p);
    return suit(p) ? planes(p) * all.stripes * all.keys : 0;
  }

  // The union of the bytes of rows [i0, i1) and keys [j0, j1), neither of them empty.
  FA_INLINE uint8_t classes_in(int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t j0,
                               int64_t j1) const {
    const uint8_t* plane = data + (b * item + h * head) * stripes * keys;
    const int64_t last = stripes == 1 ? 0 : (i1 - 1) / kRows;
    uint8_t all = 0;
    for (int64_t s = stripes == 1 ? 0 : i0 / kRows; s <= last; ++s)
      for (int64_t g = j0 / kKeys; g <= (j1 - 1) / kKeys; ++g) all |= plane[s * keys + g];
    return all;
  }

  // The same for rows and keys without bytes, from the mask itself, read until it is known to be
  // mixed: the corners alone show that of most. (This and `run` are templates for FA_HOME.)
  template <int = 0>
  [[gnu::noinline]] static uint8_t scan(const Plane& a, int64_t i0, int64_t i1, int64_t j0,
                                        int64_t j1) {
    uint8_t all = 0;
    with_bits(a.dtype, [&](auto of_bits) {
      using Of = decltype(of_bits);
      if (i0 == i1 || j0 == j1) return;
      const auto* x = static_cast<const typename Of::Bits*>(a.data);
      for (const int64_t i : {i0, i1 - 1})
        for (const int64_t j : {j0, j0 + (j1 - j0) / 2, j1 - 1})
          all |= uint8_t(Of::classes_in(x[a.at(i, j)]));
      if (mixed(all)) return;
      if (a.step != 1 && a.row == 1) {
        for (int64_t j = j0; j < j1 && !mixed(all); ++j)
          all |= classes_in<Of>(a.data, a.at(i0, j), 1, i1 - i0);
        return;
      }
      for (int64_t i = i0; i < (a.row == 0 ? i0 + 1 : i1); ++i)
        for (int64_t j = j0; j < j1 && !mixed(all); j += kKeys)
          all |= classes_in<Of>(a.data, a.at(i, j), a.step, std::min(kKeys, j1 - j));
    });
    return all;
  }

  template <class Of>
  static FA_INLINE uint8_t classes_in(const void* mask, int64_t at, int64_t step, int64_t n) {
    const auto* x = static_cast<const typename Of::Bits*>(mask) + at;
    if (step == 1 && n == kKeys && alike(x)) return uint8_t(Of::classes_in(*x));
    typename Of::Bits all = 0;
    if (step == 1)
      for (int64_t i = 0; i < n; ++i) all |= Of::classes_in(x[i]);
    else
      for (int64_t i = 0; i < n; ++i) all |= Of::classes_in(x[i * step]);
    return uint8_t(all);
  }
  // True if a row of a granule is one number. Most are, and then the loop only waits for memory:
  // prefetching makes it faster by a quarter, measured.
  template <class Bits>
  static FA_INLINE bool alike(const Bits* x) {
    constexpr int64_t n = kKeys * sizeof(Bits) / sizeof(uint64_t);
    const uint64_t first = *x * (~uint64_t(0) / Bits(~Bits(0)));
    for (int64_t at = 2048; at < 2048 + n * 8; at += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(x) + at);
    uint64_t words[n], other = 0;
    std::memcpy(words, x, sizeof(words));
    for (int64_t i = 0; i < n; ++i) other |= words[i] ^ first;
    return other == 0;
  }
  // The bytes of rows [i0, i0 + rows), read in the order of memory.
  template <class Of>
  static void classify(const Plane& a, int64_t i0, int64_t rows, int64_t N, uint8_t* to) {
    std::fill_n(to, (N + kKeys - 1) / kKeys, uint8_t(0));
    if (a.step != 1 && a.row == 1) {
      for (int64_t j = 0; j < N; ++j)
        if (!mixed(to[j / kKeys])) to[j / kKeys] |= classes_in<Of>(a.data, a.at(i0, j), 1, rows);
      return;
    }
    for (int64_t i = i0; i < i0 + rows; ++i)
      for (int64_t j = 0; j < N; j += kKeys)
        if (!mixed(to[j / kKeys]))
          to[j / kKeys] |= classes_in<Of>(a.data, a.at(i, j), a.step, std::min(kKeys, N - j));
  }
  // As many stripes as make it worthwhile to wake a thread.
  static int64_t stripes_per_task(const Params& p) {
    return std::max<int64_t>(1, (1 << 16) / (kRows * std::max<int64_t>(p.N, 1)));
  }
  template <int = 0>
  static void run(const Params& p, int64_t task, char*) {
    const MaskClasses all = of(p);
    const int64_t n = planes(p) * all.stripes, each = stripes_per_task(p);
    for (int64_t at = task * each; at < std::min(n, (task + 1) * each); ++at) {
      const int64_t x = at / all.stripes, i0 = at % all.stripes * kRows;
      const int64_t heads = p.mask.stride[1] == 0 ? 1 : p.H;
      const Plane a = plane(p.mask, x / heads, x % heads);
      const int64_t rows = a.row == 0 ? 1 : std::min(kRows, p.M - i0);
      with_bits(p.mask.dtype, [&](auto of_bits) {
        classify<decltype(of_bits)>(a, i0, rows, p.N, all.data + at * all.keys);
      });
    }
  }

  // Adds the first phase of a pass; its bytes are the first of the workspace.
  static void add(const Params& p, Plan& plan) {
    if (!suit(p)) return;
    const int64_t n = planes(p) * of(p).stripes, each = stripes_per_task(p);
    plan.add({(n + each - 1) / each, 0, run<0>});
  }
  static Scratch workspace_behind(const Params& p) {
    Scratch take{static_cast<char*>(p.workspace)};
    take.array<uint8_t>(bytes(p));
    return take;
  }
};

#if defined(FA_HOME)  // see unit.cpp
FA_HOME template uint8_t MaskClasses::scan<0>(const Plane&, int64_t, int64_t, int64_t, int64_t);
FA_HOME template void MaskClasses::run<0>(const Params&, int64_t, char*);
#endif

}  // namespace FA_ISA
}  // namespace fa
