// Threads' accesses to memory: to which, whether aligned, and whether they race.
#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include "block.h"
#include "tensor.h"

namespace emu {

Arena stacks{kStackBytes * 1024 * kResident};
Arena windows{kWindowBytes * kResident};
Arena parameters{0};

namespace {

void complain(Shadow::Kind kind, uintptr_t at, const Step& before, const Step& now);

Shadow global(false, complain, forgotten);

// The current thread's access, of which a shadow may complain.
const void* now_at;
int now_bytes;

std::string name_of(const Step& step) {
  const Agents& agents = block->agents;
  std::string name = "thread " + std::to_string(step.agent % agents.threads);
  if (step.agent >= agents.proxied()) name = "products of warp " + std::to_string(step.agent - agents.proxied());
  if (step.agent >= agents.bulk_reads(0))
    name = "a bulk copy of thread " + std::to_string((step.agent - agents.bulk_reads(0)) % agents.threads);
  constexpr const char* kTensorNames[] = {"products in tensor memory", "loads of tensor memory",
                                          "stores to tensor memory"};
  for (const auto work : {kTensorProducts, kTensorLoads, kTensorStores})
    if (step.agent >= agents.tensor(work, 0))
      name = std::string(kTensorNames[work]) + " by warp " +
             std::to_string(step.agent - agents.tensor(work, 0));
  if (step.agent >= agents.arrivals(0))
    name = "an arrival at mbarrier " + std::to_string(step.agent - agents.arrivals(0));
  if (step.block != block->number) name += " of block " + coordinates(step.block);
  return name + " (" + step.what + ")";
}

// A copy, until its own thread has waited for it, also by bulk; products, until their warp has; what
// arrives at an mbarrier, until its phase is over.
bool in_flight(const Step& step) {
  const Agents& agents = block->agents;
  if (step.block != block->number || step.agent < agents.threads) return false;
  if (step.agent >= agents.arrivals(0))
    return step.clock > block->proxy.phases[step.agent - agents.arrivals(0)];
  if (step.agent >= agents.tensor(kTensorProducts, 0)) return tensor_work_in_flight(step);
  const size_t by = step.agent < agents.proxied() ? step.agent - agents.threads
                    : step.agent >= agents.bulk_reads(0)
                        ? (step.agent - agents.bulk_reads(0)) % agents.threads
                        : size_t(step.agent - agents.proxied()) * 32;
  return !block->fibers[by].clocks.know(step);
}

// Did one proxy write what the other uses, and does the thread that asks for it know of the write?
bool wants_fence(Shadow::Kind kind, const Step& before, const Step& now) {
  const Agents& agents = block->agents;
  return kind != Shadow::kReadWrite && now.agent >= agents.proxied() &&
         before.agent < agents.proxied() && current().clocks.know(before);
}

bool is_of_tensor_memory(const Step& step) {
  const Agents& agents = block->agents;
  return step.agent >= agents.tensor(kTensorProducts, 0) && step.agent < agents.arrivals(0);
}

// Does the thread know of the earlier access to tensor memory, but not by fences of tcgen05?
bool wants_tensor_fence(const Step& before) {
  return options.tensor_fences && is_of_tensor_memory(before) && current().clocks.know(before);
}

const char* name_of(Shadow::Kind kind, const Step& before, const Step& now) {
  if (kind != Shadow::kUninitialised && wants_fence(kind, before, now)) return "NO PROXY FENCE";
  if (kind != Shadow::kUninitialised && wants_tensor_fence(before)) return "NO TENSOR FENCE";
  switch (kind) {
    case Shadow::kUninitialised: return "UNINITIALISED";
    case Shadow::kWriteRead: return in_flight(before) ? "READ IN FLIGHT" : "RACE write/read";
    case Shadow::kWriteWrite: return in_flight(before) ? "WRITE IN FLIGHT" : "RACE write/write";
    case Shadow::kReadWrite:
      return in_flight(before) ? "SOURCE CHANGED IN FLIGHT" : "RACE read/write";
    case Shadow::kOfAtomics: return "RACE with an atomic";
  }
  return "";
}

bool is_tensor_memory(uintptr_t at) { return at - kTensorMemory < kTensorBytes; }

std::string place_of(uintptr_t at) {
  char text[64];
  if (is_tensor_memory(at)) {
    const uintptr_t offset = at - kTensorMemory;
    snprintf(text, sizeof text, "lane %zu, column %zu of tensor memory", offset / kTensorRow,
             offset % kTensorRow / 4);
    return text;
  }
  if (windows.holds(at))
    snprintf(text, sizeof text, "shared byte %ld", offset_in_shared(reinterpret_cast<void*>(at)));
  else
    snprintf(text, sizeof text, "global address 0x%lx", at);
  return text;
}

void complain(Shadow::Kind kind, uintptr_t at, const Step& before, const Step& now) {
  // Compilers load an accumulator before they know whether there is one: its registers are poison.
  if (kind == Shadow::kUninitialised && is_tensor_memory(at) &&
      now.agent < block->agents.tensor(kTensorStores, 0) &&
      now.agent >= block->agents.tensor(kTensorLoads, 0))
    return;
  std::string text = std::string(name_of(kind, before, now)) + " at " + place_of(at) + ": ";
  if (before.clock) text += name_of(before) + ", then ";
  text += name_of(now);
  // The effects of a word that was never written, an address perhaps, are of no interest.
  if (kind == Shadow::kUninitialised && now.agent < block->agents.threads) fail("%s", text.c_str());
  Doubt& doubt = current().doubt;
  const bool of_stores = kind == Shadow::kWriteWrite && now.agent < block->agents.threads &&
                         !is_tensor_memory(at);
  if (!options.same_value_stores || !of_stores || now_bytes > int{sizeof doubt.before}) {
    found(text);
  } else if (!doubt.at) {
    doubt.at = now_at;
    doubt.bytes = now_bytes;
    doubt.finding = text;
    std::memcpy(doubt.before, now_at, static_cast<size_t>(now_bytes));
  }
}

// The shadow of this memory, after checks of its bounds; null if no other thread accesses it.
Shadow* shadow_at(const void* at, int bytes, const char* what) {
  if (windows.holds(reinterpret_cast<uintptr_t>(at))) {
    const ptrdiff_t offset = offset_in_shared(at);
    if (offset < 0 || offset + bytes > static_cast<ptrdiff_t>(block->shared_bytes))
      fail("shared memory: %s of %d bytes at %td, of %zu", what, bytes, offset,
           block->shared_bytes);
    return &block->shadow;
  }
  return parameters.holds(reinterpret_cast<uintptr_t>(at)) ? nullptr : &global;
}

void misaligned(const void* at, int bytes, const char* what) {
  if (windows.holds(reinterpret_cast<uintptr_t>(at)))
    fail("shared memory: %s of %d bytes at %td is misaligned", what, bytes, offset_in_shared(at));
  fail("global memory: %s of %d bytes at %p is misaligned", what, bytes, at);
}

// Begins a thread's access, which is to happen now. Null if no further check is needed.
Shadow* begin_access(const void* at, int bytes, const char* what, const void* place) {
  if (!self || stacks.holds(reinterpret_cast<uintptr_t>(at))) return nullptr;
  if (current().doubt.at) settle_doubt(current());
  Shadow* const shadow = shadow_at(at, bytes, what);
  now_at = at;
  now_bytes = bytes;
  if (options.banks && shadow == &block->shadow) note_bank(what, place, offset_in_shared(at), bytes);
  return options.check ? shadow : nullptr;
}

void read(const void* at, int bytes, const char* what, const void* place) {
  if (Shadow* const shadow = begin_access(at, bytes, what, place)) {
    const Fiber& by = current();
    shadow->read(reinterpret_cast<uintptr_t>(at), bytes, by.step(what), by.clocks);
  }
}

void write(const void* at, int bytes, const char* what, const void* place) {
  if (Shadow* const shadow = begin_access(at, bytes, what, place)) {
    const Fiber& by = current();
    shadow->write(reinterpret_cast<uintptr_t>(at), bytes, by.step(what), by.clocks);
  }
}

}  // namespace

Arena::Arena(size_t bytes) : bytes(bytes) {
  if (!bytes) return;
  void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  begin = reinterpret_cast<uintptr_t>(found);
}

void memory_begins() {
  global.clear();
  // A kernel's parameters are on the stack of the thread that launches it.
  static thread_local Arena stack{0};
  if (!stack.bytes) {
    pthread_attr_t attributes;
    void* begin;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &stack.bytes);
    pthread_attr_destroy(&attributes);
    stack.begin = reinterpret_cast<uintptr_t>(begin);
  }
  parameters = stack;
}

void memory_of_block(Block& begins, int slot, size_t shared) {
  begins.shared_bytes = shared;
  begins.shared = windows.at(kWindowBytes * static_cast<size_t>(slot) + kGuardBytes);
  std::memset(begins.shared, 0xFF, shared);  // NaN in every floating-point format
  begins.shadow.clear();
}

Block::Block() : shadow(true, complain, forgotten) {}

std::unique_ptr<Shadow> shadow_of_tensor_memory() {
  return std::make_unique<Shadow>(true, complain, forgotten);
}

void settle_doubt(Fiber& fiber) {
  Doubt& doubt = fiber.doubt;
  if (!doubt.at) return;
  if (std::memcmp(doubt.at, doubt.before, static_cast<size_t>(doubt.bytes))) found(doubt.finding);
  doubt.at = nullptr;
}

ptrdiff_t offset_in_shared(const void* at) {
  return static_cast<const unsigned char*>(at) - block->shared;
}

// -- what a thread does ----------------------------------------------------------------------------

void plain_read(const void* at, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(at) % static_cast<unsigned>(bytes)) misaligned(at, bytes, what);
  read(at, bytes, what, what);
}

void plain_write(const void* at, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(at) % static_cast<unsigned>(bytes)) misaligned(at, bytes, what);
  write(at, bytes, what, what);
}

void read_at_place(const void* at, int bytes, const void* place) { read(at, bytes, "load", place); }
void write_at_place(const void* at, int bytes, const void* place) {
  write(at, bytes, "store", place);
}

void note_atomic(const void* at, int bytes, const char* what, Access access, bool narrow) {
  if (reinterpret_cast<uintptr_t>(at) % static_cast<unsigned>(bytes)) misaligned(at, bytes, what);
  Shadow* const shadow = begin_access(at, bytes, what, nullptr);
  if (!shadow) return;
  const Fiber& by = current();
  Step step = by.step(what);
  step.narrow = narrow;
  step.loads = access == Access::kLoad;
  shadow->access_atomically(reinterpret_cast<uintptr_t>(at), bytes, access != Access::kStore, step,
                            by.clocks);
}

// -- what instructions do to shared memory ---------------------------------------------------------

bool is_global(const void* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  return !windows.holds(address) && !stacks.holds(address);
}

uint32_t shared_address(const void* pointer) {
  const ptrdiff_t offset = offset_in_shared(pointer);
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

static uintptr_t in_window(uint32_t address) {
  return reinterpret_cast<uintptr_t>(block->shared) + (address - kWindow);
}

void note_read(const Fiber& by, uint32_t address, int bytes, const char* what) {
  if (!options.check) return;
  block->shadow.read(in_window(address), bytes, by.step(what), by.clocks);
}

void note_write(const Fiber& by, uint32_t address, int bytes, const char* what) {
  if (!options.check) return;
  settle_doubt(current());
  now_at = block->shared + (address - kWindow);
  now_bytes = bytes;
  block->shadow.write(in_window(address), bytes, by.step(what), by.clocks);
}

void note_proxied_read(uint32_t address, int bytes, const Step& step, const Clocks& known) {
  if (options.check) block->shadow.read(in_window(address), bytes, step, known);
}

void note_proxied_write(uint32_t address, int bytes, const Step& step, const Clocks& of) {
  if (!options.check) return;
  // A read by others is over once it is known of: no fence is needed for it.
  const Clocks known = of.of_async_proxy(of.proxied, block->agents.proxied());
  block->shadow.write(in_window(address), bytes, step, known, of);
}

void note_proxied_source(const void* from, int bytes, const Step& step, const Clocks& known) {
  if (options.check) global.read(reinterpret_cast<uintptr_t>(from), bytes, step, known);
}

void note_proxied_target(const void* to, int bytes, bool adds, const Step& step, const Clocks& of) {
  if (!options.check) return;
  const Clocks known = of.of_async_proxy(of.proxied_global, block->agents.proxied());
  const auto at = reinterpret_cast<uintptr_t>(to);
  if (adds)
    global.access_atomically(at, bytes, true, step, known, of);
  else
    global.write(at, bytes, step, known, of);
}

void note_copy(uint32_t to, const void* from, int size, int bytes, const void* place) {
  Shadow* const source = bytes ? shadow_at(from, bytes, "cp.async") : nullptr;
  if (source == &block->shadow) fail("cp.async: it reads shared memory, expected global");
  if (options.banks) note_bank("cp.async", place, to - kWindow, size);
  if (!options.check) return;
  const Fiber& by = current();
  Step step = by.step("cp.async");
  step.agent = block->agents.copies(by.id);
  step.clock = by.committed + 1;
  if (source) source->read(reinterpret_cast<uintptr_t>(from), bytes, step, by.clocks);
  block->shadow.write(in_window(to), size, step, by.clocks);
}

}  // namespace emu
