// cp.async: copies to shared memory that land when a thread waits for their group, or any time
// before. Lazily they land as late as possible, and until then the target holds NaN. To the checker
// a thread's copies are a separate agent, and groups are its steps: a wait makes them known.
#include "block.h"

namespace emu {

static void land(const Copy& copy) {
  unsigned char* to = shared_pointer(copy.to, copy.size);
  std::memcpy(to, copy.from, copy.bytes);
  std::memset(to + copy.bytes, 0, copy.size - copy.bytes);
}

void copy(uint32_t to, const void* from, int size, int bytes, const char* site) {
  if (reinterpret_cast<uintptr_t>(from) % size)
    fail("cp.async: the global address is not a multiple of %d", size);
  if (bytes < 0 || bytes > size) fail("cp.async of %d bytes, of %d", bytes, size);
  unsigned char* target = shared_pointer(to, size);
  const Copy copy{to, static_cast<const unsigned char*>(from), size, bytes};
  note_copy(to, from, size, bytes, site ? site : __builtin_return_address(0));
  if (options.lazy)
    std::memset(target, 0xFF, size);
  else
    land(copy);
  current().issued.push_back(copy);
}

void copies_commit(const char* site) {
  if (skipped(site)) return;
  Fiber& fiber = current();
  fiber.pending.push_back(std::move(fiber.issued));
  fiber.issued.clear();
  fiber.committed++;
}

void copies_wait(const char* site, int pending) {
  if (skipped(site)) return;
  Fiber& fiber = current();
  while (static_cast<int>(fiber.pending.size()) > pending) {
    if (options.lazy)
      for (const Copy& copy : fiber.pending.front()) land(copy);
    fiber.pending.pop_front();
    fiber.clocks.own[block->agents.copies(fiber.id)]++;
  }
}

}  // namespace emu
