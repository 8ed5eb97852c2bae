// The one matrix product of the AMX kernels. Its operands are bfloat16, or numbers of more bits as
// planes of bfloat16 that add up to them exactly: two for float16, three for float32. Some products
// of planes are omitted: of three planes six count, the others are below the last bit of the sum.
// Sizes are padded with zeros to steps of 32: numbers along k, and rows and columns of C (16 lanes,
// or 16 rows, where there are no more).
#pragma once
#include "../base/operand_packing.h"
#if defined(FA_AMX_MODEL)
#include "amx_model.h"
#else
#include "amx.h"
#endif

namespace fa {
namespace FA_ISA {

// The planes of a number. Operands interleave them per 32 numbers (A) or per row of pairs (B):
// first the first planes of all of these, then the second ones.
template <int P>
struct Planes {
  uint16_t of[P];
};
template <int P>
struct Amx {
  using Real = float;
  using Element = Planes<P>;
  using Registers = amx::Tiles;
  static constexpr int pair = 1, planes = P;
};
template <int P>
struct Sizes<Amx<P>> {
  static constexpr int64_t rows = 128, part = 32, first_key = 32, padding = 32, staged = 32;
};
constexpr int64_t kStep = 32;

// A of a product: [rows][steps][P][32], or [steps][rows][P][32]. Rows are `row` numbers apart,
// steps `step`.
template <int P>
struct TileRows {
  const Planes<P>* data;
  int64_t row, step;
  FA_INLINE const void* tile(int64_t r, int plane) const {
    return reinterpret_cast<const uint16_t*>(data + r * row) + 32 * plane;
  }
  FA_INLINE int64_t stride() const { return row * sizeof(Planes<P>); }  // in bytes
};
// B of a product: [steps][16 pairs][P][ld].
template <int P>
struct TilePairs {
  const uint32_t* data;
  int64_t ld;
  TilePairs(const Planes<P>* b, int64_t ld) : data(reinterpret_cast<const uint32_t*>(b)), ld(ld) {}
  FA_INLINE const void* tile(int64_t column, int plane) const { return data + plane * ld + column; }
  FA_INLINE int64_t stride() const { return ld * P * sizeof(uint32_t); }
  FA_INLINE TilePairs from(int64_t step, int64_t column) const {
    TilePairs there = *this;
    there.data += step * 16 * P * ld + column;
    return there;
  }
};

// The planes of A and B that one pass along k multiplies; from pair to pair one operand changes.
struct Largest {
  static constexpr int count = 1, a[] = {0}, b[] = {0};
};
// All that count in a sum: nothing below 2^-16 does where the sum becomes a float16.
template <int P>
struct OfSums : Largest {};
template <>
struct OfSums<2> {
  static constexpr int count = 3, a[] = {1, 0, 0}, b[] = {0, 0, 1};
};
template <>
struct OfSums<3> {
  static constexpr int count = 6, a[] = {2, 1, 1, 0, 0, 0}, b[] = {0, 0, 1, 1, 2, 0};
};
// For scores, all but the largest. These are summed first and are so small that their roundings do
// not show, which leaves one rounding per step. An LSE is a float32 whatever q and k are.
template <int P>
struct Smaller;
template <>
struct Smaller<2> {
  static constexpr int count = 3, a[] = {1, 1, 0}, b[] = {0, 1, 1};
};
template <>
struct Smaller<3> {
  static constexpr int count = 5, a[] = {2, 1, 1, 0, 0}, b[] = {0, 0, 1, 1, 2};
};

// Vector work during a product on tiles: the product calls `some` repeatedly, and `due` before its
// last step along k, which may read the result of the work.
struct Nothing {
  FA_INLINE void some() {}
  FA_INLINE void due() {}
};
template <class Work>
struct Meanwhile {
  Work& work;
  FA_INLINE void some() { work.some(); }
  FA_INLINE void due() {}
};
template <class Work>
struct DueForLastStep {
  Work& work;
  FA_INLINE void some() { work.some(); }
  FA_INLINE void due() { work.rest(); }
};

// One step of a block of R x C tiles of C. C is in tiles 0 to 3, A in 4 and 5, B in 6 and 7.
template <class Of, int P, int R, int C, class Beside, int... I>
FA_INLINE void tile_step(const TileRows<P>& a, const TilePairs<P>& b, Beside& beside,
                         std::integer_sequence<int, I...>) {
  const auto one = [&](auto at) {
    constexpr int x = decltype(at)::value / (R * C), r = decltype(at)::value / C % R;
    constexpr int c = decltype(at)::value % C, before = x > 0 ? x - 1 : 0;
    constexpr bool new_a = x == 0 || Of::a[x] != Of::a[before];
    constexpr bool new_b = x == 0 || Of::b[x] != Of::b[before];
    if constexpr (c == 0 && new_a) amx::load<4 + r>(a.tile(16 * r, Of::a[x]), a.stride());
    if constexpr (r == 0 && new_b) amx::load<6 + c>(b.tile(16 * c, Of::b[x]), b.stride());
    amx::dot<r * C + c, 4 + r, 6 + c>();
    if constexpr (r == 0 && c == C - 1) beside.some();
  };
  (one(std::integral_constant<int, I>{}), ...);
}
// The sums start at 0 and overwrite C, continue from C, or start at 0 and are added to C: two
// levels of summation err less than one (for bfloat16 the difference does not show).
enum class Sums { overwrite, go_on, add };

template <Sums To, class... Of, int P, int R, int C, class Beside, int... I>
FA_INLINE void tile_block(const TileRows<P>& a, const TilePairs<P>& b, int64_t steps, float* c,
                          int64_t ldc, Beside& beside, std::integral_constant<int, R>,
                          std::integral_constant<int, C>, std::integer_sequence<int, I...>) {
  if constexpr (To == Sums::go_on)
    (amx::load<I>(c + I / C * 16 * ldc + I % C * 16, 4 * ldc), ...);
  else
    (amx::zero<I>(), ...);
  const auto along_k = [&](auto of) {
    using One = decltype(of);
    constexpr auto all = std::make_integer_sequence<int, One::count * R * C>{};
    for (int64_t x = 0; x < steps; ++x) {
      if (x == steps - 1) beside.due();
      tile_step<One, P, R, C>({a.data + x * a.step, a.row, a.step}, b.from(x, 0), beside, all);
    }
  };
  (along_k(Of{}), ...);
  if constexpr (To == Sums::add) {
    alignas(64) float sum[R * C][256];
    (amx::store<I>(sum[I], 64), ...);
    for (int t = 0; t < R * C; ++t)
      for (int r = 0; r < 16; ++r) {
        float* at = c + (t / C * 16 + r) * ldc + t % C * 16;
        store(at, load(at) + load(sum[t] + 16 * r));
      }
  } else {
    (amx::store<I>(c + I / C * 16 * ldc + I % C * 16, 4 * ldc), ...);
  }
}

// C (+)= A B, of `steps` steps. `rows` and `columns` are multiples of 32, or 16.
template <Sums To, class... Of, int P, class Beside = Nothing>
void tile_product(const TileRows<P>& a, const TilePairs<P>& b, int64_t steps, int64_t rows,
                  int64_t columns, float* c, int64_t ldc, Beside beside = {}) {
  const auto blocks = [&](auto r, auto n) {
    constexpr int R = decltype(r)::value, C = decltype(n)::value;
    for (int64_t i = 0; i < rows; i += 16 * R)
      for (int64_t j = 0; j < columns; j += 16 * C)
        tile_block<To, Of...>(TileRows<P>{a.data + i * a.row, a.row, a.step}, b.from(0, j), steps,
                              c + i * ldc + j, ldc, beside, r, n,
                              std::make_integer_sequence<int, R * C>{});
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (rows == 16 && columns == 16)
    blocks(One{}, One{});
  else if (rows == 16)
    blocks(One{}, Two{});
  else if (columns == 16)
    blocks(Two{}, One{});
  else
    blocks(Two{}, Two{});
}

// C = A B of 32 columns and at most two steps, of bfloat16: B stays in four tiles, and a tile of C
// is stored while the next is made. Half the loads of a block's.
template <int Steps>
void resident_product(const TileRows<1>& a, const TilePairs<1>& b, int64_t rows, float* c) {
  amx::load<4>(b.tile(0, 0), b.stride());
  amx::load<5>(b.tile(16, 0), b.stride());
  if constexpr (Steps == 2) {
    amx::load<6>(b.from(1, 0).tile(0, 0), b.stride());
    amx::load<7>(b.from(1, 0).tile(16, 0), b.stride());
  }
  for (int64_t i = 0; i < rows; i += 16, c += 16 * 32) {
    amx::load<2>(a.tile(i, 0), a.stride());
    amx::zero<0>();
    amx::dot<0, 2, 4>();
    if constexpr (Steps == 2) {
      amx::load<3>(a.data + i * a.row + a.step, a.stride());
      amx::dot<0, 3, 6>();
    }
    if (i > 0) amx::store<1>(c - 16 * 32 + 16, 4 * 32);
    amx::zero<1>();
    amx::dot<1, 2, 5>();
    if constexpr (Steps == 2) amx::dot<1, 3, 7>();
    amx::store<0>(c, 4 * 32);
  }
  if (rows > 0) amx::store<1>(c - 16 * 32 + 16, 4 * 32);
}

// S[r][lane] = the dot product of row r of X, read in place, with lane's column of Y. Both have
// whole steps, and S and X whole 32s of rows.
template <int NV, int P, class Beside = Nothing>
void tile_products(Broadcast<Planes<P>> x, const Planes<P>* y, int64_t columns, int64_t rows,
                   float* s, Beside beside = {}) {
  constexpr int64_t lanes = NV * kLanes<float>;
  const int64_t steps = round_up(columns, kStep) / kStep, whole = round_up(rows, kStep);
  const TileRows<P> a{x.data, x.stride, kStep};
  const TilePairs<P> b{y, lanes};
  if constexpr (P == 1 && NV == 2) {
    if (steps == 2) return resident_product<2>(a, b, whole, s);
    if (steps == 1) return resident_product<1>(a, b, whole, s);
  }
  if constexpr (P == 1) {
    tile_product<Sums::overwrite, Largest>(a, b, steps, whole, lanes, s, lanes, beside);
  } else {
    constexpr int64_t longest = 8;  // steps of one sum, as in product.h
    tile_product<Sums::overwrite, Smaller<P>, Largest>(a, b, std::min(steps, longest), whole, lanes,
                                                       s, lanes, beside);
    for (int64_t x = longest; x < steps; x += longest)
      tile_product<Sums::add, Smaller<P>, Largest>(TileRows<P>{a.data + x * a.step, a.row, a.step},
                                                   b.from(x, 0), std::min(steps - x, longest),
                                                   whole, lanes, s, lanes, beside);
  }
}
template <int P, int NV>
struct DotProducts<Amx<P>, NV> {
  static void run(Broadcast<Planes<P>> x, const Planes<P>* y, int64_t columns, int64_t rows,
                  float factor, float* s) {
    tile_products<NV>(x, y, columns, rows, s);
    if (factor == 1) return;
    for (int64_t at = 0; at < rows * NV * 16; at += 16) store(s + at, load(s + at) * factor);
  }
};

}  // namespace FA_ISA
}  // namespace fa
