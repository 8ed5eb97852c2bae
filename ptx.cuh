// Every PTX instruction that the kernels use, a wrapper each: the only file with inline assembly.
//
// A wrapper has a body for the device, and one for a host where tests run the kernels on a CPU
// (FA_EMULATED: tests/emu). What synchronises takes a site, a name of that place in the kernel: the
// device ignores it; the emulator reports by it and can switch that one place off.
#pragma once
#include <stdint.h>

#define FA_DEVICE __device__ __forceinline__

#ifdef FA_EMULATED
#define FA_SHARED_MEMORY(name) unsigned char* const name = ::emu::place->shared
#define FA_BODY(device, host) host
#else
#define FA_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#define FA_BODY(device, host) device
#endif

namespace fa {
namespace ptx {

using Site = const char*;

// The formats of 16 bits; their elements travel as uint16_t, pairs of them as uint32_t.
struct BF16 {};
struct F16 {};

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// -- arithmetic ------------------------------------------------------------------------------------

// 2^x, to 2 ulp; 0 for -inf.
FA_DEVICE float exp2(float x) {
  FA_BODY(float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
          , return ::exp2f(x);)
}

// log2 x; -inf for 0.
FA_DEVICE float log2(float x) {
  FA_BODY(float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
          , return ::log2f(x);)
}

// Rounded to the nearest, ties to even.
FA_DEVICE uint32_t pack(BF16, float low, float high) {
  FA_BODY(uint32_t d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
          return d;
          , return emu::pack(low, high, true);)
}
FA_DEVICE uint32_t pack(F16, float low, float high) {
  FA_BODY(uint32_t d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
          return d;
          , return emu::pack(low, high, false);)
}

FA_DEVICE float widen(BF16, uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
FA_DEVICE float widen(F16, uint16_t x) {
  FA_BODY(float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;
          , return emu::widen(x, false);)
}

// -- shared memory ---------------------------------------------------------------------------------

// Its address in the window of shared memory, as the instructions below take it.
FA_DEVICE uint32_t shared_address(const void* pointer) {
  FA_BODY(return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
          , return emu::shared_address(pointer);)
}

// Starts a copy of 16 bytes from global to shared memory, both multiples of 16. Where `valid` is
// false nothing is read and zeros are written.
FA_DEVICE void copy16(uint32_t to, const void* from, bool valid) {
  FA_BODY(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                       "r"(valid ? 16 : 0)
                       : "memory");
          , emu::copy16(to, from, valid ? 16 : 0);)
}

// This thread's copies since the last commit become a group.
FA_DEVICE void copies_commit(Site site) {
  FA_BODY(asm volatile("cp.async.commit_group;" ::: "memory");, emu::copies_commit(site);)
}

// Until all but the newest `pending` groups of this thread have landed.
template <int pending>
FA_DEVICE void copies_wait(Site site) {
  FA_BODY(asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
          , emu::copies_wait(site, pending);)
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r has the address of row r of matrix i. Lane l
// gets of each the elements 2 (l % 4) and the next of row l / 4; of column l / 4 if transposed.
FA_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  FA_BODY(asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                       : "r"(address)
                       : "memory");
          , emu::load_matrices(r, 4, false, address);)
}
FA_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  FA_BODY(asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                       : "r"(address)
                       : "memory");
          , emu::load_matrices(r, 4, true, address);)
}

// -- tensor cores ----------------------------------------------------------------------------------

// d (16 x 8, float32) += a (16 x 16) b (16 x 8). Lane 4 g + t holds of d rows g and g + 8, columns
// 2 t and 2 t + 1; of a these rows, columns 2 t, 2 t + 1, and those 8 further; of b column g, rows
// 2 t, 2 t + 1, and those 8 further.
FA_DEVICE void multiply(BF16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  FA_BODY(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                       "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
          , const uint32_t b[2] = {b0 FA_COMMA b1}; emu::multiply16816(d, a, b, true);)
}
FA_DEVICE void multiply(F16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  FA_BODY(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                       "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
          , const uint32_t b[2] = {b0 FA_COMMA b1}; emu::multiply16816(d, a, b, false);)
}
}  // namespace ptx
}  // namespace fa
