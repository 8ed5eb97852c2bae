// Every PTX instruction that the kernels use, one wrapper each: the only file with inline assembly.
//
// A wrapper has a body for the device, and one for tests that run the kernels on a CPU
// (FA_EMULATED: tests/gpu_emulation). A wrapper that synchronises takes a site, the name of its
// place in the kernel: the device ignores it; the emulator reports by it and can switch that one
// place off.
#pragma once
#include <stdint.h>

#define FA_DEVICE __device__ __forceinline__

#ifdef FA_EMULATED
#define FA_SHARED_MEMORY(name) unsigned char* const name = ::emu::shared_memory()
#define FA_EMULATED_OR(host, ...) host
#else
#define FA_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#define FA_EMULATED_OR(host, ...) __VA_ARGS__
#endif

namespace fa {
namespace ptx {

// The architecture that is compiled for, 90 for sm_90; 0 for a host. Only code in a kernel may use
// it.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__ / 10;
#else
constexpr int kArch = 0;
#endif

using Site = const char*;

// The formats of 16 bits. Their elements travel as uint16_t, pairs of them as uint32_t.
struct BF16 {};
struct F16 {};

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// -- arithmetic -----------------------------------------------------------------------------------

// 2^x to 2 ulp, 0 for -inf.
FA_DEVICE float exp2(float x) {
  FA_EMULATED_OR(return emu::approximate_exp2(x);,
                 float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;)
}

// log2 x, -inf for 0.
FA_DEVICE float log2(float x) {
  FA_EMULATED_OR(return emu::approximate_log2(x);,
                 float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;)
}

// 1 / x to 1 ulp, 0 for infinity.
FA_DEVICE float reciprocal(float x) {
  FA_EMULATED_OR(return emu::approximate_quotient(1.0f, x);,
                 float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;)
}

// x y, all 64 bits of it, as one instruction; both halves are used.
FA_DEVICE uint64_t product(uint32_t x, uint32_t y) {
  FA_EMULATED_OR(return static_cast<uint64_t>(x) * y;, uint64_t wide;
                 asm("mul.wide.u32 %0, %1, %2;" : "=l"(wide) : "r"(x), "r"(y)); return wide;)
}

// Two elements, rounded to nearest even; the low half is first in memory.
FA_DEVICE uint32_t pack(BF16, float low, float high) {
  FA_EMULATED_OR(return emu::narrowed(low, true) | emu::narrowed(high, true) << 16;, uint32_t d;
                 asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;)
}
FA_DEVICE uint32_t pack(F16, float low, float high) {
  FA_EMULATED_OR(return emu::narrowed(low, false) | emu::narrowed(high, false) << 16;, uint32_t d;
                 asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;)
}

FA_DEVICE float widen(BF16, uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
FA_DEVICE float widen(F16, uint16_t x) {
  FA_EMULATED_OR(return emu::widened(x, false);,
                 float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;)
}

// -- threads that wait for each other -------------------------------------------------------------

// Waits for all threads of the block: each then sees what the others wrote to shared memory before.
FA_DEVICE void block_sync(Site site) {
  FA_EMULATED_OR(emu::barrier_sync(site, 0, -1);, asm volatile("bar.sync 0;" ::: "memory");)
}

// The same for the threads of this warp.
FA_DEVICE void warp_sync(Site site) {
  FA_EMULATED_OR(emu::warp_sync(site, kWholeWarp);,
                 asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");)
}

// Barriers 1 to 15 are for `threads` of the block, whole warps of it: those that wait, and those
// that only arrive.
FA_DEVICE void barrier_sync(Site site, int id, int threads) {
  FA_EMULATED_OR(emu::barrier_sync(site, id, threads);,
                 asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");)
}
FA_DEVICE void barrier_arrive(Site site, int id, int threads) {
  FA_EMULATED_OR(emu::barrier_arrive(site, id, threads);,
                 asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");)
}

// -- blocks that wait for each other --------------------------------------------------------------

// *word += x; returns the old value. Orders nothing.
FA_DEVICE uint32_t fetch_add(uint32_t* word, uint32_t x) {
  FA_EMULATED_OR(return emu::fetch_add(word, x);, uint32_t before;
                 asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                              : "=r"(before) : "l"(word), "r"(x) : "memory"); return before;)
}

// *word = x. A thread that waits for it sees all that this thread has written and seen.
FA_DEVICE void publish(Site site, uint32_t* word, uint32_t x) {
  FA_EMULATED_OR(emu::publish(site, word, x);,
                 asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x)
                              : "memory");)
}
FA_DEVICE void wait_until(Site site, const uint32_t* word, uint32_t x) {
  FA_EMULATED_OR(emu::wait_until(site, word, x);, uint32_t now; do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  } while (now != x);)
}

// -- shared memory --------------------------------------------------------------------------------

// An address in the window of shared memory, as the instructions below take it.
FA_DEVICE uint32_t shared_address(const void* pointer) {
  FA_EMULATED_OR(return emu::shared_address(pointer);,
                 return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));)
}

// Starts a copy of 16 bytes from global to shared memory, both at multiples of 16. Where `valid` is
// false nothing is read, and zeros are written.
FA_DEVICE void copy16(uint32_t to, const void* from) {
  FA_EMULATED_OR(emu::copy16(to, from, 16);,
                 asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from)
                              : "memory");)
}
FA_DEVICE void copy16(uint32_t to, const void* from, bool valid) {
  FA_EMULATED_OR(emu::copy16(to, from, valid ? 16 : 0);,
                 asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                              "r"(valid ? 16 : 0)
                              : "memory");)
}

// This thread's copies since the last commit become a group.
FA_DEVICE void copies_commit(Site site) {
  FA_EMULATED_OR(emu::copies_commit(site);, asm volatile("cp.async.commit_group;" ::: "memory");)
}

// Waits until all but the newest `pending` groups of this thread have landed; other threads see
// them after a barrier.
template <int pending>
FA_DEVICE void copies_wait(Site site) {
  FA_EMULATED_OR(emu::copies_wait(site, pending);,
                 asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");)
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r has the address of row r of matrix i. Lane l
// gets, of each, elements 2 (l % 4) and the next of row l / 4; of column l / 4 if transposed.
FA_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  FA_EMULATED_OR(emu::load_matrices(r, 4, false, address);,
                 asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                              : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                              : "r"(address)
                              : "memory");)
}
FA_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  FA_EMULATED_OR(
      emu::load_matrices(r, 4, true, address);,
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address)
                   : "memory");)
}

// -- tensor cores ---------------------------------------------------------------------------------

// d (16 x 8, float32) += a (16 x 16) b (16 x 8). Lane 4 g + t holds of d rows g and g + 8, columns
// 2 t and 2 t + 1; of a these rows, columns 2 t and 2 t + 1, and both 8 further; of b column g,
// rows 2 t and 2 t + 1, and both 8 further.
#define FA_MULTIPLY(TYPE, NAME, IS_BF16)                                                     \
  FA_DEVICE void multiply(TYPE, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,          \
                          uint32_t b1) {                                                     \
    FA_EMULATED_OR(emu::multiply16816(d, a, b0, b1, IS_BF16);,                               \
                   asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME       \
                                ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "        \
                                "{%0, %1, %2, %3};"                                          \
                                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
                                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0),       \
                                  "r"(b1));)                                                 \
  }
FA_MULTIPLY(BF16, "bf16", true)
FA_MULTIPLY(F16, "f16", false)
#undef FA_MULTIPLY

// -- registers ------------------------------------------------------------------------------------

// blockIdx.x and threadIdx.x, read again: earlier results from them need no registers meanwhile.
FA_DEVICE unsigned block_anew() {
  FA_EMULATED_OR(return blockIdx.x;,
                 unsigned x; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x)); return x;)
}
FA_DEVICE unsigned thread_anew() {
  FA_EMULATED_OR(return threadIdx.x;,
                 unsigned x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x;)
}

// -- exchange between the lanes of a warp ---------------------------------------------------------

// The value of lane (this ^ flip).
template <class T>
FA_DEVICE T shuffle_xor(T x, int flip) {
  return __shfl_xor_sync(kWholeWarp, x, flip);
}

}  // namespace ptx
}  // namespace fa
