// Threads that wait for each other: operations of a warp, and barriers.
#include "block.h"

namespace emu {

// The meeting of this warp that these lanes are to join, or a free one.
static Meeting& meeting_of(const char* name, uint32_t mask) {
  Meeting* free = nullptr;
  for (Meeting& meeting : block->meetings[self->warp]) {
    if (!meeting.name) {
      if (!free) free = &meeting;
    } else if (meeting.mask & mask) {
      if (meeting.name != std::string(name) || meeting.mask != mask)
        fail("warp %d has diverged: lane %d is at %s with mask 0x%x, others wait at %s with mask "
             "0x%x", self->warp, self->lane, name, mask, meeting.name, meeting.mask);
      return meeting;
    }
  }
  free->name = name;
  free->mask = mask;
  return *free;
}

void warp_meet(const char* name, uint32_t mask, void* brought, Act act) {
  if (!(mask >> self->lane & 1))
    fail("%s: lane %d is not in its own mask 0x%x", name, self->lane, mask);
  Meeting& meeting = meeting_of(name, mask);
  meeting.brought[self->lane] = brought;
  if (++meeting.arrived < __builtin_popcount(mask)) {
    meeting.waiting.push_back(self->id);
    wait_for(name);
    return;
  }
  act(meeting.brought, mask);
  for (int fiber : meeting.waiting) wake(fiber);
  meeting = Meeting{};
}

void warp_sync(const char* site, uint32_t mask) {
  if (skipped(site)) return;
  warp_meet(site, mask, nullptr, [](void**, uint32_t mask) {
    const int first = self->warp * 32;
    Clocks all(block->fibers.size());
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) all.join(block->fibers[first + lane].clocks);
    for (int lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      block->fibers[first + lane].clocks = all;
      block->fibers[first + lane].clocks[first + lane]++;
    }
  });
}

static void arrive(const char* site, int id, int threads, bool wait) {
  if (skipped(site)) return;
  if (id < 0 || id >= kBarriers) fail("%s: barrier %d, expected 0 to 15", site, id);
  const int everyone = static_cast<int>(block->fibers.size());
  if (threads < 0) threads = everyone;
  if (threads % 32 || threads == 0 || threads > everyone)
    fail("%s: %d threads, expected whole warps of a block of %d", site, threads, everyone);
  Barrier& barrier = block->barriers[id];
  if (barrier.arrived && barrier.threads != threads)
    fail("%s: barrier %d for %d threads, others wait there for %d", site, id, threads,
         barrier.threads);
  barrier.threads = threads;
  if (barrier.clocks.empty()) barrier.clocks.resize(block->fibers.size());

  Fiber& fiber = current();
  barrier.clocks.join(fiber.clocks);
  fiber.clocks[fiber.id]++;
  if (++barrier.arrived < threads) {
    if (!wait) return;
    barrier.waiting.push_back(fiber.id);
    wait_for(std::string(site) + " (barrier " + std::to_string(id) + ")");
    return;
  }
  for (int waiting : barrier.waiting) {
    block->fibers[waiting].clocks.join(barrier.clocks);
    wake(waiting);
  }
  if (wait) fiber.clocks.join(barrier.clocks);
  barrier = Barrier{};
}

void barrier_sync(const char* site, int id, int threads) { arrive(site, id, threads, true); }
void barrier_arrive(const char* site, int id, int threads) { arrive(site, id, threads, false); }

}  // namespace emu
