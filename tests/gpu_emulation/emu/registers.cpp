// setmaxnreg: warps return registers to their block's pool, and wait there for more. The pool has
// what the block got at its launch: the registers that the kernel was compiled for.
#include <algorithm>

#include "block.h"

namespace emu {

int launch_registers = -1;

namespace {

constexpr int kOfMultiprocessor = 64 << 10, kLeast = 24, kMost = 256, kStep = 8;

// Of each thread. Of a kernel from g++ no bounds are known: as for a single block of this size.
int at_launch(const char* site) {
  if (launch_registers == 0)
    fail("%s: its kernel has neither .maxnreg nor .minnctapersm, and ptxas ignores it", site);
  if (launch_registers > 0) return launch_registers;
  const int threads = static_cast<int>(block->warps.size() + 3) / 4 * 128;
  return std::min(kMost, kOfMultiprocessor / threads / kStep * kStep);
}

struct Change {
  const char* site;
  int count;
  bool more;
};

// All four warps execute each of these instructions, and synchronise before the next, except one
// that changes nothing: Triton has these.
void expect_in_step(const Change& change, const Registers& of) {
  const auto warp = static_cast<size_t>(self->warp), first = warp / 4 * 4;
  if (first + 4 > of.warps.size())
    fail("%s: warp %zu of %zu, expected one of a whole warpgroup of four", change.site, warp,
         of.warps.size());
  const size_t done = of.warps[warp].steps.size();
  const bool changes = done && change.count != of.warps[warp].has;
  for (size_t i = first; i < first + 4; ++i) {
    if (i == warp) continue;
    const std::vector<Step>& steps = of.warps[i].steps;
    if (changes && (steps.size() < done || !current().clocks.know(steps[done - 1])))
      fail("%s: warp %zu has not synchronised with warp %zu since the setmaxnreg before",
           change.site, warp, i);
    if (steps.size() > done && std::strcmp(steps[done].what, change.site))
      fail("warps of a warpgroup have diverged: warp %zu is at %s, warp %zu was at %s", warp,
           change.site, i, steps[done].what);
  }
}

void change_registers(void** brought, uint32_t) {
  const Change& change = *static_cast<const Change*>(brought[0]);
  Registers& of = block->proxy.registers;
  if (of.warps.empty()) {
    of.warps.resize(block->warps.size());
    for (WarpRegisters& each : of.warps) each.has = each.asks = at_launch(change.site);
  }
  expect_in_step(change, of);
  WarpRegisters& mine = of.warps[static_cast<size_t>(self->warp)];
  if (change.more ? change.count < mine.has : change.count > mine.has)
    fail("%s: %d registers, expected %s than the %d that it has", change.site, change.count,
         change.more ? "no less" : "no more", mine.has);
  mine.steps.push_back(current().step(change.site));
  mine.asks = change.count;
  if (change.more) return;
  of.spare += 32 * (mine.has - mine.asks);
  mine.has = mine.asks;
  for (const int thread : of.waiting) wake(thread);
  of.waiting.clear();
}

}  // namespace

void set_registers(const char* site, int count, bool more) {
  if (skipped(site)) return;
  if (count < kLeast || count > kMost || count % kStep)
    fail("%s: %d registers, expected a multiple of %d from %d to %d", site, count, kStep, kLeast,
         kMost);
  Change mine{site, count, more};
  warp_meet(site, kWholeWarp, &mine, change_registers, site);
  Registers& of = block->proxy.registers;
  WarpRegisters& warp = of.warps[static_cast<size_t>(self->warp)];
  while (warp.has < count && 32 * (count - warp.has) > of.spare) {
    of.waiting.push_back(self->id);
    wait_for(site);
  }
  of.spare -= 32 * (count - warp.has);  // by the first lane; the others find it done
  warp.has = count;
}

void registers_end() {
  const std::vector<WarpRegisters>& warps = block->proxy.registers.warps;
  for (size_t i = 0; i < warps.size(); ++i)
    if (const size_t all = warps[i / 4 * 4].steps.size(); warps[i].steps.size() != all)
      return found("warps of a warpgroup have diverged: warp " + std::to_string(i) +
                   " ends after " + std::to_string(warps[i].steps.size()) +
                   " of setmaxnreg, warp " + std::to_string(i / 4 * 4) + " after " +
                   std::to_string(all));
}

std::string registers_wanted() {
  const Registers& of = block->proxy.registers;
  if (of.waiting.empty()) return "";
  int warps = 0, more = 0;
  for (const WarpRegisters& each : of.warps)
    if (each.asks > each.has) {
      warps++;
      more += 32 * (each.asks - each.has);
    }
  return "; " + std::to_string(of.spare) + " registers of the block's pool are free, " +
         std::to_string(warps) + " warps wait for " + std::to_string(more);
}

}  // namespace emu
