// The memory of the emulator itself.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

constexpr int kResident = 4;  // blocks that run at a time
constexpr size_t kStackBytes = 128 * 1024;
// Zones before and after a block's shared memory, which nothing should access.
constexpr size_t kGuardBytes = 1 << 20, kWindowBytes = 2 * kGuardBytes + 256 * 1024;

// A range of addresses; the system provides the pages that are touched.
struct Arena {
  uintptr_t begin = 0;
  size_t bytes;

  explicit Arena(size_t bytes);
  bool holds(uintptr_t at) const { return at - begin < bytes; }
  unsigned char* at(size_t offset) const { return reinterpret_cast<unsigned char*>(begin + offset); }
};
extern Arena stacks, windows, parameters;

}  // namespace emu
