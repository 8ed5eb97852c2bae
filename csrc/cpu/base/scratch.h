// Cuts a thread's scratch memory into arrays. With a null base it only counts.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fa {
namespace FA_ISA {

struct Scratch {
  char* base;
  size_t used = 0;
  template <class E>
  E* array(int64_t n) {
    E* at = reinterpret_cast<E*>(base + used);
    used += (static_cast<size_t>(n > 0 ? n : 0) * sizeof(E) + 63) / 64 * 64;
    return at;
  }
  // The same, or null if it is not wanted.
  template <class E>
  E* array_if(int64_t n, bool wanted) {
    return wanted ? array<E>(n) : nullptr;
  }
};

}  // namespace FA_ISA
}  // namespace fa
