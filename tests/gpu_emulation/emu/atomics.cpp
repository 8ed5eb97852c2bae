// Atomics and fences: all that orders the blocks of a launch. A release publishes what its thread
// knows, at an address and in a scope; an acquire at that address, in a scope that contains both
// threads, joins it. A fence is a release for later atomics that write, and an acquire for earlier
// ones that read. A store discards what others published there; a read-modify-write passes it on.
#include <utility>

#include "block.h"

namespace emu {

namespace {

constexpr int64_t kEverywhere = -1;  // else for one block
std::map<std::pair<uintptr_t, int64_t>, Clocks> published;
std::set<int64_t> publishers;  // blocks that have published

Fences& fences_of(Fiber& fiber) {
  if (!fiber.fences) fiber.fences = std::make_unique<Fences>();
  return *fiber.fences;
}

void acquire(Clocks& to, uintptr_t at, Scope scope) {
  to.join(published[{at, block->number}]);
  if (scope == Scope::kDevice) to.join(published[{at, kEverywhere}]);
}

void release(uintptr_t at, const Clocks& from, Scope scope) {
  if (from.own.empty()) return;
  published[{at, block->number}].join(from);
  if (scope == Scope::kDevice) published[{at, kEverywhere}].join(from);
  if (scope == Scope::kDevice) publishers.insert(block->number);
}

void take_back(uintptr_t at) {
  const auto first = published.lower_bound({at, kEverywhere});
  published.erase(first, published.lower_bound({at + 1, kEverywhere}));
}

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }
bool releases(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }

void read(Fiber& by, uintptr_t at, Order order, Scope scope) {
  Fences& fences = fences_of(by);
  if (acquires(order)) acquire(by.clocks, at, scope);
  acquire(scope == Scope::kDevice ? fences.observed : fences.observed_in_block, at, scope);
}

void write(Fiber& by, uintptr_t at, Order order, Scope scope) {
  Fences& fences = fences_of(by);
  if (releases(order)) {
    fences.released_at[{at, scope}] = by.clocks;
    by.clocks.own[by.id]++;
  }
  release(at, fences.released_at[{at, Scope::kBlock}], Scope::kBlock);
  release(at, fences.released_at[{at, Scope::kDevice}], scope);
  release(at, fences.released_in_block, Scope::kBlock);
  release(at, fences.released, scope);
}

}  // namespace

void atomics_begin() {
  published.clear();
  publishers.clear();
}

bool forgotten(int64_t block) { return !running(block) && !publishers.count(block); }

void atomic_access(const void* at, int bytes, const char* what, Access access, Order order,
                   Scope scope) {
  if (!self) return;
  give_way();  // first: a thread that spins here lets others run
  note_atomic(at, bytes, what, access, scope == Scope::kBlock);
  if (!options.check) return;
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (access != Access::kStore) read(current(), address, order, scope);
  if (access == Access::kStore) take_back(address);
  if (access != Access::kLoad) write(current(), address, order, scope);
}

uint32_t fetch_add(uint32_t* word, uint32_t x, const char* what) {
  atomic_access(word, 4, what, Access::kBoth);
  return std::exchange(*word, *word + x);
}

void reduce_add(uint64_t* word, uint64_t x, const char* what) {
  atomic_access(word, 8, what, Access::kBoth);
  *word += x;
}

void publish(const char* site, uint32_t* word, uint32_t x) {
  const Order order = skipped(site) ? Order::kRelaxed : Order::kRelease;
  atomic_access(word, 4, "st", Access::kStore, order);
  *word = x;
}

void wait_until(const char* site, const uint32_t* word, uint32_t x) {
  if (skipped(site)) return;
  do atomic_access(word, 4, "ld.acquire", Access::kLoad, Order::kAcquire);
  while (*word != x);
}

void fence(Scope scope) {
  if (!self || !options.check) return;
  Fiber& fiber = current();
  Fences& fences = fences_of(fiber);
  fiber.clocks.join(fences.observed_in_block);
  if (scope == Scope::kDevice) fiber.clocks.join(fences.observed);
  (scope == Scope::kDevice ? fences.released : fences.released_in_block) = fiber.clocks;
  fiber.clocks.own[fiber.id]++;
}

}  // namespace emu
