// The last accesses to each place of a memory, which new ones are checked against.
#pragma once
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "clocks.h"

namespace emu {

class Shadow {
 public:
  enum Kind { kUninitialised, kWriteRead, kWriteWrite, kReadWrite, kOfAtomics };
  using Complain = void (*)(Kind kind, uintptr_t at, const Step& before, const Step& now);
  using Forgotten = bool (*)(int64_t block);

  // `fresh`: memory must be written before it is read. `forgotten`: has this block ended without
  // publishing? Then one reader is enough: it races with every write.
  Shadow(bool fresh, Complain complain, Forgotten forgotten)
      : fresh_(fresh), complain_(complain), forgotten_(forgotten) {}

  void read(uintptr_t at, int bytes, const Step& now, const Clocks& known);
  void write(uintptr_t at, int bytes, const Step& now, const Clocks& known) {
    write(at, bytes, now, known, known);
  }
  void write(uintptr_t at, int bytes, const Step& now, const Clocks& known,
             const Clocks& known_of_readers);
  // `reads`: it uses the old value.
  void access_atomically(uintptr_t at, int bytes, bool reads, const Step& now, const Clocks& known) {
    access_atomically(at, bytes, reads, now, known, known);
  }
  void access_atomically(uintptr_t at, int bytes, bool reads, const Step& now, const Clocks& known,
                         const Clocks& known_of_readers);
  void clear();

 private:
  static constexpr uintptr_t kChunkBytes = 16;  // of the largest element
  static constexpr uintptr_t kPageBytes = 1024;

  // What agents of one warp did in the same step: the first of them, and which of 32.
  struct Group {
    Step first;
    uint32_t lanes = 0;
    bool takes(const Step& step) const {
      return first.clock == step.clock && first.block == step.block &&
             first.agent / 32 == step.agent / 32 && first.narrow == step.narrow &&
             first.loads == step.loads;
    }
  };
  // Accesses of which none knows of another.
  struct Crowd {
    std::vector<Group> readers, atomics;
  };
  struct Cell {
    Step written;
    Group read;  // the last, since it was written
    std::unique_ptr<Crowd> crowd;  // others before, which are not known to the last
    bool fresh = false;
  };
  // One cell, until a part of it is accessed: then one for every two bytes, which is the size of
  // most elements; and for each byte once an access begins or ends between two.
  struct Chunk {
    Cell whole;
    std::vector<Cell> parts;
  };
  using Page = std::array<Chunk, kPageBytes / kChunkBytes>;
  struct Recent {
    uintptr_t number = ~uintptr_t(0);
    Page* page = nullptr;
  };

  Chunk& chunk_at(uintptr_t at);
  void split(Chunk& chunk, size_t parts);
  template <class Visit>
  void visit(uintptr_t at, int bytes, Visit each);
  bool know_all(const std::vector<Group>& groups, uintptr_t at, Kind kind, const Step& now,
                const Clocks& known, bool of_loads = true);
  bool know_all(const Cell& cell, uintptr_t at, Kind of_readers, const Step& now,
                const Clocks& known);
  void remember(std::vector<Group>& groups, const Group& one, const Clocks& known);

  bool fresh_;
  Complain complain_;
  Forgotten forgotten_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::vector<std::unique_ptr<Page>> spare_;
  std::array<Recent, 256> recent_;
};

}  // namespace emu
