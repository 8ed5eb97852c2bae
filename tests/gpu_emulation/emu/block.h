// The state of thread blocks while they run, and the functions that parts of the emulator share.
#pragma once
#include <array>
#include <deque>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "emu.h"
#include "memory.h"
#include "proxy.h"
#include "shadow.h"

namespace emu {

constexpr uint32_t kWindow = 1024;  // where dynamic shared memory begins in its window, as on sm_90
constexpr int kBarriers = 16;
constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

// -- options and findings, of the process ----------------------------------------------------------

enum Schedule { kInOrder = 0, kRandom = 1, kDepthFirst = 2, kWarpPriorities = 3 };

struct Options {
  uint64_t seed = 1;
  Schedule schedule = kRandom;
  bool lazy = true;   // asynchronous copies land as late as the ISA allows, else at once
  bool check = true;  // watch memory for races
  size_t shared_limit = 99 * 1024;  // of sm_86 and sm_89
  bool same_value_stores = false;   // racing stores are no finding if the value stays
  bool pessimistic = false;  // products of 16 bits and ex2.approx.ftz round as badly as any hardware
  bool banks = false;        // count conflicts of banks
  bool tensor_fences = true;  // accesses to tensor memory are ordered by tcgen05.fence alone
  std::string disabled;      // the site of a synchronisation that does nothing
};
extern Options options;

struct Report {
  struct Banks {
    long turns = 0, conflicts = 0;
  };
  long findings = 0, switches = 0, multiplies = 0, blocks = 0, compiled = 0;
  std::string first;            // the first finding
  std::set<std::string> sites;  // of the synchronisations that ran
  std::unordered_map<const char*, bool> skipped;  // the same by address: are they switched off?
  std::map<std::string, Banks> banks;  // of each kind of access
};
extern Report report;

// Notes the site; true if it is switched off.
bool skipped(const char* site);

// -- blocks ----------------------------------------------------------------------------------------

struct Copy {
  uint32_t to;
  const unsigned char* from;
  int size, bytes;
};

// A store that races with another one; no finding if it leaves the value as it was.
struct Doubt {
  const void* at = nullptr;
  int bytes = 0;
  unsigned char before[16];
  std::string finding;
};

// What a thread published by its last fence, and what its atomics saw since.
struct Fences {
  Clocks released, released_in_block, observed, observed_in_block;
  // What it released at an address: its later writes there publish that once more.
  std::map<std::pair<uintptr_t, Scope>, Clocks> released_at;
};

struct Fiber : Thread {
  void* stack_pointer = nullptr;
  bool done = false;
  const char* waits_for = "";
  int at_barrier = -1;
  Clocks clocks;
  Clock committed = 0;                    // groups of copies
  std::vector<Copy> issued;               // cp.async since the last commit
  std::deque<std::vector<Copy>> pending;  // committed groups, oldest first
  BulkGroups bulk;
  std::unique_ptr<Fences> fences;
  Doubt doubt;
  std::vector<uintptr_t> calls;  // a hash of each chain of calls: see place_here

  Step step(const char* what) const {
    return {clocks.block, clocks.own[id], static_cast<uint16_t>(id), false, false, what};
  }
};

// Lanes that execute one instruction together.
struct Meeting {
  const char *name = nullptr, *site = nullptr;
  const void* place = nullptr;  // the instruction, if it must be the same for all; else null
  uint32_t mask = 0, arrived = 0;
  bool exits_count = false;  // a lane that has exited is not waited for
  bool (*all_here)(Meeting&) = nullptr;
  Act act = nullptr;
  void* brought[32] = {};
};

struct Warp {
  uint32_t live = 0;  // lanes
  int priority = 0, meetings = 0;
  std::array<Meeting, 32> meeting;
};

struct Barrier {
  int threads = 0, arrived = 0;
  bool all = false;          // for all live threads of the block
  uint32_t warps = 0;        // that have arrived
  std::vector<int> waiting;
  Clocks clocks;  // of the threads that arrived
};

// What lanes of a warp access together.
struct Together {
  const char* what = "";
  int bytes = 0;
  uint32_t lanes = 0, offset[32] = {};
};

// Agents of a block: its threads, the copies of each, and those of the asynchronous proxy: the
// products of each warp, the reads and the writes of each thread's bulk copies from shared memory,
// what each warp does with tensor memory, and the arrivals at each mbarrier.
enum TensorWork { kTensorProducts = 0, kTensorLoads = 1, kTensorStores = 2, kTensorWorks = 3 };
struct Agents {
  size_t threads = 0;

  uint16_t copies(int thread) const { return static_cast<uint16_t>(threads + thread); }
  uint16_t proxied() const { return static_cast<uint16_t>(2 * threads); }  // the first of those
  uint16_t products(int warp) const { return static_cast<uint16_t>(proxied() + warp); }
  uint16_t bulk_reads(int thread) const {
    return static_cast<uint16_t>(proxied() + threads / 32 + thread);
  }
  uint16_t bulk_writes(int thread) const {
    return static_cast<uint16_t>(bulk_reads(0) + threads + thread);
  }
  uint16_t tensor(TensorWork work, int warp) const {
    return static_cast<uint16_t>(bulk_writes(0) + threads + work * threads / 32 + warp);
  }
  uint16_t arrivals(int mbarrier) const {
    return static_cast<uint16_t>(tensor(kTensorWorks, 0) + mbarrier);
  }
};

struct Block : Here {
  int64_t number = 0;  // in the grid
  size_t shared_bytes = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<int> ready;  // fibers that can run
  Barrier barriers[kBarriers];
  Shadow shadow;           // of shared memory
  Agents agents;
  Proxy proxy;
  // For counting banks: how often a thread came to a place, and what a warp did there that time.
  std::map<std::pair<const void*, int>, long> times;
  std::map<std::tuple<const void*, int, long>, Together> together;
  uint64_t random_state = 0;
  int live = 0;
  bool failed = false;

  Block();
  uint32_t random();
};
extern Block* block;  // the current fiber's

inline Fiber& current() { return *static_cast<Fiber*>(self); }
void found(const std::string& finding);  // of a block or a launch: counts it and keeps the first
void wait_for(const char* what, int barrier = -1);  // until the current fiber is woken
void wake(int fiber);
void give_way();    // others may run before the current fiber goes on
void lane_exits();  // meetings no longer wait for it

// The instruction that ends here, distinguished by the chain of calls to it.
inline const void* place_here(const void* after) {
  const std::vector<uintptr_t>& calls = current().calls;
  const auto at = reinterpret_cast<uintptr_t>(after);
  return reinterpret_cast<const void*>(calls.empty() ? at : at ^ calls.back());
}
inline void enter_function(const void* from) {
  std::vector<uintptr_t>& calls = current().calls;
  const auto at = reinterpret_cast<uintptr_t>(from);
  calls.push_back((calls.empty() ? 0 : calls.back()) * 0x9E3779B97F4A7C15ull + at);
}
inline void leave_function() {
  std::vector<uintptr_t>& calls = current().calls;
  if (!calls.empty()) calls.pop_back();
}

std::string coordinates(int64_t block);
bool running(int64_t block);
// Of the launch: registers of each thread, 0 if the kernel's bounds give no number, -1 if they are
// unknown.
extern int launch_registers;

// -- memory ----------------------------------------------------------------------------------------

void memory_begins();  // of a launch
void memory_of_block(Block& begins, int slot, size_t shared);

ptrdiff_t offset_in_shared(const void* at);
void settle_doubt(Fiber& fiber);  // about its last store, which is done
// Loads and stores that g++ compiled, at a place in the program.
void read_at_place(const void* at, int bytes, const void* place);
void write_at_place(const void* at, int bytes, const void* place);

// Accesses to shared memory by a fiber, and by a copy that the current one begins.
void note_read(const Fiber& by, uint32_t address, int bytes, const char* what);
void note_write(const Fiber& by, uint32_t address, int bytes, const char* what);
void note_copy(uint32_t to, const void* from, int size, int bytes, const void* place);
// By the asynchronous proxy, in a step of a separate agent, for a thread with these clocks. `known`
// is what the proxy knows of this thread's work.
void note_proxied_read(uint32_t address, int bytes, const Step& step, const Clocks& known);
void note_proxied_write(uint32_t address, int bytes, const Step& step, const Clocks& of);
void note_proxied_source(const void* from, int bytes, const Step& step, const Clocks& known);
void note_proxied_target(const void* to, int bytes, bool adds, const Step& step, const Clocks& of);

void note_atomic(const void* at, int bytes, const char* what, Access access, bool narrow);
void atomics_begin();  // of a launch
bool forgotten(int64_t block);  // it has ended and never published

// A shadow of tensor memory: addresses from kTensorMemory on. It complains as others do.
constexpr uintptr_t kTensorMemory = 1 << 20;
std::unique_ptr<Shadow> shadow_of_tensor_memory();

// The sum of some terms, as tensor cores with the worst rounding add them.
float truncated_sum(const double (&terms)[9]);

// Count, if options.banks is set. Lanes of a warp access together what they access at one place for
// the n-th time each.
void note_bank(const char* what, const void* place, ptrdiff_t offset, int bytes);
void note_turn(const char* what, const std::vector<uint32_t>& offsets, int bytes);
void count_banks(Block& ends);

}  // namespace emu
