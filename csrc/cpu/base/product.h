// The one matrix product of the vector kernels (that of tiles is in amx/amx_product.h):
//
//   C[r][lane] (op)= sum_k X[r][k] * Y[k][lane]
//
// X is broadcast element by element, Y and C are rows of vectors. Scores, dP, O, dQ, dK and dV
// differ only in what stands for X, Y and C. Each sum is made of chains of fused multiply-adds in
// the order of k, so its value depends neither on the register tile that computed it nor on how
// rows were shared among threads.
#pragma once
#include "simd.h"

namespace fa {
namespace FA_ISA {

// How two operands multiply. An "element" is what is broadcast: one number, or a pair of bfloat16
// that are adjacent along k. "Registers" is the state that a task holds while it multiplies, if its
// instructions need any, and "planes" is how many parts a number is split into (amx_product.h).
struct NoRegisters {};
template <class R>
struct Plain {
  using Real = R;
  using Element = R;
  using Registers = NoRegisters;
  static constexpr int pair = 1, planes = 1;
  static FA_INLINE Vec<R> fma(Vec<R> acc, Vec<R> x, Vec<R> y) { return acc + x * y; }
  static FA_INLINE Vec<R> fma(Vec<R> acc, const R* x, Vec<R> y) { return fma(acc, splat(*x), y); }
};

#if defined(FA_BF16_PRODUCTS)
// VDPBF16PS, BFDOT and BFMMLA flush subnormal elements and sums to 0, whatever the process's state:
// bfloat16 below 2^-126 is lost here (and on AMX tiles), while the other instruction sets widen and
// keep it.
struct PairedBf16 {
  using Real = float;
  using Element = int32_t;
  using Registers = NoRegisters;
  static constexpr int pair = 2, planes = 1;
  static FA_INLINE Vec<float> fma(Vec<float> acc, Vec<int32_t> x, Vec<int32_t> y) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)y);
#else
    return (Vec<float>)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)x, (bfloat16x8_t)y);
#endif
  }
  static FA_INLINE Vec<float> fma(Vec<float> acc, const int32_t* x, Vec<int32_t> y) {
    int32_t both;
    std::memcpy(&both, x, 4);
    return fma(acc, splat(both), y);
  }
};
#endif

// Which of X's two strides is 1.
enum class Unit { along_k, along_r };

// Rows of C held in registers for NV vectors a row: as many independent chains as
// hide the latency and still fit. Measured: 4 x 4 best or tied on AVX-512, 4 x 3 on
// AVX2, where it is 4% faster than 6 x 2 (seven loads for twelve sums, not eight). On Arm 8 x 2:
// the fewest instructions for 16 sums, which four pipes of four cycles need (arm_product.h).
constexpr int register_rows([[maybe_unused]] int nv) {
#if defined(__AVX512F__)
  return nv >= 4 ? 4 : 8;
#elif defined(__aarch64__)
  return 8;
#else
  return nv >= 3 ? 4 : nv == 2 ? 6 : 8;
#endif
}
// Query rows of one tile, and columns of a register tile, in vectors.
#if defined(__AVX512F__)
constexpr int kTileVectors = 4, kRegisterVectors = 4;
#elif defined(__aarch64__)
constexpr int kTileVectors = 4, kRegisterVectors = 2;
#else
constexpr int kTileVectors = 3, kRegisterVectors = 3;
#endif

// Sizes of the passes that compute gradients and weights: rows of a tile, and the part of them that
// the score pipeline takes at once; the multiple at which the keys of a tile may begin; what
// columns are padded to; and how many rows are staged for packing.
template <class Mul>
struct Sizes {
  static constexpr int64_t lanes = kLanes<typename Mul::Real>;
  static constexpr int64_t rows = kTileVectors * lanes, part = rows, first_key = 4, padding = lanes;
  static constexpr int64_t staged = kLanes<typename Mul::Element>;
};

// Small caches of few ways: sums are prefetched before the products that are added to them, and rows
// are copied if their distance puts them in the same few places of a cache. Measured on Zen 3, backward
// of D 128 to 256: 1.05 to 1.15.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kSmallCache = true;
#else
constexpr bool kSmallCache = false;
#endif
// True if a few rows so far apart have the same places in a cache.
template <class E>
constexpr bool collide(int64_t stride) {
  return kSmallCache && stride * int64_t(sizeof(E)) % 1024 == 0;
}

template <class E>
struct Broadcast {
  const E* data;
  int64_t stride;  // the one that is not 1
};

// How a sum is stored. A sum starts from zero and is combined with C only at the end: two levels of
// summation err less than one long chain, at no cost. `from(v)` begins at vector v of columns.
template <class R>
struct Overwrite {  // C = sum * factor
  R* c;
  int64_t ldc;
  R factor = R(1);
  FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
    store(c + r * ldc + v * kLanes<R>, sum * factor);
  }
  FA_INLINE Overwrite from(int v) const { return {c + v * kLanes<R>, ldc, factor}; }
};
template <class R>
struct Accumulate {  // C += sum * factor
  R* c;
  int64_t ldc;
  R factor = R(1);
  FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
    R* at = c + r * ldc + v * kLanes<R>;
    store(at, load(at) + sum * factor);
  }
  FA_INLINE void ask(int64_t r) const {
    const char* at = reinterpret_cast<const char*>(c + r * ldc);
    __builtin_prefetch(at, 1), __builtin_prefetch(at + 64, 1);
  }
  FA_INLINE Accumulate from(int v) const { return {c + v * kLanes<R>, ldc, factor}; }
};
template <class R>
struct Rescale {  // C = C * factor[lane] + sum
  R* c;
  int64_t ldc;
  const R* factor;
  FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
    R* at = c + r * ldc + v * kLanes<R>;
    store(at, load(at) * load(factor + v * kLanes<R>) + sum);
  }
  FA_INLINE Rescale from(int v) const { return {c + v * kLanes<R>, ldc, factor + v * kLanes<R>}; }
};
template <class R>
struct ScaleRows {  // C = sum * factor[r]
  R* c;
  int64_t ldc;
  const R* factor;
  FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
    store(c + r * ldc + v * kLanes<R>, sum * splat(factor[r]));
  }
};
template <class R>
struct RescaleRows {  // C = C * factor[r] + sum
  R* c;
  int64_t ldc;
  const R* factor;
  FA_INLINE void operator()(int64_t r, int v, Vec<R> sum) const {
    R* at = c + r * ldc + v * kLanes<R>;
    store(at, load(at) * splat(factor[r]) + sum);
  }
};

// sums[r][v] = the products of row r of X with a vector of columns of Y.
template <class R, int MR, int NV>
FA_INLINE void clear(Vec<R> (&sums)[MR][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[r][v] = Vec<R>{};
}
template <class Mul, Unit U>
struct RegisterSums {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  template <int MR, int NV>
  static FA_INLINE void find(Broadcast<E> x, const E* y, int64_t ldy, int64_t n,
                             Vec<R> (&sums)[MR][NV]) {
    clear<R>(sums);
    for (int64_t k = 0; k < n; ++k) {
      Vec<E> row[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) row[v] = load(y + k * ldy + v * kLanes<E>);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const E* element = x.data + (U == Unit::along_k ? r * x.stride + k : k * x.stride + r);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sums[r][v] = Mul::fma(sums[r][v], element, row[v]);
      }
    }
  }
};

}  // namespace FA_ISA
}  // namespace fa

#if defined(__aarch64__)
#include "arm_product.h"
#endif

namespace fa {
namespace FA_ISA {

template <class Mul, Unit U, int MR, int NV, class Out>
FA_INLINE void register_tile(Broadcast<typename Mul::Element> x, const typename Mul::Element* y,
                             int64_t ldy, int64_t n, int64_t r0, const Out& out) {
  Vec<typename Mul::Real> sums[MR][NV];
  if constexpr (kSmallCache && std::is_same_v<Out, Accumulate<typename Mul::Real>>)
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) out.ask(r0 + r);
  x.data += U == Unit::along_k ? r0 * x.stride : r0;
  RegisterSums<Mul, U>::find(x, y, ldy, n, sums);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out(r0 + r, v, sums[r][v]);
}

// All `rows` of C: full register tiles, then halves of them.
template <class Mul, Unit U, int NV, class Out, int MR = register_rows(NV)>
FA_INLINE void product(Broadcast<typename Mul::Element> x, const typename Mul::Element* y,
                       int64_t ldy, int64_t n, int64_t rows, const Out& out, int64_t r = 0) {
  if constexpr (NV > kRegisterVectors) {
    constexpr int here = kRegisterVectors, whole = NV / here * here;
    constexpr int64_t lanes = kLanes<typename Mul::Real>;
    for (int v = 0; v < whole; v += here)
      product<Mul, U, here>(x, y + v * lanes, ldy, n, rows, out.from(v), r);
    if constexpr (whole < NV)
      product<Mul, U, NV - whole>(x, y + whole * lanes, ldy, n, rows, out.from(whole), r);
  } else {
    for (; r + MR <= rows; r += MR) register_tile<Mul, U, MR, NV>(x, y, ldy, n, r, out);
    if constexpr (MR > 1)
      if (r < rows) product<Mul, U, NV, Out, MR / 2>(x, y, ldy, n, rows, out, r);
  }
}

// S[r][lane] = factor * the dot product of row r of X with lane's column of Y, both of `columns`
// numbers. Long ones are split into equal chains: a chain's error grows with its length, and passes
// to what follows (exp above all). Pairs hold numbers that are already rounded much more. Rows of Y
// and S are `ld` apart: they may be some vectors of a wider tile.
template <class Mul, int NV>
struct DotProducts {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  static constexpr int64_t lanes = NV * kLanes<R>, longest = Mul::pair == 1 ? 96 : 256;

  static FA_INLINE void run(Broadcast<E> x, const E* y, int64_t columns, int64_t rows, R factor,
                            R* s, int64_t ld = lanes) {
    const int64_t n = (columns + Mul::pair - 1) / Mul::pair;
    if (n > longest) return chains(x, y, n, rows, factor, s, ld);
    product<Mul, Unit::along_k, NV>(x, y, ld, n, rows, Overwrite<R>{s, ld, factor});
  }
  // Not inlined: the common case would compile to 2% more instructions. Chain by chain within a
  // register tile's rows: over all rows, X would be read in pieces too short to be prefetched.
  [[gnu::noinline]] static void chains(Broadcast<E> x, const E* y, int64_t n, int64_t rows,
                                       R factor, R* s, int64_t ld) {
    constexpr int64_t most = register_rows(NV);
    const int64_t count = (n + longest - 1) / longest, chain = (n + count - 1) / count;
    for (; rows > 0; rows -= most, x.data += most * x.stride, s += most * ld) {
      const int64_t here = std::min(rows, most);
      product<Mul, Unit::along_k, NV>(x, y, ld, chain, here, Overwrite<R>{s, ld, factor});
      for (int64_t k = chain; k < n; k += chain)
        product<Mul, Unit::along_k, NV>({x.data + k, x.stride}, y + k * ld, ld,
                                        std::min(chain, n - k), here, Accumulate<R>{s, ld, factor});
    }
  }
};

// Calls f(number of vectors, first column) for register tiles that cover `columns`, a multiple of
// the vector length, from column c on.
template <class R, int NV = kRegisterVectors, class F>
FA_INLINE void each_register_tile(int64_t columns, F f, int64_t c = 0) {
  for (; c + NV * kLanes<R> <= columns; c += NV * kLanes<R>)
    f(std::integral_constant<int, NV>{}, c);
  if constexpr (NV > 1)
    if (c < columns) each_register_tile<R, NV - 1>(columns, f, c);
}

// C += factor * X Y for a C of any width: `columns` is a multiple of the vector length.
template <class Mul, Unit U, int NV = kRegisterVectors>
void accumulate_wide(Broadcast<typename Mul::Element> x, const typename Mul::Element* y,
                     int64_t ldy, int64_t n, int64_t rows, int64_t columns, typename Mul::Real* c,
                     int64_t ldc, typename Mul::Real factor = typename Mul::Real(1)) {
  using R = typename Mul::Real;
  constexpr int step = NV * kLanes<R>;
  int64_t at = 0;
  for (; at + step <= columns; at += step)
    product<Mul, U, NV>(x, y + at, ldy, n, rows, Accumulate<R>{c + at, ldc, factor});
  if constexpr (NV > 1)
    if (at < columns)
      accumulate_wide<Mul, U, (NV + 1) / 2>(x, y + at, ldy, n, rows, columns - at, c + at, ldc,
                                            factor);
}

}  // namespace FA_ISA
}  // namespace fa
