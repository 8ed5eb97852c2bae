// For test_amx.py: TDPBF16PS by the header that the kernels use (the chip's, or with FA_AMX_MODEL
// the model's), and by a plain reading of its rules, an operation at a time.
#include <cmath>

#include "cpu/amx_permission.h"
#include "cpu/convert.h"
#if defined(FA_AMX_MODEL)
#include "cpu/amx_model.h"
#endif

namespace plain {

using fa::FA_ISA::bits;
using fa::FA_ISA::number;

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float quieted(float x) { return number(bits(x) | 0x00400000); }
float made(float x) { return std::isnan(x) ? number(0xffc00000) : x; }

// a b + c, rounded once. What would be below 2^-126 with 24 bits and any exponent is tiny, also where
// rounding to a subnormal number gives 2^-126; double is exact there.
float multiply_add(float a, float b, float c) {
  for (float x : {a, b, c})
    if (std::isnan(x)) return quieted(x);
  a = flushed(a), b = flushed(b), c = flushed(c);
  const float r = made(std::fma(a, b, c));
  const double exact = std::fma(double(a), double(b), double(c));
  const bool tiny = std::fabs(r) == 0x1p-126f && std::fabs(exact) < 0x1p-126 * (1 - 0x1p-25);
  return tiny ? std::copysign(0.0f, r) : flushed(r);
}
float add(float x, float y) {
  for (float z : {x, y})
    if (std::isnan(z)) return quieted(z);
  return flushed(made(flushed(x) + flushed(y)));
}
void multiply(const uint32_t* a, const uint32_t* b, uint32_t* c) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t x = a[16 * m + k], y = b[16 * k + n];
        even = multiply_add(number(x << 16), number(y << 16), even);
        odd = multiply_add(number(x & 0xffff0000), number(y & 0xffff0000), odd);
      }
      uint32_t& sum = c[16 * m + n];
      sum = bits(add(number(sum), add(even, odd)));
    }
}

}  // namespace plain

namespace fa {
namespace FA_ISA {

void multiply(const uint32_t* a, const uint32_t* b, uint32_t* c) {
  amx::load<0>(c, 64);
  amx::load<3>(a, 64);
  amx::load<5>(b, 64);
  amx::dot<0, 3, 5>();
  amx::store<0>(c, 64);
}

}  // namespace FA_ISA
}  // namespace fa

extern "C" {

// c[i] += a[i] b[i], of n tiles each, with this MXCSR; the MXCSR found afterwards.
uint32_t multiply(const uint32_t* a, const uint32_t* b, uint32_t* c, int64_t n, uint32_t mxcsr,
                  int by_plain_reading) {
  using namespace fa::FA_ISA;
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(mxcsr);
  if (by_plain_reading) {
    for (int64_t i = 0; i < 256 * n; i += 256) plain::multiply(a + i, b + i, c + i);
  } else {
    const amx::Tiles registers;
    for (int64_t i = 0; i < 256 * n; i += 256) fa::FA_ISA::multiply(a + i, b + i, c + i);
  }
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  return after;
}

// Which of these survive: nothing at all, a tile before anyone asked for tiles, one inside, one after
// a use inside that use, one after all; and a product on this chip. A bit each.
int legal() {
  using namespace fa::FA_ISA;
  const auto clear = [] { amx::zero<0>(); };
  int found = fa::survives([] {}) | fa::survives(clear) << 1;
  {
    const amx::Tiles outer;
    found |= fa::survives(clear) << 2;
    { const amx::Tiles inner; }
    found |= fa::survives(clear) << 3;
  }
  return found | fa::survives(clear) << 4 | fa::survives(fa::multiply_on_tiles) << 5;
}

const char* refused() { return fa::tiles_refused().c_str(); }

// Does a handler of the process's own come back?
int handler_comes_back() {
  struct sigaction mine = {}, found;
  mine.sa_handler = [](int) {};
  sigaction(SIGILL, &mine, nullptr);
  legal();
  sigaction(SIGILL, nullptr, &found);
  signal(SIGILL, SIG_DFL);
  return found.sa_handler == mine.sa_handler;
}

}  // extern "C"
