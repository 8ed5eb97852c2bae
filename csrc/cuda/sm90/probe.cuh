// What the kernels of probe.cu share: a report of how far one came, a wait with a limit, and copies
// between global and shared memory by ordinary loads and stores.
#pragma once
#include "ptx.cuh"
#include "tiles.h"

namespace fa {
namespace sm90 {

// What a report names, numbered as in tests/gpu_emulation/instructions90.py.
enum Step {
  kBegun = 1,
  kBytesArrive,
  kPhaseEnds,
  kCopiedOut,
  kProductsEnd,
  kExchanged,
  kTurn,
  kDone
};

struct Report {
  uint32_t* words;
  uint64_t limit;
  FA_DEVICE void begins(Step step) const {
    if (threadIdx.x == 0) words[0] = step;
  }
  FA_DEVICE void reached_limit(Step step) const {
    if (threadIdx.x == 0) words[1] = step;
  }
};

// An mbarrier and a word beside it, at the end of the memory of a probe.
struct Awaited {
  uint32_t* word;
  uint32_t at;  // of the mbarrier

  FA_DEVICE explicit Awaited(unsigned char* memory, int count) {
    at = ptx::shared_address(memory), word = reinterpret_cast<uint32_t*>(memory + 8);
    if (threadIdx.x == 0) ptx::mbarrier_init("probe: an mbarrier", at, count);
    ptx::mbarrier_init_fence();
    ptx::block_sync("probe: it is initialised");
  }
  // One thread waits for the phase and tells the others. False if it reached the limit.
  FA_DEVICE bool ends(const Report& report, Step step, uint32_t parity) const {
    report.begins(step);
    if (threadIdx.x == 0)
      *word = ptx::mbarrier_wait_for("probe: a phase", at, parity, report.limit);
    ptx::block_sync("probe: it is known whether it ended");
    const bool ended = *word;
    ptx::block_sync("probe: all know");
    if (!ended) report.reached_limit(step);
    return ended;
  }
};
constexpr int kAwaitedBytes = 16;

// Words to shared memory, where the asynchronous proxy will read or overwrite them. Rows of 128
// bytes are swizzled by 128 bytes if `swizzles`.
template <bool swizzles>
FA_DEVICE void fill(uint32_t* to, const uint32_t* from, int words) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    const int row = i / 32, chunk = i / 4 % 8;
    to[swizzles ? row * 32 + (chunk ^ row % 8) * 4 + i % 4 : i] = from[i];
  }
  ptx::async_proxy_fence("probe: words before the asynchronous proxy");
}
FA_DEVICE void copy_out(uint32_t* out, const uint32_t* from, int words) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
    out[i] = from[i];
}

}  // namespace sm90
}  // namespace fa
