// Where memory lies that belongs to the emulator.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

constexpr int kResident = 4;  // blocks that run at a time
constexpr size_t kStackBytes = 128 * 1024;
// Before and after a block's shared memory is a zone in which nobody has business.
constexpr size_t kGuardBytes = 1 << 20, kWindowBytes = 2 * kGuardBytes + 256 * 1024;

// Addresses, of which the system gives the pages that are touched.
struct Arena {
  uintptr_t begin = 0;
  size_t bytes;

  explicit Arena(size_t bytes);
  bool holds(uintptr_t at) const { return at - begin < bytes; }
  unsigned char* at(size_t offset) const { return reinterpret_cast<unsigned char*>(begin + offset); }
};
extern Arena stacks, windows, parameters;

}  // namespace emu
