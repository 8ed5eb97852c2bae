// Who knows of whose work: vector clocks, and for shared memory the last accesses to each cell.
// Two accesses race when neither happened before the other (FastTrack, Flanagan and Freund 2009).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace emu {

using Clock = uint32_t;

// Entry i: up to which of agent i's steps its work is known to have happened. Agents are the
// threads of a block, and after them what works on its own beside them.
struct Clocks : std::vector<Clock> {
  using std::vector<Clock>::vector;
  void join(const Clocks& other) {
    for (size_t i = 0; i < size(); ++i) (*this)[i] = std::max((*this)[i], other[i]);
  }
};

// One agent at one moment, and what it did.
struct Step {
  int agent = -1;
  Clock clock = 0;
  const char* what = "";
  bool known_to(const Clocks& clocks) const { return agent < 0 || clock <= clocks[agent]; }
};

// Shared memory in cells of two bytes, the smallest element.
class Shadow {
 public:
  static constexpr int kCellBytes = 2, kReaders = 8;
  using Complain = void (*)(const char* kind, uint32_t offset, const Step& before, const Step& now);

  Shadow() = default;
  Shadow(size_t bytes, Complain complain)
      : cells_(bytes / kCellBytes + 1), complain_(complain) {}

  void read(uint32_t offset, int bytes, const Step& now, const Clocks& known);
  void write(uint32_t offset, int bytes, const Step& now, const Clocks& known);
  // A copy into the cells has begun and may land at any time until `write` says that it has.
  void begin_copy(uint32_t offset, int bytes, const Step& now, const Clocks& known);

 private:
  struct Cell {
    Step written;
    std::array<Step, kReaders> readers;
    int reader_count = 0;
    bool fresh = true, in_flight = false;
  };
  template <class Visit>
  void visit(uint32_t offset, int bytes, Visit each);
  void check_write(Cell& cell, uint32_t offset, const Step& now, const Clocks& known);

  std::vector<Cell> cells_;
  Complain complain_ = nullptr;
  unsigned evicted_ = 0;
};

}  // namespace emu
