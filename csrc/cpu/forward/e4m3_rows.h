// A few query rows against keys and values in float8_e4m3fn, read from tables: few_rows.h for
// StoredE4m3. An instruction of VBMI looks up 64 bytes in a table of 128. Two tables have the upper
// and the lower bytes of each pattern's number in bfloat16, divided by kWidened, or of NaN; the sign
// is added. So four vectors of 64 columns need no conversion, and no search for NaN. q and out have
// the order of these vectors' lanes, `each_place`. Columns are multiples of 64.
#pragma once
#include "few_rows.h"

namespace fa {
namespace FA_ISA {

#if defined(__AVX512F__)
// A byte of each number without sign: that of its bfloat16 from bit `shift` on.
struct E4m3Bytes {
  alignas(64) uint8_t of[128];
  constexpr explicit E4m3Bytes(int shift) : of() {
    for (int x = 0; x < 128; ++x) of[x] = uint8_t(bf16(x) >> shift);
  }
  static constexpr uint32_t bf16(uint32_t x) {
    if (x == 0x7F) return 0x7FC0;  // NaN
    if (x == 0) return 0;
    uint32_t exponent = x >> 3, fraction = x & 7;
    if (exponent == 0)  // subnormal here, but not there
      for (exponent = 1; fraction < 8; --exponent) fraction *= 2;
    return ((exponent + 127 - 7 - 8) << 7) + (fraction % 8 << 4);  // 2^8: kWidened
  }
};

struct E4m3Table {
  static constexpr int W = kLanes<float>, kVectors = 4, kColumns = kVectors * W;
  // kColumns columns.
  static FA_INLINE void numbers(const StoredE4m3* row, Vec<float> (&to)[kVectors]) {
    static constexpr E4m3Bytes low(0), high(8);
    const __m512i bytes = _mm512_loadu_si512(row), sign = _mm512_set1_epi8(char(0x80));
    const __m512i first = look_up(bytes, low);
    // (x & sign) | y
    const __m512i second = _mm512_ternarylogic_epi32(bytes, sign, look_up(bytes, high), 0xEA);
    const Words a = (Words)_mm512_unpacklo_epi8(first, second);
    const Words b = (Words)_mm512_unpackhi_epi8(first, second);
    to[0] = (Vec<float>)(a << 16), to[1] = (Vec<float>)(a & 0xFFFF0000u);
    to[2] = (Vec<float>)(b << 16), to[3] = (Vec<float>)(b & 0xFFFF0000u);
  }
  // (The instruction ignores the uppermost bit. It is written out: the compiler must not use VBMI
  // elsewhere.)
  static FA_INLINE __m512i look_up(__m512i at, const E4m3Bytes& table) {
    const __m512i first = _mm512_load_si512(table.of), second = _mm512_load_si512(table.of + 64);
    __asm__("vpermi2b %2, %1, %0" : "+v"(at) : "v"(first), "v"(second));
    return at;
  }
  // Calls f(place in rows of these lanes, its column).
  template <class F>
  static FA_INLINE void each_place(int64_t columns, F f) {
    for (int64_t c = 0; c < columns; c += kColumns)
      for (int vector = 0; vector < kVectors; ++vector)
        for (int l = 0; l < W; ++l)
          f(c + vector * W + l, c + l / 4 * 16 + vector / 2 * 8 + l % 4 * 2 + vector % 2);
  }
};

struct E4m3Rows : FewRows<Plain<float> > {
  using Table = E4m3Table;
  static void stage(const Plane& a, int64_t i0, int64_t rows, int64_t columns, float* q) {
    float row[FA_CPU_MAX_HEAD_DIM];
    for (int64_t i = 0; i < rows; ++i, q += columns) {
      a.read(i0 + i, 1, 0, columns, row, columns);
      Table::each_place(columns, [&](int64_t at, int64_t c) { q[at] = row[c]; });
    }
  }
  // As FewRows::products.
  static void products(Broadcast<StoredE4m3> k, int64_t keys, int64_t columns, const float* q,
                       int64_t rows, float factor, float* s, Later later = {}) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4, later = {})
      products_of<4>(k, keys, columns, q + r * columns, factor, s + r * kTileKeys, later);
    for (; r < rows; ++r, later = {})
      products_of<1>(k, keys, columns, q + r * columns, factor, s + r * kTileKeys, later);
  }
  template <int ROWS>
  static void products_of(Broadcast<StoredE4m3> k, int64_t keys, int64_t columns, const float* q,
                          float factor, float* s, const Later& later) {
    constexpr int KEYS = kKeys / ROWS;
    for (int64_t j = 0; j < keys; j += KEYS) {
      Vec<float> sum[kKeys] = {};
      for (int64_t c = 0; c < columns; c += Table::kColumns)
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
          Vec<float> x[Table::kVectors];
          Table::numbers(k.data + std::min(j + i, keys - 1) * k.stride + c, x);
          later.ask(j + i, c);
#pragma GCC unroll 4
          for (int v = 0; v < Table::kVectors; ++v)
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
              sum[r * KEYS + i] += x[v] * load(q + r * columns + c + v * W);
        }
      const Vec<float> sums = sum_lanes<float>(sum) * factor;
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(s + r * kTileKeys + j, reinterpret_cast<const float*>(&sums) + r * KEYS,
                    KEYS * sizeof(float));
    }
  }
};

// out is in the order of E4m3Table.
struct E4m3WeightedSum : WeightedSum<Plain<float> > {
  using Table = E4m3Table;
  static void add(const float* p, int64_t j, Broadcast<StoredE4m3> v, int64_t keys, int64_t count,
                  int64_t Dv, float* out, Later later = {}) {
    p += j;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4, later = {})
      add_rows<4>(p + r * kTileKeys, v, keys, Dv, out + r * Dv, later);
    for (; r < count; ++r, later = {})
      add_rows<1>(p + r * kTileKeys, v, keys, Dv, out + r * Dv, later);
  }
  template <int ROWS>
  static void add_rows(const float* p, Broadcast<StoredE4m3> v, int64_t keys, int64_t Dv,
                       float* out, const Later& later) {
    constexpr int W = kLanes<float>;
    for (int64_t c = 0; c < Dv; c += Table::kColumns) {
      Vec<float> acc[ROWS][Table::kVectors] = {};
      for (int64_t j = 0; j < keys; ++j) {
        Vec<float> x[Table::kVectors];
        Table::numbers(v.data + j * v.stride + c, x);
        later.ask(j, c);
#pragma GCC unroll 4
        for (int g = 0; g < Table::kVectors; ++g)
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) acc[r][g] += p[r * kTileKeys + j] * x[g];
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int g = 0; g < Table::kVectors; ++g) {
          float* at = out + r * Dv + c + g * W;
          store(at, Vec<float>(load(at) + acc[r][g]));
        }
    }
  }
  static void natural(const float* out, int64_t Dv, float* to) {
    Table::each_place(Dv, [&](int64_t at, int64_t c) { to[c] = out[at]; });
  }
};

template <class Mul>
struct ProductsOf<Mul, StoredE4m3> {
  using Few = E4m3Rows;
  using Sum = E4m3WeightedSum;
};
#endif

}  // namespace FA_ISA
}  // namespace fa
