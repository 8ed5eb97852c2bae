// Vector clocks: which steps of other agents an agent knows of. Two accesses race when neither
// happened before the other (FastTrack, Flanagan and Freund 2009).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emu {

using Clock = uint32_t;

// One agent at one moment, and what it did. Agents of a block are its threads, followed by those
// that work asynchronously: see Agents.
struct Step {
  int64_t block = -1;
  Clock clock = 0;  // 0: nothing was done
  uint16_t agent = 0;
  bool narrow = false;  // an atomic for its own block alone
  bool loads = false;   // an atomic that writes nothing
  const char* what = "";

  bool by_same(const Step& other) const { return block == other.block && agent == other.agent; }
};

// What is known: for agent i, in entry i, up to which of its steps.
struct Clocks {
  using Known = std::vector<Clock>;
  int64_t block = -1;
  Known own;  // of the agents of this block
  // The part of it that the last fence between the generic and the asynchronous proxy covers: for
  // fences of shared memory, and for those of global memory too.
  Known proxied, proxied_global;
  // Of agents that use tensor memory, what fences of tcgen05 published; counted from the first of
  // these agents on.
  Known tensor;
  // Of other blocks: empty at first. Only atomics and fences order blocks of a launch.
  std::shared_ptr<const std::map<int64_t, Known>> others;

  bool know(const Step& step) const {
    if (step.clock == 0) return true;
    if (step.block != block) return others && know_other(step);
    return step.agent < own.size() && step.clock <= own[step.agent];
  }
  void learn(uint16_t agent, Clock clock) {
    if (own.size() <= agent) own.resize(agent + size_t{1});
    own[agent] = clock;
  }
  void join(const Clocks& from);
  // What the asynchronous proxy knows when it works for this agent. Of agents before `first`, which
  // use the generic proxy, that is what a fence between the two covered: the first argument.
  Clocks of_async_proxy(const Known& told, size_t first) const;

 private:
  bool know_other(const Step& step) const;
};

}  // namespace emu
