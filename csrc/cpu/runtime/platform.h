// What operating systems spell differently: aligned memory, fork, a thread's name, time, objects and
// short sleep, and what an Arm chip has.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>

#if defined(_WIN32)
#include <malloc.h>
extern "C" {
__declspec(dllimport) unsigned long __stdcall GetCurrentThreadId(void);
__declspec(dllimport) unsigned long __stdcall FlsAlloc(void(__stdcall*)(void*));
__declspec(dllimport) void* __stdcall FlsGetValue(unsigned long);
__declspec(dllimport) int __stdcall FlsSetValue(unsigned long, void*);
}
#else
#include <pthread.h>
#include <time.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace fa {

// `size` is a multiple of 64. Null if there is no memory.
inline char* allocate_lines(size_t size) {
#if defined(_WIN32)
  return static_cast<char*>(_aligned_malloc(size, 64));
#else
  return static_cast<char*>(std::aligned_alloc(64, size));
#endif
}
inline void free_lines(char* lines) {
#if defined(_WIN32)
  _aligned_free(lines);
#else
  std::free(lines);
#endif
}

// Calls f in each process that fork() makes.
inline int at_fork_of_child([[maybe_unused]] void (*f)()) {
#if defined(_WIN32)
  return 0;
#else
  return pthread_atfork(nullptr, nullptr, f);
#endif
}

// The number of this thread, as Python's threading.get_ident() gives it.
inline uint64_t thread_id() {
#if defined(_WIN32)
  return GetCurrentThreadId();
#else
  return uint64_t(pthread_self());
#endif
}

// The T of this thread, which ends with it.
template <class T>
T& of_thread() {
#if defined(_WIN32)  // mingw frees the memory of a thread_local object before its destructor runs
  static const unsigned long slot = FlsAlloc([](void* kept) { delete static_cast<T*>(kept); });
  void* kept = FlsGetValue(slot);
  if (!kept) FlsSetValue(slot, kept = new T);
  return *static_cast<T*>(kept);
#else
  static thread_local T kept;
  return kept;
#endif
}

// Leaves the core to others for a while that is short beside a run. The shortest sleep of Windows is
// a tick of its clock, up to 16 milliseconds: there the thread asks again at once.
inline void nap() {
#if defined(_WIN32)
  std::this_thread::yield();
#else
  std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

// Tells the core that this thread waits for another one.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// CPU time of this thread; on Windows, time.
inline double thread_seconds() {
#if defined(_WIN32)
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
#else
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
#endif
}

#if defined(__aarch64__)
// BFDOT and BFMMLA: FEAT_BF16.
inline bool has_bf16_products() {
#if defined(__linux__)
  constexpr unsigned long bf16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return getauxval(AT_HWCAP2) & bf16;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
// SVE, with vectors of 256 bits for this thread.
inline bool has_sve256() {
#if defined(__linux__)
  constexpr unsigned long sve = 1 << 22;             // HWCAP_SVE
  constexpr int get_length = 51, in_bytes = 0xFFFF;  // PR_SVE_GET_VL
  return (getauxval(AT_HWCAP) & sve) && (prctl(get_length) & in_bytes) == 32;
#else
  return false;
#endif
}
#endif

}  // namespace fa
