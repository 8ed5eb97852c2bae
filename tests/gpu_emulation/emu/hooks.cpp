// The calls that g++ inserts into kernels compiled with -fsanitize=thread,alignment: at every load
// and store, and where a pointer is misaligned. They arrive here instead of in its libraries.
#include "block.h"

#define ACCESS(n)                                                                             \
  void __tsan_read##n(void* p) { emu::read_at_place(p, n, __builtin_return_address(0)); }     \
  void __tsan_write##n(void* p) { emu::write_at_place(p, n, __builtin_return_address(0)); }   \
  void __tsan_unaligned_read##n(void* p) {                                                    \
    emu::read_at_place(p, n, __builtin_return_address(0));                                    \
  }                                                                                           \
  void __tsan_unaligned_write##n(void* p) {                                                   \
    emu::write_at_place(p, n, __builtin_return_address(0));                                   \
  }

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, long bytes) {
  emu::read_at_place(p, static_cast<int>(bytes), __builtin_return_address(0));
}
void __tsan_write_range(void* p, long bytes) {
  emu::write_at_place(p, static_cast<int>(bytes), __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void* from) {
  if (emu::self) emu::enter_function(from);
}
void __tsan_func_exit() {
  if (emu::self) emu::leave_function();
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// As in GCC's libsanitizer/ubsan.
struct SourceLocation {
  const char* file;
  unsigned line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation at;
  const TypeDescriptor* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* what, void* pointer) {
  if (!emu::self) return;
  const char* const slash = strrchr(what->at.file, '/');
  emu::fail("%s:%u: MISALIGNED access to %s at %p, expected a multiple of %d",
            slash ? slash + 1 : what->at.file, what->at.line, what->type->name, pointer,
            1 << what->log_alignment);
}
}
