// What a PTX instruction does, for the C++ that library.py makes of kernels. A kernel includes this
// header alone, which is small so that it compiles fast; what accesses memory or synchronises lanes
// is in machine.cpp. `place` is the position of an instruction in the PTX.
#pragma once
#include <stdint.h>

#include "blackwell.h"
#include "compiled.h"
#include "hopper.h"

namespace ptx {

using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s128 = __int128;
using u128 = unsigned __int128;
using f32 = float;
using f64 = double;
using Place = const char*;
using Parameters = const unsigned char* const*;

#define BITS(type, x) __builtin_bit_cast(type, x)

// -- where a thread runs ---------------------------------------------------------------------------

struct Special {
  u32 tid[3], ntid[3], ctaid[3], nctaid[3], laneid;
};
Special special();

// -- memory ----------------------------------------------------------------------------------------

void load(void* to, u64 from, int bytes, Place place);  // generic
void load_global(void* to, u64 from, int bytes, Place place);
void store_global(u64 to, const void* from, int bytes, Place place);
void* memory(u64 address, int bytes, Place place);  // as a pointer, if it can be one
void store(u64 to, const void* from, int bytes, Place place);
// Atomic for the device; relaxed, unless they acquire or release.
void load_in_order(void* to, u64 from, int bytes, bool acquires, Place place);
void store_in_order(u64 to, const void* from, int bytes, bool releases, Place place);
u32 fetch_add(u64 at, u32 x, Place place);
void reduce_add(u64 at, u64 x, Place place);
void load_shared(void* to, u32 from, int bytes, Place place);
void store_shared(u32 to, const void* from, int bytes, Place place);
u64 of_shared(u32 address);  // a generic address, and back
u32 to_shared(u64 address);

// Loads a kernel's parameter from an address that the kernel computed.
void load_parameter(void* to, u64 from, int bytes, const emu::Compiled& kernel, Parameters all,
                    Place place);

// A checked address in a kernel's variable in local memory.
void* local(u64 address, int bytes, void* variable, u64 size, Place place);

void copy(u32 to, u64 from, int size, u32 bytes, Place place);  // cp.async
void commit(Place place);
void wait(int pending, Place place);

// -- other threads ---------------------------------------------------------------------------------

void barrier(u32 id, int threads, bool wait, Place place);  // threads < 0: the whole block
void warp_sync(u32 mask, Place place);

enum Way { kUp, kDown, kFlip, kIndex };
u32 shuffle(Way way, u32 value, u32 by, u32 clamp, u32 mask, bool& valid, Place place);

f32 reduced(f32 value, u32 mask, bool greatest, Place place);  // of the lanes in mask

void load_matrices(u32* to, int count, bool transposed, u32 address, Place place);
void multiply16816(f32* d, const u32* a, const u32* b, bool bfloat16, Place place);
void multiply1688(f32* d, const u32* a, const u32* b, Place place);  // of tf32

// -- floating point --------------------------------------------------------------------------------

constexpr f32 kNan = BITS(f32, 0x7FFFFFFFu);  // the NaN of float32 arithmetic

inline f32 ftz(f32 x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
inline f32 saturated(f32 x) { return x > 0 ? (x < 1 ? x : 1) : 0; }  // of NaN: 0

// Of a NaN and a number these give the number. -0 is less than 0.
template <class F>
inline F least(F a, F b) {
  if (a != a) return b != b ? F(kNan) : b;
  if (b != b || a < b) return a;
  return b < a || __builtin_signbit(b) ? b : a;
}
template <class F>
inline F most(F a, F b) {
  if (a != a) return b != b ? F(kNan) : b;
  if (b != b || a > b) return a;
  return b > a || __builtin_signbit(a) ? b : a;
}

f32 approximate_exp2(f32 x, bool ftz);
f32 approximate_log2(f32 x, bool ftz);
f32 approximate_quotient(f32 a, f32 b);
f32 fused(f32 a, f32 b, f32 c);
f64 fused(f64 a, f64 b, f64 c);
f32 widened(u16 bits, bool bfloat16);
u32 narrowed(f32 x, bool bfloat16);  // to nearest even; a NaN has but one form

// To whole numbers. Beyond their range, the nearest; NaN gives 0, or in 64 bits the top bit alone.
template <class I>
inline I whole(f64 x, bool wide) {
  constexpr bool is_signed = I(-1) < I(0);
  constexpr int bits = 8 * sizeof(I);
  constexpr I low = is_signed ? I(I(1) << (bits - 1)) : I(0), high = I(~low);
  constexpr f64 past = f64(I(1) << (bits - 2)) * (is_signed ? 2 : 4);
  if (x != x) return wide ? I(I(1) << (bits - 1)) : I(0);
  return x >= past ? high : x <= f64(low) ? low : I(x);
}

// -- whole numbers ---------------------------------------------------------------------------------

// By zero, PTX leaves the result open: here a poison. The lowest number by -1 is itself.
template <class I>
inline I quotient(I a, I b) {
  if (b == 0) return I(-1);
  return b == I(-1) && I(-1) < I(0) ? I(-u64(a)) : I(a / b);
}
template <class I>
inline I remainder(I a, I b) {
  if (b == 0) return I(-1);
  return b == I(-1) && I(-1) < I(0) ? I(0) : I(a % b);
}

// Shifts by as many bits as there are, or more, give 0 or copies of the sign.
template <class I>
inline I left(I a, u32 by) {
  return by < 8 * sizeof(I) ? I(a << by) : I(0);
}
template <class I>
inline I right(I a, u32 by) {
  constexpr u32 bits = 8 * sizeof(I);
  return by < bits ? I(a >> by) : a < I(0) ? I(-1) : I(0);
}

// `length` bits from `at`; above them copies of the sign, which is the last bit of the field.
template <class I>
inline I field(I a, u32 at, u32 length) {
  constexpr u32 bits = 8 * sizeof(I);
  at &= 255, length &= 255;
  if (length == 0) return I(0);
  const u32 last = at + length - 1 < bits - 1 ? at + length - 1 : bits - 1;
  const bool sign = I(-1) < I(0) && (u64(a) >> last & 1);
  u64 found = 0;
  for (u32 i = 0; i < bits; ++i) {
    const bool bit = i < length && at + i < bits ? u64(a) >> (at + i) & 1 : sign;
    found |= u64(bit) << i;
  }
  return I(found);
}

// b, with the low `length` bits of a from bit `at` on.
template <class I>
inline I inserted(I a, I b, u32 at, u32 length) {
  at &= 255, length &= 255;
  for (u32 i = 0; i < length && at + i < 8 * sizeof(I); ++i) {
    const I bit = I(1) << (at + i);
    b = I(a >> i & 1) ? b | bit : b & ~bit;
  }
  return b;
}

// Bytes of b and a, chosen by four bits each; the highest of the four repeats the byte's sign.
inline u32 permuted(u32 a, u32 b, u32 choice) {
  const u64 from = u64(b) << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 which = choice >> (4 * i) & 15;
    const u32 byte = u32(from >> (8 * (which & 7))) & 255;
    found |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return found;
}

}  // namespace ptx
