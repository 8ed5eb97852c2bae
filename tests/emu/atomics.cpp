// Atomics and fences: all that orders the blocks of a launch. A release publishes what its thread
// knows, at an address and in a scope; an acquire at that address, in a scope that holds both, takes
// it over. A fence is a release for the atomics after it, and an acquire for those before.
#include "block.h"

namespace emu {

namespace {

constexpr int64_t kEverywhere = -1;  // else for one block
std::map<std::pair<uintptr_t, int64_t>, Clocks> published;
std::set<int64_t> publishers;  // blocks that told others

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

}  // namespace

void atomics_begin() {
  published.clear();
  publishers.clear();
}

bool forgotten(int64_t block) { return !running(block) && !publishers.count(block); }

void atomic_access(const void* at, int bytes, const char* what, Order order, Scope scope) {
  if (!self) return;
  give_way();  // before it: whoever spins here lets others run
  note_atomic(at, bytes, what, scope == Scope::kBlock);
  if (!options.check) return;
  Fiber& fiber = current();
  const auto address = reinterpret_cast<uintptr_t>(at);
  Fences& fences = fences_of(fiber);
  if (order == Order::kAcquire || order == Order::kAcquireRelease)
    acquire(fiber.clocks, address, scope);
  acquire(scope == Scope::kDevice ? fences.observed : fences.observed_in_block, address, scope);
  if (order == Order::kRelease || order == Order::kAcquireRelease) {
    release(address, fiber.clocks, scope);
    fiber.clocks.own[fiber.id]++;
  }
  release(address, fences.released_in_block, Scope::kBlock);
  release(address, fences.released, scope);
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
