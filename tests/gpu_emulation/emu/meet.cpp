// Threads that wait for each other: operations of a warp, and barriers.
#include "block.h"

namespace emu {

// The meeting of this warp that these lanes join, or a new one.
static Meeting& meeting_of(const char* name, const void* place, const char* site, uint32_t mask) {
  Warp& warp = block->warps[self->warp];
  for (int i = 0; i < warp.meetings; ++i) {
    Meeting& meeting = warp.meeting[i];
    if (!(meeting.mask & mask)) continue;
    if (meeting.place != place || meeting.mask != mask ||
        (meeting.name != name && strcmp(meeting.name, name)))
      fail("warp %d has diverged: lane %d is at %s with mask 0x%x, others wait at %s with mask "
           "0x%x%s", self->warp, self->lane, site, mask, meeting.site, meeting.mask,
           meeting.place != place ? ", another place in the program" : "");
    return meeting;
  }
  Meeting& meeting = warp.meeting[warp.meetings++];
  meeting.name = name;
  meeting.site = site;
  meeting.place = place;
  meeting.mask = mask;
  meeting.arrived = 0;
  return meeting;
}

// Ends the meeting; returns the other lanes that wait here.
static uint32_t disperse(Meeting& meeting) {
  const uint32_t others = meeting.arrived & ~(1u << self->lane);
  Warp& warp = block->warps[self->warp];
  Meeting& last = warp.meeting[--warp.meetings];
  if (&last != &meeting) meeting = last;
  return others;
}

static void wake_lanes(uint32_t lanes) {
  for (; lanes; lanes &= lanes - 1) wake(self->warp * 32 + __builtin_ctz(lanes));
}

// True for the last to arrive, which need not wait.
static bool join(Meeting& meeting, void* brought) {
  meeting.brought[self->lane] = brought;
  meeting.arrived |= 1u << self->lane;
  const uint32_t live = block->warps[self->warp].live;
  return meeting.arrived == (meeting.exits_count ? meeting.mask & live : meeting.mask);
}

static bool act(Meeting& meeting) {
  meeting.act(meeting.brought, meeting.arrived);
  wake_lanes(disperse(meeting));
  return true;
}

void warp_meet(const char* name, uint32_t mask, void* brought, Act what, const void* place,
               const char* site) {
  if (!site) site = name;
  if (!(mask >> self->lane & 1))
    fail("%s: lane %d is not in its own mask 0x%x", site, self->lane, mask);
  Meeting& meeting = meeting_of(name, place, site, mask);
  meeting.exits_count = !place;
  meeting.all_here = act;
  meeting.act = what;
  if (join(meeting, brought))
    act(meeting);
  else
    wait_for(site);
}

void warp_sync(const char* site, uint32_t mask) {
  if (skipped(site)) return;
  const auto order = [](void**, uint32_t lanes) {
    Fiber* const first = &block->fibers[self->warp * 32];
    Clocks all = first[__builtin_ctz(lanes)].clocks;
    for (uint32_t rest = lanes; rest; rest &= rest - 1)
      all.join(first[__builtin_ctz(rest)].clocks);
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
      Fiber& fiber = first[__builtin_ctz(rest)];
      fiber.clocks = all;
      fiber.clocks.own[fiber.id]++;
    }
  };
  warp_meet("bar.warp.sync", mask, nullptr, order, nullptr, site);
}

// -- barriers: a warp arrives at one when all of its lanes are at the same instruction -------------

namespace {

struct Arrival {
  const char* site;
  int id, threads;
  bool all, wait;
};

bool complete(const Barrier& barrier) {
  if (!barrier.all) return barrier.arrived >= barrier.threads;
  for (size_t i = 0; i < block->warps.size(); ++i)
    if (block->warps[i].live && !(barrier.warps >> i & 1)) return false;
  return barrier.warps != 0;
}

void release(Barrier& barrier) {
  for (int waiting : barrier.waiting) {
    Fiber& fiber = block->fibers[waiting];
    const Clock own = fiber.clocks.own[waiting];
    fiber.clocks = barrier.clocks;
    fiber.clocks.own[waiting] = own;
    if (waiting != self->id) wake(waiting);
  }
  barrier.threads = barrier.arrived = 0;
  barrier.warps = 0;
  barrier.waiting.clear();
}

// What the lanes of a warp ask for, from the first of them; all must agree with it.
const Arrival& one_for_all(const Meeting& meeting) {
  const int first = __builtin_ctz(meeting.arrived);
  const auto& mine = *static_cast<Arrival*>(meeting.brought[first]);
  for (uint32_t rest = meeting.arrived; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const auto& other = *static_cast<Arrival*>(meeting.brought[lane]);
    if (mine.id != other.id || mine.threads != other.threads || mine.wait != other.wait)
      fail("%s: lane %d at barrier %d for %d threads, lane %d at barrier %d for %d, expected one "
           "for all lanes of a warp", mine.site, first, mine.id, mine.threads, lane, other.id,
           other.threads);
  }
  return mine;
}

// True if that completes the barrier.
bool warp_arrives(Meeting& meeting) {
  const Arrival arrival = one_for_all(meeting);
  Barrier& barrier = block->barriers[arrival.id];
  if (barrier.arrived && barrier.threads != arrival.threads)
    fail("%s: barrier %d for %d threads, others wait there for %d", arrival.site, arrival.id,
         arrival.threads, barrier.threads);
  const uint32_t lanes = meeting.arrived;
  const bool first = !barrier.arrived;
  barrier.all = arrival.all && (first || barrier.all);
  barrier.threads = arrival.threads;
  barrier.arrived += 32;
  barrier.warps |= 1u << self->warp;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    Fiber& fiber = block->fibers[self->warp * 32 + __builtin_ctz(rest)];
    if (first && rest == lanes)
      barrier.clocks = fiber.clocks;
    else
      barrier.clocks.join(fiber.clocks);
    fiber.clocks.own[fiber.id]++;
    if (arrival.wait) barrier.waiting.push_back(fiber.id);
  }
  const uint32_t others = disperse(meeting);
  if (!arrival.wait) wake_lanes(others);
  const bool done = complete(barrier);
  if (done) release(barrier);
  return done;
}

void arrive(const char* site, int id, int threads, bool wait, const void* place) {
  if (skipped(site)) return;
  if (id < 0 || id >= kBarriers) fail("%s: barrier %d, expected 0 to 15", site, id);
  const int everyone = static_cast<int>(block->fibers.size());
  const bool all = threads < 0;
  if (all) threads = everyone;
  if (threads % 32 || threads == 0 || threads > everyone)
    fail("%s: %d threads, expected whole warps of a block of %d", site, threads, everyone);
  Arrival mine{site, id, threads, all, wait};
  Meeting& meeting = meeting_of(site, place, site, kWholeWarp);
  meeting.exits_count = all;
  meeting.all_here = warp_arrives;
  const bool last = join(meeting, &mine);
  const bool done = last && warp_arrives(meeting);
  if (!last || (wait && !done)) wait_for(site, id);
}

}  // namespace

void barrier_sync(const char* site, int id, int threads) {
  arrive(site, id, threads, true, place_here(__builtin_return_address(0)));
}
void barrier_arrive(const char* site, int id, int threads) {
  arrive(site, id, threads, false, place_here(__builtin_return_address(0)));
}

void lane_exits() {
  Warp& warp = block->warps[self->warp];
  warp.live &= ~(1u << self->lane);
  for (int i = warp.meetings - 1; i >= 0; --i) {
    Meeting& meeting = warp.meeting[i];
    if (meeting.exits_count && meeting.arrived == (meeting.mask & warp.live) && meeting.arrived)
      meeting.all_here(meeting);
  }
  if (warp.live) return;
  for (Barrier& barrier : block->barriers)
    if (barrier.all && barrier.arrived && complete(barrier)) release(barrier);
}

}  // namespace emu
