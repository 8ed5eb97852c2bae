// The tile instructions of AMX, one function each: eight tiles of 16 rows of 64 bytes, which are 16
// floats or 32 bfloat16. Inline assembly keeps memory accesses in order: GCC 12 may move an
// ordinary store past its own _tile_loadd. amx_model.h is the same in software.
#pragma once
#include <cstdint>

namespace fa {
namespace amx {

#define FA_TILE inline __attribute__((always_inline))

struct Configuration {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64, "as LDTILECFG reads it");

FA_TILE void configure(const Configuration& c) {
  __asm__ volatile("ldtilecfg %0" ::"m"(c) : "memory");
}
FA_TILE void release() { __asm__ volatile("tilerelease" ::: "memory"); }
FA_TILE Configuration whole_tiles() {
  Configuration c;
  c.palette = 1;
  for (int t = 0; t < 8; ++t) c.row_bytes[t] = 64, c.rows[t] = 16;
  return c;
}

// A task's use of the tiles, which are per-thread state: eight whole tiles while this object lives.
// Then the earlier configuration (none, or that of torch's kernels) is restored, without contents.
class Tiles {
 public:
  FA_TILE Tiles() {
    __asm__ volatile("sttilecfg %0" : "=m"(found_)::"memory");
    configure(whole_tiles());
  }
  FA_TILE ~Tiles() {
    if (found_.palette)
      configure(found_);
    else
      release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  Configuration found_;
};

template <int T>
FA_TILE void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
// Rows are `stride` bytes apart.
template <int T>
FA_TILE void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
FA_TILE void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// C[m][n] += sum_k A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1]; A and B bfloat16, C floats.
template <int C, int A, int B>
FA_TILE void dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace amx
}  // namespace fa
