// Decides if this process may use the tiles of AMX, and enables them. The chip must announce them,
// the system must save them with a thread's state, and each process must request them from the
// kernel once. On one virtual machine all three are so and the first instruction is still illegal,
// so one is tried.
#pragma once
#include <cpuid.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "amx.h"

namespace fa {

inline bool announces_amx() {
  unsigned a, b, c, d;
  const unsigned tiles = 1u << 24, bf16 = 1u << 22;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) && (d & bf16);
}
inline bool system_saves_tiles() {
  unsigned a, b, c, d, low, high;
  const unsigned osxsave = 1u << 27, both = 3u << 17;  // XTILECFG and XTILEDATA
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave)) return false;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & both) == both;
}
inline bool kernel_permits_tiles() {
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

namespace trial {
inline sigjmp_buf back;
inline pthread_t thread;
inline void illegal(int signal_number) {
  if (pthread_equal(pthread_self(), thread)) siglongjmp(back, 1);
  signal(signal_number, SIG_DFL);  // raised by another thread: it will fault again
}
}  // namespace trial
// Runs a function that may hit an illegal instruction, then restores the process's handler.
inline bool survives(void (*f)()) {
  struct sigaction mine = {}, previous;
  mine.sa_handler = trial::illegal;
  sigemptyset(&mine.sa_mask);
  trial::thread = pthread_self();
  if (sigaction(SIGILL, &mine, &previous)) return false;
  const bool legal = sigsetjmp(trial::back, 1) == 0;
  if (legal) f();
  sigaction(SIGILL, &previous, nullptr);
  return legal;
}
inline void multiply_on_tiles() {
  amx::configure(amx::whole_tiles());
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>();
  amx::dot<0, 1, 2>();
  amx::release();
}

// Why tiles may not be used, or an empty string. Determined once.
inline const std::string& tiles_refused() {
  static const std::string why = []() -> std::string {
    if (!announces_amx()) return "the chip has no AMX for bfloat16";
    if (!system_saves_tiles()) return "the system does not save tiles (XCR0)";
    if (!kernel_permits_tiles())
      return std::string("the kernel does not permit tiles (arch_prctl: ") + strerror(errno) + ")";
    if (!survives(multiply_on_tiles)) return "tiles are announced and permitted, but illegal";
    return "";
  }();
  return why;
}

}  // namespace fa
