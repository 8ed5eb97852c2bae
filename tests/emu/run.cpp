// Fibers, the schedules that interleave them, and launches.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>

#include "block.h"

#if !defined(__x86_64__)
#error "emulator: the switch between fibers is written for x86-64"
#endif
// Saves what a call must keep on this stack, and goes on with another.
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
extern "C" void emu_switch(void** save, void* load);

namespace emu {

__thread Thread* self;
__thread Here* here;
__thread Block* block;
Options options;
Report report;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

std::string where() {
  const uint3& at = block->block;
  return "block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
         std::to_string(at.z) + "): ";
}

std::string name_of(const Step& step) {
  return "thread " + std::to_string(step.agent) + " (" + step.what + ")";
}

void complain(const char* kind, uint32_t offset, const Step& before, const Step& now) {
  std::string text = std::string(kind) + " at shared byte " + std::to_string(offset) + ": ";
  if (before.agent >= 0) text += name_of(before) + ", then ";
  found(text + name_of(now));
}

}  // namespace

uint32_t Block::random() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 32);
}

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  throw Failure(text);
}

void found(const std::string& finding) {
  if (!report.findings++) report.first = where() + finding;
}

bool skipped(const char* site) {
  report.sites.insert(site);
  return options.disabled == site;
}

// -- fibers ----------------------------------------------------------------------------------------

Fiber& current() { return block->fibers[self->id]; }

void wait_for(const std::string& what) {
  Fiber& fiber = current();
  fiber.waits_for = what;
  report.switches++;
  emu_switch(&fiber.stack_pointer, block->scheduler);
}

void wake(int fiber) { block->ready.push_back(fiber); }

namespace {

void fiber_main() {
  try {
    (*block->body)();
    Fiber& fiber = current();
    if (!fiber.issued.empty()) fail("exits with asynchronous copies that no group holds");
    for (const auto& group : fiber.pending)
      if (!group.empty()) fail("exits with asynchronous copies in flight");
  } catch (Failure& failure) {
    block->failed = true;
    found("thread " + std::to_string(self->id) + ": " + failure.what());
  }
  current().done = true;
  block->live--;
  void* never;
  emu_switch(&never, block->scheduler);
}

void prepare(Fiber& fiber, int id, unsigned char* stack) {
  const dim3& size = block->block_size;
  fiber.id = id;
  fiber.warp = id / 32;
  fiber.lane = id % 32;
  fiber.index = {id % size.x, id / size.x % size.y, id / (size.x * size.y)};
  fiber.clocks.assign(block->fibers.size(), 0);
  fiber.clocks[id] = 1;
  // The first switch pops six registers and returns to fiber_main, with the stack as a call has it.
  auto* top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int k = 0; k < 6; ++k) *--top = nullptr;
  fiber.stack_pointer = top;
}

size_t choose() {
  const std::vector<int>& ready = block->ready;
  switch (options.schedule) {
    case kInOrder:
      return 0;
    case kRandom:
      return block->random() % ready.size();
    case kDepthFirst:
      return ready.size() - 1;
    case kWarpPriorities: {
      std::vector<int>& priorities = block->priorities;
      if (block->random() % 512 == 0)
        priorities[block->random() % priorities.size()] = static_cast<int>(block->random() >> 1);
      size_t best = 0;
      for (size_t i = 1; i < ready.size(); ++i)
        if (priorities[ready[i] / 32] > priorities[ready[best] / 32]) best = i;
      return best;
    }
  }
  return 0;
}

void tell_deadlock() {
  std::map<std::string, int> waiting;
  for (const Fiber& fiber : block->fibers)
    if (!fiber.done) waiting[fiber.waits_for]++;
  std::string text = "DEADLOCK: no thread can run;";
  for (const auto& [what, count] : waiting) text += " " + std::to_string(count) + " at " + what + ",";
  found(text + " " + std::to_string(block->fibers.size() - block->live) + " have exited");
}

void run_block(const std::function<void()>& body, dim3 grid, dim3 size, uint3 at, size_t shared,
               unsigned char* stacks) {
  Block running;
  block = &running;
  here = &running;
  running.block = at;
  running.block_size = size;
  running.grid_size = grid;
  running.body = &body;
  running.shared_bytes = shared;
  running.memory.assign(shared + 1024, 0xFF);  // NaN in every floating-point format
  running.shared = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(running.memory.data()) + 1023) & ~uintptr_t(1023));
  running.random_state = options.seed * 0x9E3779B97F4A7C15ull + 0x1234567 * (report.blocks + 1);
  for (int i = 0; i < 8; ++i) running.random();
  const int threads = static_cast<int>(size.x * size.y * size.z), warps = (threads + 31) / 32;
  running.fibers.resize(threads);
  running.meetings.assign(warps, std::vector<Meeting>(32));
  for (int i = 0; i < warps; ++i)
    running.priorities.push_back(static_cast<int>(running.random() >> 1));
  if (options.check) running.shadow = Shadow(shared, complain);
  for (int i = 0; i < threads; ++i) {
    prepare(running.fibers[i], i, stacks + i * kStackBytes);
    running.ready.push_back(i);
  }
  running.live = threads;
  while (running.live && !running.failed) {
    if (running.ready.empty()) {
      tell_deadlock();
      break;
    }
    const size_t chosen = choose();
    const int fiber = running.ready[chosen];
    running.ready.erase(running.ready.begin() + static_cast<long>(chosen));
    self = &running.fibers[fiber];
    emu_switch(&running.scheduler, running.fibers[fiber].stack_pointer);
  }
  report.blocks++;
  block = nullptr;
  here = nullptr;
  self = nullptr;
}

}  // namespace

void launch(dim3 grid, dim3 size, size_t shared, const std::function<void()>& body) {
  const size_t threads = size_t{size.x} * size.y * size.z;
  if (shared > options.shared_limit || threads == 0 || threads > 1024 || threads % 32) {
    report.findings++;
    report.first = "launch: " + std::to_string(threads) + " threads and " + std::to_string(shared) +
                   " bytes of shared memory, expected whole warps up to 1024 threads and at most " +
                   std::to_string(options.shared_limit) + " bytes";
    return;
  }
  const size_t bytes = threads * kStackBytes;
  void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        run_block(body, grid, size, {x, y, z}, shared, static_cast<unsigned char*>(stacks));
  munmap(stacks, bytes);
}

// -- shared memory ---------------------------------------------------------------------------------

uint32_t shared_address(const void* pointer) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - block->shared;
  if (offset < 0 || static_cast<size_t>(offset) > block->shared_bytes)
    fail("shared_address: the pointer is not into shared memory");
  return static_cast<uint32_t>(offset) + kWindow;
}

unsigned char* shared_pointer(uint32_t address, int bytes) {
  if (address < kWindow || address - kWindow + bytes > block->shared_bytes)
    fail("shared memory: %d bytes at %d, of %zu", bytes, static_cast<int>(address - kWindow),
         block->shared_bytes);
  if (address % bytes)
    fail("shared memory: %d bytes at %d are misaligned", bytes, static_cast<int>(address - kWindow));
  return block->shared + (address - kWindow);
}

void note_read(const Fiber& by, uint32_t address, int bytes, const char* what) {
  if (!options.check) return;
  block->shadow.read(address - kWindow, bytes, Step{by.id, by.clocks[by.id], what}, by.clocks);
}

void note_read(uint32_t address, int bytes, const char* what) {
  note_read(current(), address, bytes, what);
}

void note_write(uint32_t address, int bytes, const char* what) {
  if (!options.check) return;
  const Fiber& by = current();
  block->shadow.write(address - kWindow, bytes, Step{by.id, by.clocks[by.id], what}, by.clocks);
}

}  // namespace emu
