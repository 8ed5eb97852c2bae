// Kernels in which threads and blocks share global memory, and what orders them there: with one
// thing wrong each, which the emulator must name; and the same things done right.
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace fa {

struct Thread {
  int thread, block;
  uint32_t* shared;
  uint32_t base;
  const uint32_t* from;
  uint32_t* out;  // 1024 words
  int at() const { return 64 * block + thread; }
};

template <class Body>
__global__ void run(Body body, const uint32_t* from, uint32_t* out) {
  FA_SHARED_MEMORY(memory);
  body(Thread{static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
              reinterpret_cast<uint32_t*>(memory), ptx::shared_address(memory), from, out});
}

// Atomics, of more kinds than the kernels of csrc/cuda use. No other thread runs between the
// emulator's check and the access.
__attribute__((no_sanitize("thread"), noinline)) uint32_t loaded(const uint32_t* from) {
  return *from;
}
__attribute__((no_sanitize("thread"), noinline)) void stored(uint32_t* to, uint32_t x) { *to = x; }
__attribute__((no_sanitize("thread"), noinline)) uint32_t added(uint32_t* to, uint32_t x) {
  return *to += x;
}
uint32_t add(uint32_t* to, uint32_t x, emu::Scope scope = emu::Scope::kDevice) {
  emu::atomic_access(to, 4, "atom", emu::Access::kBoth, emu::Order::kRelaxed, scope);
  return added(to, x);
}
void publish(uint32_t* flag) {
  emu::atomic_access(flag, 4, "st.release", emu::Access::kStore, emu::Order::kRelease);
  stored(flag, 1);
}
void store(uint32_t* flag, uint32_t x) {
  emu::atomic_access(flag, 4, "st.relaxed", emu::Access::kStore);
  stored(flag, x);
}
uint32_t published(const uint32_t* flag) {
  emu::atomic_access(flag, 4, "ld.acquire", emu::Access::kLoad, emu::Order::kAcquire);
  return loaded(flag);
}
uint32_t seen(const uint32_t* flag) {
  emu::atomic_access(flag, 4, "ld.relaxed", emu::Access::kLoad);
  return loaded(flag);
}

// -- nothing wrong ---------------------------------------------------------------------------------

void reversed_in_global_memory(Thread t) {
  t.out[t.at()] = t.from[t.at()];
  ptx::block_sync("all written");
  const uint32_t x = t.out[64 * t.block + 63 - t.thread];
  ptx::block_sync("all read");
  t.out[t.at()] = x;
}

void blocks_add_atomically(Thread t) { add(t.out + t.thread, 1); }

void atomic_and_plain_loads_meet(Thread t) {
  t.out[t.at()] = t.block % 2 ? seen(t.from + t.thread) : t.from[t.thread];
}

void an_atomic_stores_first(Thread t) {
  store(t.shared, 1);  // nothing was written there before
  t.out[t.at()] = t.from[t.thread] + seen(t.shared) - 1;
}

void warps_add_for_their_block(Thread t) { add(t.out + t.block, 1, emu::Scope::kBlock); }

// The first block hands over to the others, which poll until it has.
void handed_to_other_blocks(Thread t) {
  uint32_t* const flag = t.out + 1000;
  if (t.block == 0) {
    t.out[t.thread] = t.from[t.thread];
    ptx::block_sync("all written");
    if (t.thread == 0) publish(flag);
    return;
  }
  if (t.thread == 0)
    while (!published(flag)) continue;
  ptx::block_sync("it is there");
  t.out[t.at()] = t.out[t.thread];
}

// A fence on each side, for its own block alone or for all.
void hand_over(Thread t, emu::Scope released, emu::Scope acquired) {
  uint32_t* const flag = t.out + 1000;
  if (t.block == 0) {
    t.out[t.thread] = t.from[t.thread];
    ptx::block_sync("all written");
    emu::fence(released);
    if (t.thread == 0) add(flag, 1);
    return;
  }
  if (t.thread == 0) {
    while (!seen(flag)) continue;
    emu::fence(acquired);
  }
  ptx::block_sync("it is there");
  t.out[t.at()] = t.out[t.thread];
}
void handed_over_by_fences(Thread t) { hand_over(t, emu::Scope::kDevice, emu::Scope::kDevice); }

// A store comes after the release, and it is what the others see.
void hand_over_and_store(Thread t, int storing) {
  uint32_t* const flag = t.out + 1000;
  if (t.block == 0) {
    t.out[t.thread] = t.from[t.thread];
    ptx::block_sync("all written");
    if (t.thread == 0) publish(flag);
  }
  if (t.block == storing && t.thread == 0) {
    while (!seen(flag)) continue;
    store(flag, 2);
  }
  if (t.block == 0) return;
  if (t.thread == 0) {
    while (seen(flag) != 2) continue;
    published(flag);
  }
  ptx::block_sync("it is there");
  t.out[t.at()] = t.out[t.thread];
}
void handed_over_by_a_later_store(Thread t) { hand_over_and_store(t, 0); }

// -- something wrong -------------------------------------------------------------------------------

void neighbours_race(Thread t) {
  t.out[t.at()] = t.from[t.at()];
  if (t.thread % 2) t.out[t.at()] = t.out[t.at() ^ 1];
}

void two_threads_write_a_word(Thread t) { t.out[32 * t.block + t.thread / 2] = t.from[t.thread]; }

void a_warp_barrier_is_none_of_the_block(Thread t) {
  t.out[t.at()] = t.from[t.at()];
  ptx::warp_sync("only of a warp");
  t.out[512 + t.at()] = t.out[64 * t.block + 63 - t.thread];
}

void a_block_reads_what_another_writes(Thread t) {
  t.out[t.at()] = t.from[t.at()] + (t.block ? t.out[t.at() - 64] : 0);
}

void blocks_add_without_atomics(Thread t) { t.out[t.thread] += t.from[t.thread]; }

void an_atomic_meets_a_plain_store(Thread t) {
  if (t.block)
    add(t.out + t.thread, 1);
  else
    t.out[t.thread] = 1;
}

void an_atomic_meets_a_plain_load(Thread t) {
  if (t.block)
    add(t.out + t.thread, 1);
  else
    t.out[512 + t.thread] = t.out[t.thread];
}

void a_plain_load_meets_an_atomic(Thread t) {
  if (t.block)
    t.out[64 * t.block + t.thread] = t.out[t.thread];
  else
    add(t.out + t.thread, 1);
}

void an_atomic_load_meets_a_plain_store(Thread t) {
  if (t.block)
    t.out[64 * t.block + t.thread] = seen(t.out + t.thread);
  else
    t.out[t.thread] = 1;
}

void blocks_add_in_the_scope_of_one(Thread t) { add(t.out + t.thread, 1, emu::Scope::kBlock); }

void handed_over_without_fences(Thread t) {
  uint32_t* const flag = t.out + 1000;
  if (t.block == 0) {
    t.out[t.thread] = t.from[t.thread];
    ptx::block_sync("all written");
    if (t.thread == 0) add(flag, 1);
    return;
  }
  if (t.thread == 0)
    while (!seen(flag)) continue;
  ptx::block_sync("no fence says that it is there");
  t.out[t.at()] = t.out[t.thread];
}

// One of the two fences is too narrow.
void released_for_one_block(Thread t) { hand_over(t, emu::Scope::kBlock, emu::Scope::kDevice); }
void acquired_for_one_block(Thread t) { hand_over(t, emu::Scope::kDevice, emu::Scope::kBlock); }

void another_stores_over_what_was_released(Thread t) { hand_over_and_store(t, 1); }

// A release needs a write after its fence.
void a_load_releases_nothing(Thread t) {
  uint32_t* const flag = t.out + 1000;
  if (t.thread || t.block > 1) return;
  if (t.block == 0) {
    t.out[1] = 7;
    emu::fence(emu::Scope::kDevice);
    seen(flag);
    return;
  }
  published(flag);
  t.out[2] = t.out[1];
}

void more_is_read_than_was_handed_over(Thread t) {
  uint32_t* const flag = t.out + 1000;
  if (t.block == 0) {
    if (t.thread == 0) publish(flag);
    t.out[t.thread] = t.from[t.thread];
    return;
  }
  if (t.thread == 0)
    while (!published(flag)) continue;
  ptx::block_sync("it is there");
  t.out[t.at()] = t.out[t.thread];
}

// Two blocks have read, and only one of them publishes that.
void one_of_two_readers_is_not_waited_for(Thread t) {
  if (t.thread || t.block == 3) return;
  uint32_t* const flag = t.out + 1000;
  t.out[512 + t.block] = t.out[0];
  if (t.block == 1) publish(flag);
  if (t.block != 2) return;
  while (!published(flag)) continue;
  t.out[0] = 1;
}

void a_copy_of_what_others_write(Thread t) {
  t.out[t.at()] = t.from[t.at()];
  const uint32_t* const source = t.out + 64 * t.block + 4 * ((t.thread + 8) % 16);
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, source, true);
  ptx::copies_commit("copied");
  ptx::copies_wait<0>("copied");
}

void a_source_changes_in_flight(Thread t) {
  if (t.thread < 16) ptx::copy16(t.base + 16 * t.thread, t.out + 64 * t.block + 4 * t.thread, true);
  ptx::copies_commit("copied");
  if (t.thread < 16) t.out[64 * t.block + 4 * t.thread] = 9;
  ptx::copies_wait<0>("too late");
}

void misaligned_word(Thread t) {
  *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(t.out) + 4 * t.at() + 2) = 7;
}

#define FA_KERNELS(EACH)                                                                       \
  EACH(reversed_in_global_memory) EACH(blocks_add_atomically) EACH(warps_add_for_their_block)  \
  EACH(handed_to_other_blocks) EACH(handed_over_by_fences) EACH(neighbours_race)               \
  EACH(two_threads_write_a_word) EACH(a_warp_barrier_is_none_of_the_block)                     \
  EACH(a_block_reads_what_another_writes) EACH(blocks_add_without_atomics)                     \
  EACH(atomic_and_plain_loads_meet) EACH(an_atomic_stores_first)                               \
  EACH(an_atomic_load_meets_a_plain_store) EACH(a_plain_load_meets_an_atomic)                  \
  EACH(an_atomic_meets_a_plain_store) EACH(an_atomic_meets_a_plain_load)                       \
  EACH(blocks_add_in_the_scope_of_one) EACH(handed_over_without_fences)                        \
  EACH(released_for_one_block) EACH(acquired_for_one_block)                                    \
  EACH(more_is_read_than_was_handed_over) EACH(a_copy_of_what_others_write)                    \
  EACH(a_source_changes_in_flight) EACH(misaligned_word)                         \
  EACH(one_of_two_readers_is_not_waited_for) EACH(handed_over_by_a_later_store)                \
  EACH(another_stores_over_what_was_released) EACH(a_load_releases_nothing)

}  // namespace fa

#define FA_ENTRY(name)                                                                         \
  extern "C" int misuse_##name(const uint32_t* from, uint32_t* out) {                          \
    const auto body = [](const fa::Thread& t) { fa::name(t); };                                \
    return fa::launch("run", fa::run<decltype(body)>, dim3(4), dim3(64), 4096, nullptr, body,  \
                      from, out);                                                              \
  }
FA_KERNELS(FA_ENTRY)

// When each block of the grid ran: each takes the next number.
extern "C" int order_of_blocks(unsigned x, unsigned y, unsigned z, uint32_t* numbers) {
  static uint32_t last;
  last = 0;
  const auto body = [](const fa::Thread& t) {
    const uint32_t at = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (t.thread == 0) t.out[at] = fa::added(&last, 1);
  };
  return fa::launch("run", fa::run<decltype(body)>, dim3(x, y, z), dim3(32), 16, nullptr, body,
                    numbers, numbers);
}
