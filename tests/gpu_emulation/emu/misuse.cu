// Kernels with one thing wrong each, which the emulator must name; and the same things done right.
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace fa {

// Two warps. from: 1024 words in global memory; out: a word for each thread.
template <class Body>
__global__ void run(Body body, const uint32_t* from, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  auto* shared = reinterpret_cast<uint32_t*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  out[thread] = body(thread, shared, ptx::shared_address(memory), from);
}

template <class Body>
int start(Body body, const uint32_t* from, uint32_t* out) {
  return launch("run", run<Body>, dim3(1), dim3(64), 4096, nullptr, body, from, out);
}

struct Thread {
  int thread;
  uint32_t* shared;
  uint32_t base;
  const uint32_t* from;
  int opposite() const { return 63 - thread; }
};

using Kernel = uint32_t (*)(Thread);

// -- nothing wrong ---------------------------------------------------------------------------------

uint32_t reversed(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("all written");
  const uint32_t x = t.shared[t.opposite()];
  ptx::block_sync("all read");
  t.shared[t.thread] = x;
  return t.shared[t.thread];
}

uint32_t reversed_by_copies(Thread t) {
  for (int stage = 0; stage < 2; ++stage) {
    const int at = 4 * t.thread;
    if (t.thread < 16) ptx::copy16(t.base + 256 * stage + 4 * at, t.from + at, true);
    ptx::copies_commit("a stage");
  }
  ptx::copies_wait<1>("the first stage");
  ptx::block_sync("it is there for all");
  const uint32_t x = t.shared[t.opposite()];
  ptx::copies_wait<0>("the second stage");
  ptx::block_sync("that, too");
  return x == t.shared[64 + t.opposite()] ? x : 0;
}

uint32_t zeros_where_invalid(Thread t) {
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, t.from, false);
  ptx::copies_commit("zeros");
  ptx::copies_wait<0>("zeros");
  ptx::block_sync("zeros");
  return t.shared[t.thread] + t.from[t.opposite()];
}

// One warp hands over to the other, and only the other waits.
uint32_t handed_over(Thread t) {
  const bool gives = t.thread < 32;
  if (gives) {
    t.shared[t.thread] = t.from[63 - t.thread - 32];
    t.shared[32 + t.thread] = t.from[63 - t.thread];
    ptx::barrier_arrive("given", 1, 64);
    return t.from[t.opposite()];
  }
  ptx::barrier_sync("taken", 1, 64);
  return t.shared[t.thread - 32];
}

uint32_t within_warps(Thread t) {
  t.shared[t.thread] = t.from[t.thread ^ 1];
  ptx::warp_sync("of a warp");
  const uint32_t neighbour = t.shared[t.thread ^ 1];
  const float x = ptx::shuffle_xor(static_cast<float>(neighbour), 31);
  ptx::block_sync("between warps");
  t.shared[t.thread] = static_cast<uint32_t>(x);
  ptx::block_sync("between warps again");
  return t.shared[t.thread ^ 32];
}

// -- something wrong -------------------------------------------------------------------------------

uint32_t no_barrier_before_reading(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  return t.shared[t.opposite()];
}

uint32_t a_warp_is_no_block(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  ptx::warp_sync("only of a warp");
  return t.shared[t.opposite()];
}

uint32_t one_warp_reads_another(Thread t) {
  if (t.thread < 32) t.shared[t.thread] = t.from[t.thread];
  ptx::warp_sync("of each warp");
  return t.thread < 32 ? 0 : t.shared[t.thread - 32];
}

uint32_t no_barrier_after_reading(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("all written");
  const uint32_t x = t.shared[t.opposite()];
  t.shared[t.thread] = 0;
  return x;
}

uint32_t one_warp_overwrites_what_another_reads(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("all written");
  if (t.thread < 32) return t.shared[32 + t.thread];
  t.shared[t.thread] = 0;
  return 0;
}

uint32_t two_write_the_same(Thread t) {
  t.shared[t.thread / 2] = t.from[t.thread];
  return 0;
}

uint32_t never_written(Thread t) {
  if (t.thread) t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("all but one written");
  return t.shared[t.opposite()];
}

uint32_t copy_not_waited_for(Thread t) {
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, t.from + 4 * t.thread, true);
  ptx::copies_commit("in flight");
  ptx::block_sync("is no wait");
  const uint32_t x = t.shared[t.opposite()];
  ptx::copies_wait<0>("too late");
  return x;
}

uint32_t one_group_too_many(Thread t) {
  for (int stage = 0; stage < 2; ++stage) {
    if (t.thread < 16) ptx::copy16(t.base + 256 * stage + 16 * t.thread, t.from, true);
    ptx::copies_commit("a stage");
  }
  ptx::copies_wait<2>("neither");
  ptx::block_sync("the first is not there");
  const uint32_t x = t.shared[t.opposite()];
  ptx::copies_wait<0>("too late");
  return x;
}

uint32_t copy_waited_for_by_its_thread_alone(Thread t) {
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, t.from + 4 * t.thread, true);
  ptx::copies_commit("copied");
  ptx::copies_wait<0>("landed for some");
  return t.shared[t.opposite()];
}

uint32_t copy_over_what_others_read(Thread t) {
  t.shared[t.thread] = t.from[t.thread];
  ptx::block_sync("all written");
  const uint32_t x = t.shared[t.opposite()];
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, t.from + 4 * t.thread, true);
  ptx::copies_commit("over it");
  ptx::copies_wait<0>("over it");
  return x;
}

uint32_t never_committed(Thread t) {
  ptx::copy16(t.base + 16 * t.thread, t.from, true);
  return 0;
}

uint32_t never_waited_for(Thread t) {
  ptx::copy16(t.base + 16 * t.thread, t.from, true);
  ptx::copies_commit("for nothing");
  return 0;
}

uint32_t misaligned_in_global_memory(Thread t) {
  ptx::copy16(t.base, t.from + 1, true);
  return 0;
}

uint32_t misaligned_in_shared_memory(Thread t) {
  ptx::copy16(t.base + 8, t.from, true);
  return 0;
}

uint32_t out_of_shared_memory(Thread t) {
  ptx::copy16(t.base + 4096, t.from, true);
  return 0;
}

uint32_t misaligned_matrix(Thread t) {
  uint32_t r[4];
  t.shared[t.thread] = 0;
  ptx::warp_sync("written");
  ptx::load_matrices(r, t.base + 8);
  return r[0];
}

uint32_t some_lanes_elsewhere(Thread t) {
  const auto x = static_cast<float>(t.from[t.thread]);
  if (t.thread % 2) return static_cast<uint32_t>(ptx::shuffle_xor(x, 1));
  ptx::warp_sync("the other half");
  return 0;
}

uint32_t some_lanes_have_left(Thread t) {
  if (t.thread == 5) return 0;
  return static_cast<uint32_t>(ptx::shuffle_xor(1.0f, 2));
}

uint32_t nobody_arrives(Thread t) {
  if (t.thread < 32) ptx::barrier_sync("never complete", 3, 64);
  return 0;
}

uint32_t half_a_warp(Thread) {
  ptx::barrier_sync("of 48", 1, 48);
  return 0;
}

uint32_t counts_differ(Thread t) {
  ptx::barrier_sync("of 32 and of 64", 1, t.thread < 32 ? 32 : 64);
  ptx::barrier_sync("of 64", 1, 64);
  return 0;
}

uint32_t no_such_barrier(Thread) {
  ptx::barrier_sync("the seventeenth", 16, 64);
  return 0;
}

#define FA_KERNELS(EACH)                                                                       \
  EACH(reversed)                                                                               \
  EACH(reversed_by_copies) EACH(zeros_where_invalid) EACH(handed_over) EACH(within_warps)      \
  EACH(no_barrier_before_reading) EACH(a_warp_is_no_block) EACH(no_barrier_after_reading)      \
  EACH(one_warp_reads_another) EACH(one_warp_overwrites_what_another_reads)                    \
  EACH(two_write_the_same) EACH(never_written) EACH(copy_not_waited_for)                       \
  EACH(one_group_too_many) EACH(copy_waited_for_by_its_thread_alone)                           \
  EACH(copy_over_what_others_read) EACH(never_committed) EACH(never_waited_for)                \
  EACH(misaligned_in_global_memory) EACH(misaligned_in_shared_memory)                          \
  EACH(out_of_shared_memory) EACH(misaligned_matrix) EACH(some_lanes_elsewhere)                \
  EACH(some_lanes_have_left) EACH(nobody_arrives) EACH(half_a_warp)    \
  EACH(counts_differ) EACH(no_such_barrier)

}  // namespace fa

#define FA_ENTRY(name)                                                                      \
  extern "C" int misuse_##name(const uint32_t* from, uint32_t* out) {                       \
    const auto body = [](int thread, uint32_t* shared, uint32_t base, const uint32_t* from) { \
      return fa::name(fa::Thread{thread, shared, base, from});                              \
    };                                                                                      \
    return fa::start(body, from, out);                                                      \
  }
FA_KERNELS(FA_ENTRY)

// Global memory past its end, which only AddressSanitizer sees.
extern "C" int past_the_end(const uint32_t* from, uint32_t* out) {
  const auto body = [](int thread, uint32_t*, uint32_t, const uint32_t* from) {
    return from[256 + thread];
  };
  return fa::start(body, from, out);
}

extern "C" int launch_of(int threads, int shared_bytes, const uint32_t* from, uint32_t* out) {
  const auto nothing = [](int, uint32_t*, uint32_t, const uint32_t*) { return 0u; };
  return fa::launch("run", fa::run<decltype(nothing)>, dim3(1), dim3(threads), shared_bytes, nullptr,
                    nothing, from, out);
}

// Two launches, each with another mistake.
extern "C" int wrong_twice(const uint32_t* from, uint32_t* out) {
  misuse_two_write_the_same(from, out);
  return launch_of(48, 0, from, out);
}
