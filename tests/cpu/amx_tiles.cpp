// For test_amx.py: TDPBF16PS by the header that the kernels use (the chip's, or with FA_AMX_MODEL
// the model's), and by the rules of amx_rules.h.
#include "amx_rules.h"
#include "cpu/amx/amx_enable.h"
#include "cpu/base/convert.h"
#if defined(FA_AMX_MODEL)
#include "cpu/amx/amx_model.h"
namespace tiles = fa::FA_ISA::amx;
#else
#include "cpu/amx/amx.h"
namespace tiles = fa::amx;
#endif

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

// c[i] += a[i] b[i], of n tiles each, with this MXCSR; returns the MXCSR found afterwards.
uint32_t multiply(const uint32_t* a, const uint32_t* b, uint32_t* c, int64_t n, uint32_t mxcsr,
                  int by_plain_reading) {
  using namespace fa::FA_ISA;
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(mxcsr);
  if (by_plain_reading) {
    for (int64_t i = 0; i < 256 * n; i += 256) plain::multiply(a + i, b + i, c + i);
  } else {
    const tiles::Tiles registers;
    for (int64_t i = 0; i < 256 * n; i += 256) fa::FA_ISA::multiply(a + i, b + i, c + i);
  }
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  return after;
}

// Which of these run without SIGILL, a bit each: nothing at all; a tile instruction before any use
// of tiles, one in a use, one after another use in that use, one after all; and a product on this
// chip.
int legal() {
  using namespace fa::FA_ISA;
  const auto clear = [] { tiles::zero<0>(); };
  int found = fa::survives([] {}) | fa::survives(clear) << 1;
  {
    const tiles::Tiles outer;
    found |= fa::survives(clear) << 2;
    { const tiles::Tiles inner; }
    found |= fa::survives(clear) << 3;
  }
  return found | fa::survives(clear) << 4 | fa::survives(fa::multiply_on_tiles) << 5;
}

const char* refused() { return fa::tiles_refused().c_str(); }

// Is the process's own handler restored?
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
