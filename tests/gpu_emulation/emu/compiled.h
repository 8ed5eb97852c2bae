// Kernels that are compiled elsewhere: ptx makes them from PTX. Their library registers each
// when it is loaded, and a launch of a kernel with that name runs it.
#pragma once
#include <stddef.h>

namespace emu {

struct Compiled {
  const char* name;  // mangled
  void (*body)(const unsigned char* const* parameters);
  int parameters;
  const size_t *bytes, *aligns;     // of each
  unsigned most[3], exactly[3];     // launch bounds; 0 for none
  size_t shared, align, limit;      // bytes of static shared memory, alignment of what follows it,
                                    // and what the architecture lets a block have of both
  int registers;                    // of each thread at a launch; 0 if the bounds do not say
};

void add(const Compiled* kernel);
const Compiled* compiled(const char* name);  // null if there is none

}  // namespace emu
