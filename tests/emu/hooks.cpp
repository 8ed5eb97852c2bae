// Plain loads and stores of shared memory in kernels. The kernels are compiled with
// -fsanitize=thread, whose calls come here instead of to its library.
#include "block.h"

namespace {

void access(const void* pointer, long bytes, bool write) {
  using namespace emu;
  if (!block || !self) return;
  const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - block->shared;
  if (offset < 0 || static_cast<size_t>(offset) >= block->shared_bytes) return;
  const auto address = static_cast<uint32_t>(offset) + kWindow;
  if (write)
    note_write(address, static_cast<int>(bytes), "store");
  else
    note_read(address, static_cast<int>(bytes), "load");
}

}  // namespace

#define ACCESS(n)                                                 \
  void __tsan_read##n(void* p) { access(p, n, false); }           \
  void __tsan_write##n(void* p) { access(p, n, true); }           \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true); }

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, long bytes) { access(p, bytes, false); }
void __tsan_write_range(void* p, long bytes) { access(p, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
