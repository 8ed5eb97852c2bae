// Kernels with diverging lanes, conflicting copies, or unwritten shared memory or registers: with
// one thing wrong each, which the emulator must name; and the same things done right.
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace fa {

struct Thread {
  int thread;
  uint32_t* shared;
  uint32_t base;
  const uint32_t* from;
};

template <class Body>
__global__ void run(Body body, const uint32_t* from, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  const int thread = static_cast<int>(threadIdx.x);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  out[blockDim.x * blockIdx.x + thread] = body(Thread{thread, shared, ptx::shared_address(memory), from});
}

// -- nothing wrong ---------------------------------------------------------------------------------

uint32_t a_warp_leaves_before_a_barrier_of_all(Thread t) {
  if (t.thread >= 320) return t.from[t.thread];
  ptx::block_sync("all that there are");
  return t.from[t.thread];
}

uint32_t lanes_leave_before_a_barrier_of_all(Thread t) {
  if (t.thread % 32 > 20) return t.from[t.thread];
  t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("those lanes that there are");
  const uint32_t x = t.shared[(t.thread + 32) % 352];
  ptx::block_sync("once more");
  t.shared[t.thread] = x;
  ptx::block_sync("and once more");
  return t.shared[(t.thread + 320) % 352];
}

uint32_t many_readers(Thread t) {
  if (t.thread == 0) t.shared[0] = t.from[0];
  ptx::block_sync("written");
  uint32_t x = t.shared[0];
  ptx::block_sync("read by all");
  if (t.thread == 32) t.shared[0] = 0;
  return x - t.from[0] + t.from[t.thread];
}

uint32_t shuffles_at_two_places(Thread t) {
  float x = static_cast<float>(t.from[t.thread ^ 1]);
  if (t.thread & 1)
    x = ptx::shuffle_xor(x, 1) + 0.0f;
  else
    x = ptx::shuffle_xor(x, 1);
  return static_cast<uint32_t>(x);
}

uint32_t neighbours_store_bytes(Thread t) {
  auto* const bytes = reinterpret_cast<unsigned char*>(t.shared);
  for (int i = 0; i < 4; ++i)
    bytes[352 * i + t.thread] = static_cast<unsigned char>(t.from[t.thread] >> (8 * i));
  ptx::block_sync("written");
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) x |= static_cast<uint32_t>(bytes[352 * i + t.thread]) << (8 * i);
  return x;
}

// -- lanes of one warp -----------------------------------------------------------------------------

uint32_t half_warps_at_two_barriers(Thread t) {
  if (t.thread & 16)
    ptx::block_sync("the upper half");
  else
    ptx::block_sync("the lower half");
  return 0;
}

uint32_t half_warps_at_one_barrier_twice(Thread t) {
  if (t.thread & 16)
    ptx::block_sync("one name");
  else
    ptx::block_sync("one name");
  return 0;
}

uint32_t halves_of_two_warps_are_no_warp(Thread t) {
  if (t.thread & 16) ptx::barrier_sync("32 of two warps", 1, 32);
  return 0;
}

uint32_t lanes_name_two_barriers(Thread t) {
  ptx::barrier_sync("of two names", 1 + (t.thread & 1), 352);
  return 0;
}

uint32_t lanes_name_two_counts(Thread t) {
  ptx::barrier_sync("of two counts", 1, t.thread & 1 ? 320 : 352);
  return 0;
}

uint32_t lanes_at_two_loads_of_matrices(Thread t) {
  if (t.thread < 32)
    for (int i = 0; i < 8; ++i) t.shared[32 * i + t.thread] = 0;
  ptx::block_sync("written");
  uint32_t r[4];
  if (t.thread & 1)
    ptx::load_matrices(r, t.base + 16 * (t.thread % 32));
  else
    ptx::load_matrices(r, t.base + 16 * (t.thread % 32));
  return r[0];
}

uint32_t lanes_at_two_products(Thread t) {
  float d[4] = {0, 0, 0, 0};
  const uint32_t a[4] = {0, 0, 0, 0};
  if (t.thread & 1)
    ptx::multiply(ptx::BF16(), d, a, 0, 0);
  else
    ptx::multiply(ptx::BF16(), d, a, 1, 1);
  return __float_as_uint(d[0]);
}

uint32_t a_lane_leaves_before_a_product(Thread t) {
  if (t.thread == 5) return 0;
  float d[4] = {0, 0, 0, 0};
  const uint32_t a[4] = {0, 0, 0, 0};
  ptx::multiply(ptx::BF16(), d, a, 0, 0);
  return __float_as_uint(d[0]);
}

// -- copies in flight -----------------------------------------------------------------------------

uint32_t own_store_over_a_copy(Thread t) {
  ptx::copy16(t.base + 16 * t.thread, t.from, true);
  ptx::copies_commit("copied");
  t.shared[4 * t.thread] = 5;
  ptx::copies_wait<0>("too late");
  return 0;
}

uint32_t own_load_of_a_copy(Thread t) {
  ptx::copy16(t.base + 16 * t.thread, t.from, true);
  ptx::copies_commit("copied");
  const uint32_t x = t.shared[4 * t.thread];
  ptx::copies_wait<0>("too late");
  return x;
}

uint32_t two_own_copies_to_one_place(Thread t) {
  ptx::copy16(t.base + 16 * t.thread, t.from, true);
  ptx::copy16(t.base + 16 * t.thread, t.from + 4, true);
  ptx::copies_commit("copied");
  ptx::copies_wait<0>("both");
  return 0;
}

// -- readers, bounds, registers --------------------------------------------------------------------

// The first warp has read, but the writer does not wait for it.
uint32_t one_of_many_readers_is_not_waited_for(Thread t) {
  if (t.thread == 320) t.shared[0] = 1;
  ptx::block_sync("written");
  const uint32_t x = t.shared[0];
  if (t.thread < 32) {
    for (int i = 0; i < 3; ++i) ptx::warp_sync("takes its time");
    return x;
  }
  ptx::barrier_sync("all but the first warp", 1, 320);
  if (t.thread == 320) t.shared[0] = 2;
  return x;
}

// A byte that was written, and one that was not.
uint32_t half_of_it_was_never_written(Thread t) {
  reinterpret_cast<unsigned char*>(t.shared + t.thread)[2] = 1;
  return reinterpret_cast<uint16_t*>(t.shared + t.thread)[1];
}

uint32_t past_the_end_of_shared_memory(Thread t) {
  t.shared[2048 + t.thread] = 1;
  return 0;
}

uint32_t before_shared_memory(Thread t) { return t.shared[-1 - t.thread]; }

uint32_t far_past_the_end_of_shared_memory(Thread t) { return t.shared[1 << 17]; }

uint32_t misaligned_pair(Thread t) {
  *reinterpret_cast<float2*>(t.shared + 2 * t.thread + 1) = {1, 2};
  return 0;
}

uint32_t misaligned_chunk(Thread t) {
  *reinterpret_cast<uint4*>(t.shared + 8 * (t.thread % 64) + 2) = {1, 2, 3, 4};
  return 0;
}

#define FA_KERNELS(EACH)                                                                         \
  EACH(a_warp_leaves_before_a_barrier_of_all) EACH(lanes_leave_before_a_barrier_of_all)          \
  EACH(many_readers) EACH(shuffles_at_two_places) EACH(half_warps_at_two_barriers)               \
  EACH(half_warps_at_one_barrier_twice) EACH(halves_of_two_warps_are_no_warp)                    \
  EACH(neighbours_store_bytes) EACH(half_of_it_was_never_written)                                \
  EACH(lanes_name_two_barriers) EACH(lanes_name_two_counts)                                      \
  EACH(lanes_at_two_loads_of_matrices) EACH(lanes_at_two_products)                               \
  EACH(a_lane_leaves_before_a_product) EACH(own_store_over_a_copy) EACH(own_load_of_a_copy)      \
  EACH(two_own_copies_to_one_place) EACH(one_of_many_readers_is_not_waited_for)                  \
  EACH(past_the_end_of_shared_memory) EACH(before_shared_memory)                                 \
  EACH(far_past_the_end_of_shared_memory) EACH(misaligned_pair) EACH(misaligned_chunk)

}  // namespace fa

#define FA_ENTRY(name)                                                                         \
  extern "C" int misuse_##name(const uint32_t* from, uint32_t* out) {                          \
    const auto body = [](const fa::Thread& t) { return fa::name(t); };                         \
    return fa::launch("run", fa::run<decltype(body)>, dim3(1), dim3(352), 8192, nullptr, body, \
                      from, out);                                                              \
  }
FA_KERNELS(FA_ENTRY)

// Are unwritten registers poisoned? For each thread: 0 if all bits are set. Later blocks run on
// stacks that earlier ones have used.
extern "C" int unwritten_registers(uint32_t* out) {
  const auto body = [](const fa::Thread& t) {
    volatile uint32_t registers[64];
    uint32_t any = 0;
    for (int i = 0; i < 64; ++i) any |= ~registers[i];
    for (int i = 0; i < 64; ++i) registers[i] = 0;
    fa::ptx::block_sync("the stacks are used");
    return any + 0 * t.base;
  };
  return fa::launch("run", fa::run<decltype(body)>, dim3(8), dim3(352), 8192, nullptr, body, out,
                    out);
}

// Threads that store one value to one place, as Triton's reductions do; or their own numbers.
extern "C" int stores_to_one_place(int own_numbers, uint32_t* out) {
  const auto body = [own_numbers](const fa::Thread& t) {
    t.shared[0] = own_numbers ? static_cast<uint32_t>(t.thread) : 7;
    fa::ptx::block_sync("stored");
    return t.shared[0];
  };
  return fa::launch("run", fa::run<decltype(body)>, dim3(1), dim3(64), 16, nullptr, body, out, out);
}
