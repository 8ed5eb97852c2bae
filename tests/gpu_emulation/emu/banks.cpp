// Bank conflicts of shared memory: a cycle gives one word of each bank. The lanes of a warp are
// served in turns of 128 bytes: all 32 with words, 16 with pairs, 8 with chunks of 16 bytes.
#include <algorithm>
#include <set>

#include "block.h"

namespace emu {

namespace {

constexpr int kBanks = 32, kWordBytes = 4;

// The cycles that these accesses take beyond the first.
long conflicts(const std::vector<uint32_t>& offsets, int bytes) {
  std::array<std::set<uint32_t>, kBanks> words;
  for (const uint32_t offset : offsets)
    for (uint32_t word = offset / kWordBytes; word * kWordBytes < offset + bytes; ++word)
      words[word % kBanks].insert(word);
  size_t most = 1;
  for (const auto& of_bank : words) most = std::max(most, of_bank.size());
  return static_cast<long>(most) - 1;
}

}  // namespace

void note_turn(const char* what, const std::vector<uint32_t>& offsets, int bytes) {
  Report::Banks& banks = report.banks[what];
  banks.turns++;
  banks.conflicts += conflicts(offsets, bytes);
}

void note_bank(const char* what, const void* place, ptrdiff_t offset, int bytes) {
  const long time = block->times[{place, self->id}]++;
  auto& together = block->together[{place, self->warp, time}];
  together.what = what;
  together.bytes = bytes;
  together.offset[self->lane] = static_cast<uint32_t>(offset);
  together.lanes |= 1u << self->lane;
}

void count_banks(Block& ends) {
  for (const auto& [key, together] : ends.together) {
    const int at_a_time = std::min(32, kBanks * kWordBytes / std::max(together.bytes, kWordBytes));
    for (int first = 0; first < 32; first += at_a_time) {
      std::vector<uint32_t> offsets;
      for (int lane = first; lane < first + at_a_time; ++lane)
        if (together.lanes >> lane & 1) offsets.push_back(together.offset[lane]);
      if (!offsets.empty()) note_turn(together.what, offsets, together.bytes);
    }
  }
  ends.together.clear();
  ends.times.clear();
}

}  // namespace emu
