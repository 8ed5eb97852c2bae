// Instructions that touch memory or meet other lanes, by the emulator of tests/emu.
#include "machine.h"

#include <cmath>
#include <cstring>

#include "emu.h"

namespace ptx {

Special special() {
  const emu::Thread& thread = *emu::self;
  const emu::Here& here = *emu::here;
  return {{thread.index.x, thread.index.y, thread.index.z},
          {here.block_size.x, here.block_size.y, here.block_size.z},
          {here.block.x, here.block.y, here.block.z},
          {here.grid_size.x, here.grid_size.y, here.grid_size.z},
          static_cast<u32>(thread.lane)};
}

// -- memory ----------------------------------------------------------------------------------------

// Not misaligned, and not what no pointer is: next to null, or a poison. Reading there would end
// the process.
static void* pointer(u64 address, int bytes, Place place) {
  if (address % bytes)
    emu::fail("%s: %d bytes at 0x%llx are misaligned", place, bytes,
              static_cast<unsigned long long>(address));
  if (address < (u64{1} << 16) || address >> 47)
    emu::fail("%s: %d bytes at 0x%llx, which is no memory", place, bytes,
              static_cast<unsigned long long>(address));
  return reinterpret_cast<void*>(address);
}

void load(void* to, u64 from, int bytes, Place place) {
  const void* at = pointer(from, bytes, place);
  emu::plain_read(at, bytes, place);
  std::memcpy(to, at, bytes);
}

void store(u64 to, const void* from, int bytes, Place place) {
  void* at = pointer(to, bytes, place);
  emu::plain_write(at, bytes, place);
  std::memcpy(at, from, bytes);
}

void load_shared(void* to, u32 from, int bytes, Place place) {
  const void* at = emu::shared_pointer(from, bytes);
  emu::plain_read(at, bytes, place);
  std::memcpy(to, at, bytes);
}

void store_shared(u32 to, const void* from, int bytes, Place place) {
  void* at = emu::shared_pointer(to, bytes);
  emu::plain_write(at, bytes, place);
  std::memcpy(at, from, bytes);
}

u64 of_shared(u32 address) { return reinterpret_cast<u64>(emu::shared_pointer(address, 1)); }
u32 to_shared(u64 address) { return emu::shared_address(reinterpret_cast<void*>(address)); }

void load_parameter(void* to, u64 from, int bytes, const emu::Compiled& kernel, Parameters all,
                    Place place) {
  for (int i = 0; i < kernel.parameters; ++i) {
    const u64 first = reinterpret_cast<u64>(all[i]);
    if (from < first || from + bytes > first + kernel.bytes[i]) continue;
    if ((from - first) % bytes) emu::fail("%s: misaligned, %d bytes", place, bytes);
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return;
  }
  emu::fail("%s: %d bytes beside the parameters", place, bytes);
}

void* local(u64 address, int bytes, void* variable, u64 size, Place place) {
  const u64 at = address - reinterpret_cast<u64>(variable);
  if (at > size - bytes || at % bytes)
    emu::fail("%s: %d bytes at %lld, of %llu", place, bytes, static_cast<long long>(at),
              static_cast<unsigned long long>(size));
  return reinterpret_cast<void*>(address);
}

void copy(u32 to, u64 from, int size, u32 bytes, Place place) {
  if (bytes > static_cast<u32>(size)) emu::fail("%s: %u bytes of %d", place, bytes, size);
  if (bytes) pointer(from, size, place);
  emu::copy(to, reinterpret_cast<const void*>(from), size, static_cast<int>(bytes), place);
}
void commit(Place place) { emu::copies_commit(place); }
void wait(int pending, Place place) { emu::copies_wait(place, pending); }

// -- other threads ---------------------------------------------------------------------------------

void barrier(u32 id, int threads, bool wait, Place place) {
  if (wait)
    emu::barrier_sync(place, static_cast<int>(id), threads);
  else
    emu::barrier_arrive(place, static_cast<int>(id), threads);
}

void warp_sync(u32 mask, Place place) { emu::warp_sync(place, mask); }

namespace {
struct Shuffled {
  u32 value, found;
  int from;
};
}  // namespace

// Lanes at different instructions may meet, if those are alike. Lanes outside the range that clamp (its low bits, and above them the mask of a segment) leaves
// keep what they have.
u32 shuffle(Way way, u32 value, u32 by, u32 clamp, u32 mask, bool& valid, Place place) {
  const int lane = emu::self->lane, segment = clamp >> 8 & 31, most = clamp & 31;
  const int first = lane & segment, last = first | (most & ~segment), step = by & 31;
  int from = lane;
  if (way == kUp) from = lane - step;
  if (way == kDown) from = lane + step;
  if (way == kFlip) from = lane ^ step;
  if (way == kIndex) from = first | (step & ~segment);
  valid = way == kUp ? from >= last : from <= last;
  Shuffled mine{value, value, valid ? from : lane};
  const auto exchange = [](void** brought, u32 mask) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      auto* to = static_cast<Shuffled*>(brought[lane]);
      if (!(mask >> to->from & 1))
        emu::fail("shuffle: lane %d reads lane %d, which is not in mask 0x%x", lane, to->from, mask);
      to->found = static_cast<Shuffled*>(brought[to->from])->value;
    }
  };
  constexpr const char* kNames[] = {"shfl.sync.up", "shfl.sync.down", "shfl.sync.bfly",
                                    "shfl.sync.idx"};
  emu::warp_meet(kNames[way], mask, &mine, exchange, nullptr, place);
  return mine.found;
}

void load_matrices(u32* to, int count, bool transposed, u32 address, Place place) {
  emu::load_matrices(to, count, transposed, address, place);
}

void multiply16816(f32* d, const u32* a, const u32* b, bool bfloat16, Place place) {
  emu::multiply16816(d, a, b[0], b[1], bfloat16, place);
}

namespace {

struct Fragments {
  f32* d;
  const u32 *a, *b;
};

// A float32 counts with the 10 bits of its fraction that tf32 has: what lies below is cut off.
f32 tf32(u32 bits) { return BITS(f32, bits & ~0x1FFFu); }

// D (16 x 8) += A (16 x 8) B (8 x 8). Lane 4 g + t holds of A the rows g and g + 8 of columns t and
// t + 4; of B, column g of rows t and t + 4; of D the rows g and g + 8 of columns 2 t and 2 t + 1.
void multiply(void** brought, uint32_t) {
  f32 a[16][8], b[8][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& x = *static_cast<Fragments*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32(x.a[i]);
      d[g + 8 * (i / 2)][2 * t + i % 2] = x.d[i];
    }
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = tf32(x.b[i]);
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 8; ++k)
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      static_cast<Fragments*>(brought[lane])->d[i] =
          d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

}  // namespace

void multiply1688(f32* d, const u32* a, const u32* b, Place place) {
  Fragments mine{d, a, b};
  emu::warp_meet(place, ~0u, &mine, multiply, place);
}

// -- floating point --------------------------------------------------------------------------------

f32 approximate_exp2(f32 x) { return emu::approximate_exp2(x); }
f32 approximate_log2(f32 x) { return emu::approximate_log2(x); }
f32 exp2(f32 x) { return std::exp2(x); }
f32 log2(f32 x) { return std::log2(x); }
f32 fused(f32 a, f32 b, f32 c) { return std::fma(a, b, c); }
f64 fused(f64 a, f64 b, f64 c) { return std::fma(a, b, c); }
f32 widened(u16 bits, bool bfloat16) { return emu::widened(bits, bfloat16); }
u32 narrowed(f32 x, bool bfloat16) { return x != x ? 0x7FFF : emu::narrowed(x, bfloat16); }

}  // namespace ptx
