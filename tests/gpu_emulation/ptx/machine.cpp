// Instructions that access memory or synchronise lanes, on the emulator of ../emu.
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

// Fails if the address is misaligned, or cannot be a pointer: next to null, or a poison. Reading
// there would end the process.
void* memory(u64 address, int bytes, Place place) {
  if (address % bytes)
    emu::fail("%s: %d bytes at 0x%llx are misaligned", place, bytes,
              static_cast<unsigned long long>(address));
  if (address < (u64{1} << 16) || address >> 47)
    emu::fail("%s: %d bytes at 0x%llx, which is no memory", place, bytes,
              static_cast<unsigned long long>(address));
  return reinterpret_cast<void*>(address);
}

void load(void* to, u64 from, int bytes, Place place) {
  const void* at = memory(from, bytes, place);
  emu::plain_read(at, bytes, place);
  std::memcpy(to, at, bytes);
}

void store(u64 to, const void* from, int bytes, Place place) {
  void* at = memory(to, bytes, place);
  emu::plain_write(at, bytes, place);
  std::memcpy(at, from, bytes);
}

// Fails if an address is not in global memory.
static void expect_global(u64 address, int bytes, Place place) {
  if (emu::is_global(reinterpret_cast<void*>(address))) return;
  emu::fail("%s: %d bytes at 0x%llx are not in global memory", place, bytes,
            static_cast<unsigned long long>(address));
}

void load_global(void* to, u64 from, int bytes, Place place) {
  expect_global(from, bytes, place);
  load(to, from, bytes, place);
}

void store_global(u64 to, const void* from, int bytes, Place place) {
  expect_global(to, bytes, place);
  store(to, from, bytes, place);
}

void load_in_order(void* to, u64 from, int bytes, bool acquires, Place place) {
  expect_global(from, bytes, place);
  const void* at = memory(from, bytes, place);
  const auto order = acquires ? emu::Order::kAcquire : emu::Order::kRelaxed;
  emu::atomic_access(at, bytes, place, emu::Access::kLoad, order);
  std::memcpy(to, at, bytes);
}

void store_in_order(u64 to, const void* from, int bytes, bool releases, Place place) {
  expect_global(to, bytes, place);
  void* at = memory(to, bytes, place);
  const auto order = releases ? emu::Order::kRelease : emu::Order::kRelaxed;
  emu::atomic_access(at, bytes, place, emu::Access::kStore, order);
  std::memcpy(at, from, bytes);
}

u32 fetch_add(u64 at, u32 x, Place place) {
  expect_global(at, sizeof x, place);
  return emu::fetch_add(static_cast<u32*>(memory(at, sizeof x, place)), x, place);
}

void reduce_add(u64 at, u64 x, Place place) {
  expect_global(at, sizeof x, place);
  emu::reduce_add(static_cast<u64*>(memory(at, sizeof x, place)), x, place);
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
  if (bytes) memory(from, size, place);
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

// Lanes at different instructions may meet, if those are alike. `clamp` limits the source lanes, by
// its low bits and, above them, the mask of a segment: a lane with a source outside keeps its
// value.
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

namespace {
struct Reduced {
  f32 value;
  bool greatest;
};
}  // namespace

// Of NaN and numbers a number.
f32 reduced(f32 value, u32 mask, bool greatest, Place place) {
  const auto reduce = [](void** brought, u32 mask) {
    f32 found = kNan;
    const auto mine = [&](int lane) -> Reduced& { return *static_cast<Reduced*>(brought[lane]); };
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1)
        found = mine(lane).greatest ? most(found, mine(lane).value) : least(found, mine(lane).value);
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) mine(lane).value = found;
  };
  Reduced mine{value, greatest};
  emu::warp_meet(greatest ? "redux.sync.max" : "redux.sync.min", mask, &mine, reduce, nullptr, place);
  return mine.value;
}

void load_matrices(u32* to, int count, bool transposed, u32 address, Place place) {
  emu::load_matrices(to, count, transposed, address, place);
}

void multiply16816(f32* d, const u32* a, const u32* b, bool bfloat16, Place place) {
  emu::multiply16816(d, a, b[0], b[1], bfloat16, place);
}

void multiply1688(f32* d, const u32* a, const u32* b, Place place) {
  emu::multiply1688(d, a, b, place);
}

// -- floating point --------------------------------------------------------------------------------

f32 approximate_exp2(f32 x, bool ftz) { return emu::approximate_exp2(x, ftz); }
f32 approximate_log2(f32 x, bool ftz) { return emu::approximate_log2(x, ftz); }
f32 approximate_quotient(f32 a, f32 b) { return emu::approximate_quotient(a, b); }
f32 fused(f32 a, f32 b, f32 c) { return std::fma(a, b, c); }
f64 fused(f64 a, f64 b, f64 c) { return std::fma(a, b, c); }
f32 widened(u16 bits, bool bfloat16) { return emu::widened(bits, bfloat16); }
u32 narrowed(f32 x, bool bfloat16) { return x != x ? 0x7FFF : emu::narrowed(x, bfloat16); }

}  // namespace ptx
