// The environment of a kernel that g++ compiles to run on a CPU: the CUDA built-ins that kernels
// use, and the primitives behind csrc/cuda/ptx.cuh. Force-included (g++ -include emu.h) before the
// kernel.
//
// A block runs on one OS thread; each of its CUDA threads is a fiber with its own stack. What is
// not declared here does not compile: anything unknown is rejected.
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#include "compiled.h"
#include "hopper.h"

#define FA_UNWATCHED __attribute__((no_sanitize("thread", "alignment")))
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// A static array would silently be one per fiber: kernels take all shared memory at launch.
#define __shared__ emu_error_shared_memory_is_FA_SHARED_MEMORY_here

struct uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {

// -- where a kernel runs ---------------------------------------------------------------------------

struct Thread {
  uint3 index;
  int id, warp, lane;  // in the block, of the block, in the warp
};
struct Here {
  uint3 block;
  dim3 block_size, grid_size;
  unsigned char* shared;
};
// One kernel runs at a time, on whichever OS thread launches it.
extern Thread* self;
extern Here* here;
// The same for kernels, in which loads are instrumented: for one thread, they never change.
[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] int lane();
[[gnu::const]] unsigned char* shared_memory();

bool can_launch(dim3 grid, dim3 block);  // by CUDA's limits
void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

// The same for a kernel that was compiled elsewhere, if that is asked for. Arguments are those of
// its parameters, one by one.
struct Argument {
  const void* at;
  size_t bytes;
};
void launch(const Compiled& kernel, dim3 grid, dim3 block, size_t shared_bytes,
            const Argument* arguments, int count);
bool launch_compiled(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                     const Argument* arguments, int count);

// Earlier calls have left data on the stack: the kernel begins below it.
template <class... P>
FA_UNWATCHED __attribute__((noinline)) void enter(void (*kernel)(P...), const P&... of) {
  asm volatile("" ::"r"(__builtin_alloca(2048)));
  kernel(of...);
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... arguments) {
  std::tuple<P...> copies(static_cast<P>(arguments)...);  // by value, as a kernel's parameters are
  const auto each = std::apply(
      [](const auto&... x) { return std::array<Argument, sizeof...(P)>{{{&x, sizeof x}...}}; }, copies);
  if (launch_compiled(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, each.data(),
                      static_cast<int>(sizeof...(P))))
    return;
  launch(grid, block, shared_bytes, [&] {
    std::apply([&](const P&... of) { enter(kernel, of...); }, copies);
  });
}

// Ends the block with this message in the report.
[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// -- primitives; `site` names the place in the kernel, for reports and to switch it off -----------

bool is_global(const void* at);  // and not shared, nor a thread's own
// An address in the window of shared memory, checked both ways.
uint32_t shared_address(const void* pointer);
unsigned char* shared_pointer(uint32_t address, int bytes);

// Called before plain loads, stores and atomics of a thread: `at` is a real pointer, to shared
// memory or to global. Its alignment, the end of shared memory and races are checked. `what`
// distinguishes such instructions of a kernel.
void plain_read(const void* at, int bytes, const char* what);
void plain_write(const void* at, int bytes, const char* what);
// Atomics, by the memory model of PTX: which threads they order, and for which they are atomic. At
// each of them other threads may run, so that a thread that polls one does not poll for ever.
enum class Access { kLoad, kStore, kBoth };
enum class Order { kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Scope { kBlock, kDevice };
void atomic_access(const void* at, int bytes, const char* what, Access access,
                   Order order = Order::kRelaxed, Scope scope = Scope::kDevice);
void fence(Scope scope);
// The operations of csrc/cuda/ptx.cuh, executed as well as noted.
uint32_t fetch_add(uint32_t* word, uint32_t x, const char* what = "atom");
void reduce_add(uint64_t* word, uint64_t x, const char* what = "red");
void publish(const char* site, uint32_t* word, uint32_t x);
void wait_until(const char* site, const uint32_t* word, uint32_t x);

// Every lane of mask meets, at an instruction of one name; the last one to arrive runs act on what
// all brought. With a place, the address of an instruction, all lanes must be there, at the same
// place; else lanes that have exited are not waited for. `site` is what reports use instead of a
// name.
using Act = void (*)(void** brought, uint32_t lanes);
void warp_meet(const char* name, uint32_t mask, void* brought, Act act,
               const void* place = nullptr, const char* site = nullptr);
void warp_sync(const char* site, uint32_t mask);
void barrier_sync(const char* site, int id, int threads);  // threads < 0: the whole block
void barrier_arrive(const char* site, int id, int threads);

// cp.async: the rest of size is 0. `site` distinguishes such instructions of a kernel; without it
// the address of the caller does.
void copy(uint32_t to, const void* from, int size, int bytes, const char* site = nullptr);
inline void copy16(uint32_t to, const void* from, int bytes) { copy(to, from, 16, bytes); }
void copies_commit(const char* site);
void copies_wait(const char* site, int pending);

// `site` here, too.
void load_matrices(uint32_t* registers, int count, bool transposed, uint32_t address,
                   const char* site = nullptr);
void multiply16816(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool bfloat16,
                   const char* site = nullptr);
void multiply1688(float* d, const uint32_t* a, const uint32_t* b, const char* site);  // of tf32
float widened(uint16_t bits, bool bfloat16);  // else float16
uint32_t narrowed(float x, bool bfloat16);    // to nearest even, in the low half
float approximate_exp2(float x, bool ftz = true);  // ex2.approx
float approximate_log2(float x, bool ftz = true);  // lg2.approx
float approximate_quotient(float a, float b);      // div.full, and rcp.approx of 1

// -- shuffles --------------------------------------------------------------------------------------

template <class T>
struct Shuffle {
  T value, found;
  int from;
};
template <class T>
T shuffle(uint32_t mask, T value, int from) {
  Shuffle<T> mine{value, value, from};
  warp_meet("shuffle", mask, &mine, [](void** brought, uint32_t lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      auto* to = static_cast<Shuffle<T>*>(brought[lane]);
      if (!(lanes >> to->from & 1))
        fail("shuffle: lane %d reads lane %d, which is not among 0x%x", lane, to->from, lanes);
      to->found = static_cast<Shuffle<T>*>(brought[to->from])->value;
    }
  });
  return mine.found;
}

}  // namespace emu

#define threadIdx (::emu::thread_index())
#define blockIdx (::emu::block_index())
extern dim3 blockDim, gridDim;  // of the launch: no macros, since launch.h has fields of these names

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return emu::shuffle(mask, value, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip) {
  return emu::shuffle(mask, value, (emu::lane() ^ flip) & 31);
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
