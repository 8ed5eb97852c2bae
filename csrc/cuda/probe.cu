// A kernel for tests that runs single instructions of ptx.cuh. A GPU and the emulator must give the
// same outputs for the same inputs, and these must be what the PTX ISA says.
#include "launch.h"
#include "ptx.cuh"

namespace fa {

// Numbered as in tests/gpu_emulation/probe.py.
enum Probe {
  kLoad,
  kLoadTransposed,
  kMultiplyBF16,
  kMultiplyF16,
  kCopy,
  kExp2,
  kLog2,
  kPackBF16,
  kPackF16,
  kWidenBF16,
  kWidenF16,
  kShuffle,
  kReciprocal,
  kProductLow,
  kProductHigh,
  kFetchAdd,
};

FA_DEVICE void multiply(int what, uint32_t (&r)[4], const uint32_t* a, const uint32_t* b,
                        const float* d) {
  const uint32_t left[4] = {a[0], a[1], a[2], a[3]};
  float sum[4] = {d[0], d[1], d[2], d[3]};
  if (what == kMultiplyBF16) ptx::multiply(ptx::BF16(), sum, left, b[0], b[1]);
  if (what == kMultiplyF16) ptx::multiply(ptx::F16(), sum, left, b[0], b[1]);
  for (int i = 0; i < 4; ++i) r[i] = __float_as_uint(sum[i]);
}

// Probes that take one value, or two, and give a word. Each element is packed with its neighbour,
// once as the low half and once as the high one.
FA_DEVICE uint32_t of_element(int what, uint32_t a, float x, float neighbour, uint32_t flip,
                              uint32_t* out) {
  const auto half = static_cast<uint16_t>(a);
  switch (what) {
    case kExp2:
      return __float_as_uint(ptx::exp2(x));
    case kLog2:
      return __float_as_uint(ptx::log2(x));
    case kPackBF16:
      return ptx::pack(ptx::BF16(), x, neighbour);
    case kPackF16:
      return ptx::pack(ptx::F16(), x, neighbour);
    case kWidenBF16:
      return __float_as_uint(ptx::widen(ptx::BF16(), half));
    case kWidenF16:
      return __float_as_uint(ptx::widen(ptx::F16(), half));
    case kShuffle:
      return __float_as_uint(ptx::shuffle_xor(x, static_cast<int>(flip)));
    case kReciprocal:
      return __float_as_uint(ptx::reciprocal(x));
    case kProductLow:
      return static_cast<uint32_t>(ptx::product(a, flip));
    case kProductHigh:
      return static_cast<uint32_t>(ptx::product(a, flip) >> 32);
    case kFetchAdd: {  // the sum, if the first call found the old value and the second call the sum
      uint32_t* const word = out;
      *word = flip;
      const uint32_t before = ptx::fetch_add(word, a), after = ptx::fetch_add(word, a);
      return before == flip ? after : ~after;
    }
  }
  return 0;
}

// One warp. words: 1024 of 32 bits, put in shared memory first (for kCopy, copied there by 16
// bytes from the row that each lane's address names, the odd lanes' invalid). address: of each
// lane, in bytes; a: 4 words of each lane (kWiden*: their low halves); b: 2 (kShuffle: the first is
// the flip, kProduct*: a factor, kFetchAdd: what is added to); d: 4; out: 4 words of each lane.
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
  a += 4 * lane, b += 2 * lane, d += 4 * lane;
  if (what == kMultiplyBF16 || what == kMultiplyF16) multiply(what, r, a, b, d);
  if (what >= kExp2)
    for (int i = 0; i < 4; ++i)
      r[i] = of_element(what, a[i], d[i], d[i ^ 1], b[0], out + 4 * lane + i);
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = r[i];
}

}  // namespace fa

extern "C" FA_EXPORT int fa_cuda_probe(int what, const uint32_t* words, const uint32_t* address,
                                       const uint32_t* a, const uint32_t* b, const float* d,
                                       uint32_t* out, void* stream) {
  return fa::launch("probe_kernel", fa::probe_kernel, dim3(1), dim3(32), 4096, stream, what, words,
                    address, a, b, d, out);
}
