// Who knows of whose work: vector clocks. Two accesses race when neither happened before the other
// (FastTrack, Flanagan and Freund 2009).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emu {

using Clock = uint32_t;

// One agent at one moment, and what it did. Agents of a block are its threads, and after them the
// asynchronous copies of each thread, which work beside it.
struct Step {
  int64_t block = -1;
  Clock clock = 0;  // 0: nothing was done
  uint16_t agent = 0;
  bool narrow = false;  // an atomic for its own block alone
  const char* what = "";

  bool by_same(const Step& other) const { return block == other.block && agent == other.agent; }
};

// What is known of agents: entry i, up to which of agent i's steps.
struct Clocks {
  using Known = std::vector<Clock>;
  int64_t block = -1;
  Known own;  // of the agents of this block
  // Of other blocks: nothing at first. Only atomics and fences order blocks of a launch.
  std::shared_ptr<const std::map<int64_t, Known>> others;

  bool know(const Step& step) const {
    if (step.clock == 0) return true;
    return step.block == block ? step.clock <= own[step.agent] : others && know_other(step);
  }
  void join(const Clocks& from);

 private:
  bool know_other(const Step& step) const;
};

}  // namespace emu
