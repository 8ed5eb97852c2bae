// mbarriers: phases that end after so many arrivals and so many bytes. A thread that has waited for
// one knows what the arrived threads knew.
#include "block.h"

namespace emu {

namespace {

constexpr uint64_t kOpaque = 0x5EEDBA121E12B0B5;  // the content of its eight bytes, in every state

Mbarrier& valid_at(const char* site, uint32_t address) {
  const unsigned char* const at = shared_pointer(address, 8);
  const auto found = block->proxy.mbarriers.find(address);
  if (found == block->proxy.mbarriers.end() || !found->second.valid)
    fail("%s: no mbarrier at shared byte %u, expected mbarrier.init before", site,
         address - kWindow);
  uint64_t held;
  std::memcpy(&held, at, 8);
  if (held != kOpaque)
    fail("%s: the mbarrier at shared byte %u was overwritten", site, address - kWindow);
  return found->second;
}

// The same for one that a thread uses now.
Mbarrier& used_at(const char* site, uint32_t address) {
  Mbarrier& found = valid_at(site, address);
  note_atomic(shared_pointer(address, 8), 8, site, Access::kBoth, true);
  return found;
}

void end_phase_if_complete(Mbarrier& mbarrier) {
  if (mbarrier.pending || mbarrier.bytes) return;
  block->proxy.phases[static_cast<size_t>(mbarrier.index)] = ++mbarrier.phase;
  mbarrier.pending = mbarrier.expected;
  mbarrier.completed.join(mbarrier.arrived);
  mbarrier.completed.learn(block->agents.arrivals(mbarrier.index), mbarrier.phase);
  for (const int fiber : mbarrier.waiting) wake(fiber);
  mbarrier.waiting.clear();
}

}  // namespace

void mbarrier_init(const char* site, uint32_t address, uint32_t count) {
  if (skipped(site)) return;
  unsigned char* const at = shared_pointer(address, 8);
  if (!count || count >= 1u << 20) fail("%s: %u arrivals, expected 1 to 2^20 - 1", site, count);
  Mbarrier& mbarrier = block->proxy.mbarriers[address];
  if (mbarrier.valid)
    fail("%s: there is an mbarrier at shared byte %u already", site, address - kWindow);
  plain_write(at, 8, site);
  std::memcpy(at, &kOpaque, 8);
  mbarrier = Mbarrier();
  mbarrier.index = static_cast<int>(block->proxy.phases.size());
  block->proxy.phases.push_back(0);
  mbarrier.expected = mbarrier.pending = count;
  mbarrier.arrived.block = mbarrier.completed.block = block->number;
  mbarrier.valid = true;
}

void mbarrier_inval(const char* site, uint32_t address) {
  if (skipped(site)) return;
  Mbarrier& mbarrier = valid_at(site, address);
  if (!mbarrier.waiting.empty() || mbarrier.bytes)
    fail("%s: threads or bytes are still waited for at shared byte %u", site, address - kWindow);
  unsigned char* const at = shared_pointer(address, 8);
  plain_write(at, 8, site);
  std::memset(at, 0xFF, 8);
  mbarrier.valid = false;
}

void mbarrier_expect(const char* site, uint32_t address, uint32_t bytes) {
  if (skipped(site)) return;
  Mbarrier& mbarrier = used_at(site, address);
  mbarrier.bytes += bytes;
  if (mbarrier.bytes >= 1 << 20) fail("%s: more than 2^20 - 1 bytes are waited for", site);
}

void mbarrier_arrive(const char* site, uint32_t address, uint32_t count) {
  if (skipped(site)) return;
  Mbarrier& mbarrier = used_at(site, address);
  if (!count || count > mbarrier.pending)
    fail("%s: %u arrive at the mbarrier at shared byte %u, expected at least 1 and at most %u", site,
         count, address - kWindow, mbarrier.pending);
  Fiber& fiber = current();
  mbarrier.arrived.join(fiber.clocks);
  fiber.clocks.own[fiber.id]++;
  mbarrier.pending -= count;
  end_phase_if_complete(mbarrier);
}

bool mbarrier_test(const char* site, uint32_t address, uint32_t parity, bool patient) {
  if (skipped(site)) return true;
  if (parity > 1) fail("%s: parity %u, expected 0 or 1", site, parity);
  if (!patient) give_way();
  Mbarrier& mbarrier = used_at(site, address);
  while ((mbarrier.phase & 1) == parity) {
    if (!patient) return false;
    // The wait may time out before: callers ask again.
    if (options.schedule == kRandom && block->random() % 4 == 0) {
      wake(self->id);
      wait_for(site);
      return false;
    }
    mbarrier.waiting.push_back(self->id);
    wait_for(site);
    valid_at(site, address);
  }
  current().clocks.join(mbarrier.completed);
  return true;
}

Arrival mbarrier_arrival(const char* site, uint32_t address) {
  const Mbarrier& mbarrier = used_at(site, address);
  return {address, mbarrier.index, mbarrier.phase};
}

void bytes_arrive(const char* site, const Arrival& at, uint32_t bytes) {
  Mbarrier& mbarrier = block->proxy.mbarriers[at.address];
  if (!mbarrier.valid || mbarrier.index != at.index || mbarrier.phase != at.phase)
    return found(std::string(site) + ": it arrives at an mbarrier whose phase is over");
  mbarrier.bytes -= bytes;
  end_phase_if_complete(mbarrier);
}

void arrival_lands(const char* site, const Arrival& at, const Clocks& of) {
  Mbarrier& mbarrier = block->proxy.mbarriers[at.address];
  if (!mbarrier.valid || mbarrier.index != at.index || !mbarrier.pending)
    return found(std::string(site) + ": it arrives at an mbarrier that waits for no arrival");
  mbarrier.arrived.join(of);
  mbarrier.pending--;
  end_phase_if_complete(mbarrier);
}

void mbarriers_end() {
  for (const auto& [address, mbarrier] : block->proxy.mbarriers)
    if (mbarrier.valid && mbarrier.bytes < 0)
      return found("ends with " + std::to_string(-mbarrier.bytes) + " bytes that came to the mbarrier at "
                   "shared byte " + std::to_string(address - kWindow) + " and that nobody expected");
}

}  // namespace emu
