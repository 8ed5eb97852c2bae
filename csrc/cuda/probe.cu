// Single instructions of ptx.cuh, one kernel for all: a GPU and the emulator must give the same
// outputs for the same inputs, and what either gives must be what the PTX ISA says.
#include "launch.h"
#include "ptx.cuh"

namespace fa {

enum Probe { kLoad = 0, kLoadTransposed = 1, kMultiplyBF16 = 2, kMultiplyF16 = 3, kCopy = 4 };

// One warp. words: 1024 of 32 bits, put in shared memory first (for kCopy, copied there by 16
// bytes from the row that each lane's address names, the odd lanes' invalid). address: of each lane,
// in bytes; a: 4 words of each lane; b: 2; d: 4 in and out; out: 4 words of each lane.
__global__ void probe_kernel(int what, const uint32_t* words, const uint32_t* address,
                             const uint32_t* a, const uint32_t* b, const float* d, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::shared_address(memory);
  uint32_t r[4] = {0, 0, 0, 0};
  if (what == kCopy) {
    ptx::copy16(base + 16 * lane, words + address[lane] / 4, lane % 2 == 0);
    ptx::copies_commit("probe: one copy a lane");
    ptx::copies_wait<0>("probe: it has landed");
    for (int i = 0; i < 4; ++i) r[i] = shared[4 * lane + i];
  } else {
    for (int i = lane; i < 1024; i += 32) shared[i] = words[i];
    ptx::block_sync("probe: words are there");
  }
  if (what == kLoad) ptx::load_matrices(r, base + address[lane]);
  if (what == kLoadTransposed) ptx::load_matrices_transposed(r, base + address[lane]);
  if (what == kMultiplyBF16 || what == kMultiplyF16) {
    uint32_t left[4];
    float sum[4];
    for (int i = 0; i < 4; ++i) left[i] = a[4 * lane + i];
    for (int i = 0; i < 4; ++i) sum[i] = d[4 * lane + i];
    if (what == kMultiplyBF16)
      ptx::multiply(ptx::BF16(), sum, left, b[2 * lane], b[2 * lane + 1]);
    else
      ptx::multiply(ptx::F16(), sum, left, b[2 * lane], b[2 * lane + 1]);
    for (int i = 0; i < 4; ++i) r[i] = __float_as_uint(sum[i]);
  }
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = r[i];
}

}  // namespace fa

extern "C" int fa_cuda_probe(int what, const uint32_t* words, const uint32_t* address,
                             const uint32_t* a, const uint32_t* b, const float* d, uint32_t* out,
                             void* stream) {
  return fa::launch(fa::probe_kernel, dim3(1), dim3(32), 4096, stream, what, words, address, a, b,
                    d, out);
}
