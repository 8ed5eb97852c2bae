// The memory of a thread, which outlives a run, so that small calls do not page it in anew.
#pragma once
#include <cstddef>
#include <utility>

#include "platform.h"

namespace fa {

class ScratchMemory {
 public:
  ScratchMemory() = default;
  ~ScratchMemory() { free_lines(data_); }
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  char* get(size_t bytes) {
    if (bytes > size_) {
      free_lines(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = allocate_lines(size_);
      if (!data_) size_ = 0;
    }
    return data_;
  }
  // Frees an unusually large one.
  void trim() {
    if (size_ <= kKept) return;
    free_lines(data_);
    data_ = nullptr;
    size_ = 0;
  }
  void swap(ScratchMemory& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

 private:
  static constexpr size_t kKept = size_t(4) << 20;
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct ThreadMemory {
  ScratchMemory scratch, workspace;
};
inline ThreadMemory& memory_of_thread() { return of_thread<ThreadMemory>(); }

// While this object lives, the thread may make another run in the middle of one: that has memory of
// its own.
class MemoryAside {
 public:
  MemoryAside() { exchange(); }
  ~MemoryAside() { exchange(); }
  MemoryAside(const MemoryAside&) = delete;
  MemoryAside& operator=(const MemoryAside&) = delete;

 private:
  void exchange() {
    kept_.scratch.swap(memory_of_thread().scratch);
    kept_.workspace.swap(memory_of_thread().workspace);
  }
  ThreadMemory kept_;
};

}  // namespace fa
