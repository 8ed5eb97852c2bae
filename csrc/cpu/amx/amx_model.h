// The functions of amx.h in software, exact to the last bit, for machines without AMX. TDPBF16PS,
// as measured on the chip (of 8,192,000 results none differed): an element of C has two chains from
// +0, one of the even and one of the odd numbers of each pair, along k; each step is a multiply-add
// rounded once to nearest even. Then even + odd is rounded, and C + that sum is rounded. Subnormal
// inputs and results become zeros of their sign; a result is judged after rounding, as vector
// instructions do under MXCSR's flush modes. A NaN is returned quieted: A's before B's before the
// sum's, in additions C's before even's before odd's; a new NaN is 0xffc00000.
#pragma once
#include "../base/convert.h"

namespace fa {
namespace FA_ISA {
namespace amx {

struct Machine {
  alignas(64) uint32_t tile[8][16][16];
  bool configured = false;
};
inline thread_local Machine machine;

// An instruction on tiles that are not configured is illegal.
FA_INLINE uint32_t (*tile(int t))[16] {
  if (!machine.configured) __builtin_trap();
  return machine.tile[t];
}

class Tiles {
 public:
  Tiles() : found_(machine.configured) {
    machine.configured = true;
    std::memset(machine.tile, 0, sizeof machine.tile);
  }
  ~Tiles() { machine.configured = found_; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  bool found_;
};

template <int T>
void zero() {
  std::memset(tile(T), 0, 1024);
}
template <int T>
void load(const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    std::memcpy(tile(T)[r], static_cast<const char*>(from) + r * stride, 64);
}
template <int T>
void store(void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tile(T)[r], 64);
}

// Rounds to nearest, flushes subnormal numbers in and out, masks traps; then restores MXCSR.
class Flushing {
 public:
  Flushing() {
    __asm__ volatile("stmxcsr %0" : "=m"(found_)::"memory");
    const uint32_t mine = 0x9fc0;
    __asm__ volatile("ldmxcsr %0" ::"m"(mine) : "memory");
  }
  ~Flushing() { __asm__ volatile("ldmxcsr %0" ::"m"(found_) : "memory"); }

 private:
  uint32_t found_;
};

inline bool is_nan(uint32_t x) { return (x & 0x7fffffff) > 0x7f800000; }
inline uint32_t quiet(uint32_t x) { return x | 0x00400000; }
constexpr uint32_t kMadeNan = 0xffc00000;

inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t sum) {
  if (is_nan(a)) return quiet(a);
  if (is_nan(b)) return quiet(b);
  if (is_nan(sum)) return quiet(sum);
  const uint32_t r = bits(__builtin_fmaf(number(a), number(b), number(sum)));
  return is_nan(r) ? kMadeNan : r;
}
inline uint32_t add(uint32_t x, uint32_t y) {
  if (is_nan(x)) return quiet(x);
  if (is_nan(y)) return quiet(y);
  const uint32_t r = bits(number(x) + number(y));
  return is_nan(r) ? kMadeNan : r;
}
inline uint32_t first_of(uint32_t pair) { return pair << 16; }
inline uint32_t second_of(uint32_t pair) { return pair & 0xffff0000; }

// One element, with the NaN bits that vector instructions do not give.
inline uint32_t element(const uint32_t* a, const uint32_t (*b)[16], int n, uint32_t c) {
  uint32_t even = 0, odd = 0;
  for (int k = 0; k < 16; ++k) {
    even = multiply_add(first_of(a[k]), first_of(b[k][n]), even);
    odd = multiply_add(second_of(a[k]), second_of(b[k][n]), odd);
  }
  return add(c, add(even, odd));
}

template <int C, int A, int B>
void dot() {
  static_assert(C != A && C != B && A != B, "an illegal instruction");
  uint32_t (*c)[16] = tile(C);
  const uint32_t (*a)[16] = tile(A), (*b)[16] = tile(B);
  const Flushing flushing;
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  for (int m = 0; m < 16; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < 16; ++k) {
      const __m512i x = _mm512_set1_epi32(int(a[m][k])), y = _mm512_load_si512(b[k]);
      even =
          _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), even);
      odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(y, high),
                            odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(c[m]), _mm512_add_ps(even, odd));
    const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    uint32_t sums[16];
    _mm512_storeu_ps(sums, sum);
    for (int n = 0; n < 16; ++n)
      if (nan >> n & 1) sums[n] = element(a[m], b, n, c[m][n]);
    std::memcpy(c[m], sums, 64);
  }
}

}  // namespace amx
}  // namespace FA_ISA
}  // namespace fa
