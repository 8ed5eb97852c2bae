// The functions that Python calls through ctypes: options before a launch, findings after it.
#include <cstdio>

#include "block.h"

namespace emu {

uint64_t nanoseconds() {
  static thread_local uint64_t now = 0;
  return now += 1000;
}

}  // namespace emu

extern "C" {

// As emulator.py has them.
struct EmuOptions {
  uint64_t seed;
  int64_t shared_limit;
  int32_t schedule, lazy, check, same_value_stores, pessimistic, banks,
      tensor_fences;
  const char* disabled;
};

void emu_reset(const EmuOptions* given) {
  emu::Options& options = emu::options;
  options.seed = given->seed;
  options.shared_limit = static_cast<size_t>(given->shared_limit);
  options.schedule = static_cast<emu::Schedule>(given->schedule);
  options.lazy = given->lazy;
  options.check = given->check;
  options.same_value_stores = given->same_value_stores;
  options.pessimistic = given->pessimistic;
  options.banks = given->banks;
  options.tensor_fences = given->tensor_fences;
  options.disabled = given->disabled;
  emu::report = emu::Report{};
}

// The number of findings; the first of them; the sites that ran, a line each; and for each kind of
// access to shared memory a line: its name, its turns and how many cycles conflicts cost them.
long emu_findings(char* first, char* sites, char* banks, size_t bytes) {
  snprintf(first, bytes, "%s", emu::report.first.c_str());
  std::string lines;
  for (const std::string& site : emu::report.sites) lines += site + "\n";
  snprintf(sites, bytes, "%s", lines.c_str());
  lines.clear();
  for (const auto& [what, of] : emu::report.banks)
    lines += what + "\t" + std::to_string(of.turns) + "\t" + std::to_string(of.conflicts) + "\n";
  snprintf(banks, bytes, "%s", lines.c_str());
  return emu::report.findings;
}

long emu_multiplies() { return emu::report.multiplies; }
long emu_switches() { return emu::report.switches; }
}
