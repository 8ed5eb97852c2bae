// How a pass is cut into work: phases that follow one another, each a number of
// independent tasks. Cutting finer or coarser never changes a result: each element of it
// is one chain of operations inside one task.
#pragma once
#include <cstddef>

#include "../abi.h"

namespace fa {

struct Phase {
  int64_t tasks;
  size_t scratch;  // bytes each thread needs
  void (*run)(const FaParams& p, int64_t task, char* scratch);
};

struct Plan {
  Phase phases[5];
  int count = 0;
  size_t workspace = 0;  // bytes shared by all tasks
  void add(const Phase& phase) {
    if (phase.tasks > 0) phases[count++] = phase;
  }
};

using MakePlan = Plan (*)(const FaParams& p, int64_t pass);

}  // namespace fa
