// The state of a thread block while it runs, and what the parts of the emulator offer each other.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "clocks.h"
#include "emu.h"

namespace emu {

constexpr uint32_t kWindow = 1024;  // where dynamic shared memory begins in its window, as on sm_90
constexpr int kBarriers = 16;

// -- options and findings, of the process ----------------------------------------------------------

enum Schedule { kInOrder = 0, kRandom = 1, kDepthFirst = 2, kWarpPriorities = 3 };

struct Options {
  uint64_t seed = 1;
  Schedule schedule = kRandom;
  bool lazy = true;   // asynchronous copies land as late as the ISA allows, else at once
  bool check = true;  // watch shared memory for races
  size_t shared_limit = 227 * 1024;
  std::string disabled;  // the site of a synchronisation that does nothing
};
extern Options options;

struct Report {
  long findings = 0, switches = 0, multiplies = 0, blocks = 0;
  std::string first;            // the first finding
  std::set<std::string> sites;  // of the synchronisations that ran
};
extern Report report;

// Notes the site; true if it is switched off.
bool skipped(const char* site);

// -- one block -------------------------------------------------------------------------------------

struct Copy {
  uint32_t to;
  const unsigned char* from;
  int bytes;
};

struct Fiber : Thread {
  void* stack_pointer = nullptr;
  bool done = false;
  std::string waits_for;
  Clocks clocks;
  std::vector<Copy> issued;               // cp.async since the last commit
  std::deque<std::vector<Copy>> pending;  // committed groups, oldest first
};

// Lanes that come together.
struct Meeting {
  const char* name = nullptr;  // null: nobody waits here
  uint32_t mask = 0;
  int arrived = 0;
  void* brought[32] = {};
  std::vector<int> waiting;
};

struct Barrier {
  int threads = 0, arrived = 0;
  std::vector<int> waiting;
  Clocks clocks;  // of those who arrived
};

struct Block : Here {
  size_t shared_bytes = 0;
  std::vector<unsigned char> memory;
  std::vector<Fiber> fibers;
  std::vector<int> ready, priorities;  // fibers that can run; of each warp
  std::vector<std::vector<Meeting>> meetings;  // of each warp
  Barrier barriers[kBarriers];
  Shadow shadow;
  void* scheduler = nullptr;  // its stack pointer
  const std::function<void()>* body = nullptr;
  uint64_t random_state = 0;
  int live = 0;
  bool failed = false;

  uint32_t random();
};
extern __thread Block* block;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Fiber& current();
void found(const std::string& finding);  // counts it and keeps the first
void wait_for(const std::string& what);  // the current fiber stops until someone wakes it
void wake(int fiber);

// Accesses to shared memory by the current fiber, or by lane's fiber of its warp.
void note_read(uint32_t address, int bytes, const char* what);
void note_read(const Fiber& by, uint32_t address, int bytes, const char* what);
void note_write(uint32_t address, int bytes, const char* what);

}  // namespace emu
