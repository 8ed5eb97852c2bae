// How a pass is divided into work: phases that follow one another, each a number of tasks. Tasks
// are handed out in ascending order and run to their end, so a task may wait for a lower one. The
// number of threads may change the size of tasks, but never a result: each element of it is one
// chain of operations in a fixed order. A run that is interrupted hands out no further task.
#pragma once
#include <cstddef>

#include "../../abi.h"
#include "../../common/host_device.h"

namespace fa {

class HostedRun;            // runtime/hosted_run.h
bool ends(HostedRun& run);  // defined in library.cpp

// The arguments of a call as the CPU's kernels read them.
struct Params : FaParams {
  FaScoreMod mod;
  HostedRun* run = nullptr;  // null if it cannot be interrupted, or is short
};

// True if the run is interrupted. Its results are dropped, so a task may return in any state. Loops
// that could take a second ask this, a few microseconds apart at least.
inline bool interrupted(const Params& p) { return p.run && ends(*p.run); }

struct Phase {
  int64_t tasks;
  size_t scratch;  // bytes each thread needs
  void (*run)(const Params& p, int64_t task, char* scratch);
};

constexpr int kPhases = 10;

struct Plan {
  Phase phases[kPhases];
  int count = 0;
  size_t workspace = 0;  // bytes shared by all tasks
  __attribute__((always_inline)) void add(const Phase& phase) {
    if (phase.tasks > 0) phases[count++] = phase;
  }
  // Appends another pass, in the same workspace.
  Plan then(const Plan& other) const {
    Plan both = *this;
    for (int at = 0; at < other.count; ++at) both.add(other.phases[at]);
    if (other.workspace > workspace) both.workspace = other.workspace;
    return both;
  }
};

// The order in which threads that take numbers in turn write n pieces of a result: each walks through
// a part of its own. Neighbours may lie in the same pages (the rows of heads, side by side), and each
// of the threads that write to a new page at once would take a page fault.
FA_SHARED int64_t apart(int64_t at, int64_t n, int64_t threads) {
  if (threads <= 1) return at;
  const int64_t part = at % threads, longer = n % threads;  // parts that have one more
  return part * (n / threads) + (part < longer ? part : longer) + at / threads;
}

// The tasks of an indexer, in any order.
struct IndexerTasks {
  int64_t count;
  size_t scratch;
  void (*run)(const FaIndexer& p, int64_t task, char* scratch);
};

// The tasks of norm_rope, in any order; then `finish`, once.
struct NormRopeTasks {
  int64_t count = 0;
  size_t scratch = 0, workspace = 0;
  void (*run)(const FaNormRope& p, int64_t task, char* scratch, char* workspace) = nullptr;
  void (*finish)(const FaNormRope& p, char* workspace) = nullptr;
};

}  // namespace fa
