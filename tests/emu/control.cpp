// What Python calls, by way of ctypes: options before a launch, findings after it.
#include <cstdio>

#include "block.h"

extern "C" {

void emu_reset(uint64_t seed, int schedule, int lazy, int check, const char* disabled) {
  emu::options.seed = seed;
  emu::options.schedule = static_cast<emu::Schedule>(schedule);
  emu::options.lazy = lazy;
  emu::options.check = check;
  emu::options.disabled = disabled;
  emu::report = emu::Report{};
}

// The number of findings; the first of them, and the sites that ran, a line each.
long emu_findings(char* first, char* sites, size_t bytes) {
  snprintf(first, bytes, "%s", emu::report.first.c_str());
  std::string lines;
  for (const std::string& site : emu::report.sites) lines += site + "\n";
  snprintf(sites, bytes, "%s", lines.c_str());
  return emu::report.findings;
}

long emu_multiplies() { return emu::report.multiplies; }
long emu_switches() { return emu::report.switches; }
}
