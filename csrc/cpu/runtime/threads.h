// The threads that a call runs on: OpenMP's, which torch's wheels and this library share on Linux.
// Elsewhere, and with FA_STD_THREADS, they are std::thread's. (ThreadSanitizer does not see libgomp's
// synchronisation and would report races that are none.)
#pragma once
#include <cstdint>

#if !defined(_OPENMP) && !defined(FA_STD_THREADS)
#define FA_STD_THREADS
#endif
#if defined(FA_STD_THREADS)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace fa {

// True if threads wait for the next call. libgomp ends those that it does not need.
#if defined(FA_STD_THREADS)
constexpr bool kThreadsStay = false;
#else
constexpr bool kThreadsStay = true;
#endif

// Calls work(their number) once on each of so many threads, the caller's among them, or of as many as
// there are; returns after the last.
template <class Work>
void on_threads(int64_t threads, const Work& work) {
#if defined(FA_STD_THREADS)
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back([&] { work(threads); });
  work(threads);
  for (std::thread& other : others) other.join();
#else
#pragma omp parallel num_threads(static_cast<int>(threads))
  work(int64_t{omp_get_num_threads()});
#endif
}

}  // namespace fa
