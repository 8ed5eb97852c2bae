// Who knows of whose work: vector clocks. Two accesses race when neither happened before the other
// (FastTrack, Flanagan and Freund 2009).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emu {

using Clock = uint32_t;

// One agent at one moment, and what it did. Agents of a block are its threads, and after them those
// that work beside them: see Agents.
struct Step {
  int64_t block = -1;
  Clock clock = 0;  // 0: nothing was done
  uint16_t agent = 0;
  bool narrow = false;  // an atomic for its own block alone
  bool loads = false;   // an atomic that writes nothing
  const char* what = "";

  bool by_same(const Step& other) const { return block == other.block && agent == other.agent; }
};

// What is known of agents: entry i, up to which of agent i's steps.
struct Clocks {
  using Known = std::vector<Clock>;
  int64_t block = -1;
  Known own;  // of the agents of this block
  // Of these, up to the last fence between the generic and the asynchronous proxy: one of shared
  // memory, and one of global memory too.
  Known proxied, proxied_global;
  // Of other blocks: nothing at first. Only atomics and fences order blocks of a launch.
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
  // What the asynchronous proxy knows that works for this agent: of agents before `first`, which use
  // the generic one, what a fence between the two has told, which is one of the above.
  Clocks of_async_proxy(const Known& told, size_t first) const;

 private:
  bool know_other(const Step& step) const;
};

}  // namespace emu
