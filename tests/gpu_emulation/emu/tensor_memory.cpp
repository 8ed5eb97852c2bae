// Tensor memory: its columns are allocated, and warps load and store them asynchronously. A load has
// its values at once, as an instruction that uses its registers waits for them; but until its warp
// waits, nothing else may change what it reads. A store happens lazily at its wait.
#include <algorithm>

#include "tensor.h"

namespace emu {

namespace {

constexpr uint32_t kFewest = 32, kLanesOfWarp = 32;

TensorWarp& warp_of(int warp) { return tensor_memory().warps[size_t(warp)]; }

// Work of a warp in the current step of its agent.
Step step_of(const char* site, TensorWork work, int warp) {
  Step step = current().step(site);
  step.agent = block->agents.tensor(work, warp);
  step.clock = warp_of(warp).over[work] + 1;
  return step;
}

// All lanes of a warp must be at this instruction.
void together(const char* site, Act act, void* brought) { warp_meet(site, ~0u, brought, act, site); }

struct Allocation {
  const char* site;
  uint32_t at, columns;
};

// What all lanes ask for.
const Allocation& one_for_all(void** brought) {
  const auto& first = *static_cast<Allocation*>(brought[0]);
  for (int lane = 1; lane < 32; ++lane) {
    const auto& other = *static_cast<Allocation*>(brought[lane]);
    if (other.at != first.at || other.columns != first.columns)
      fail("%s: lanes of a warp give different operands", first.site);
  }
  const uint32_t columns = first.columns;
  if (columns < kFewest || columns > kTensorColumns || columns & (columns - 1))
    fail("%s: %u columns, expected a power of two from 32 to 512", first.site, columns);
  return first;
}

// At either end of what is free. Another block may hold the rest of the multiprocessor's columns, so
// the first address need not be 0.
void allocate(void** brought, uint32_t) {
  const Allocation& asked = one_for_all(brought);
  TensorMemory& memory = tensor_memory();
  if (memory.relinquished)
    fail("%s: this block has relinquished the right to allocate tensor memory", asked.site);
  uint32_t first = 0, end = kTensorColumns;
  for (const TensorAllocation& each : memory.allocations) {
    if (each.column == first)
      first += each.columns;
    else
      end = std::min(end, each.column);
  }
  if (asked.columns > end - first)
    fail("%s: OUT OF TENSOR MEMORY: %u columns of 512 are free in one piece, %u are asked for: it would "
         "wait for others to give theirs back", asked.site, end - first, asked.columns);
  const bool low = options.schedule == kInOrder || block->random() % 2;
  const uint32_t column = low ? first : end - asked.columns;
  memory.allocations.push_back({column, asked.columns});
  std::sort(memory.allocations.begin(), memory.allocations.end(),
            [](const auto& x, const auto& y) { return x.column < y.column; });
  plain_write(shared_pointer(asked.at, 4), 4, asked.site);
  std::memcpy(shared_pointer(asked.at, 4), &column, 4);
}

// All that was done with these columns must be over, and known to be. It is synchronous, so that no
// fence is needed after the threads synchronised.
void deallocate(void** brought, uint32_t) {
  const Allocation& given = one_for_all(brought);
  TensorMemory& memory = tensor_memory();
  const auto found = std::find_if(memory.allocations.begin(), memory.allocations.end(), [&](const auto& x) {
    return x.column == given.at && x.columns == given.columns;
  });
  if (found == memory.allocations.end())
    fail("%s: %u columns at 0x%x, expected an allocation of as many", given.site, given.columns, given.at);
  Fiber& by = current();
  Clocks known = known_of_tensor_memory(by);
  for (size_t i = 0; i < by.clocks.tensor.size(); ++i) {
    const auto agent = static_cast<uint16_t>(block->agents.tensor(kTensorProducts, 0) + i);
    if (known.own.size() <= agent || known.own[agent] < by.clocks.tensor[i])
      known.learn(agent, by.clocks.tensor[i]);
  }
  if (options.check)
    for (uint32_t lane = 0; lane < kTensorLanes; ++lane)
      memory.shadow->write(in_tensor_memory(lane, given.at), 4 * static_cast<int>(given.columns),
                           by.step(given.site), known);
  memory.allocations.erase(found);
}

// -- registers from and to it ----------------------------------------------------------------------

struct Transfer {
  const char* site;
  uint32_t* to;          // null for a store
  const uint32_t* from;  // null for a load
  int count;
  TensorShape shape;
  uint32_t at, apart;
};

// The lane and the first column of a thread's registers, from the first: checked.
std::pair<uint32_t, uint32_t> place_of(const Transfer& first, int thread) {
  const uint32_t lane = first.at >> 16, own = static_cast<uint32_t>(self->warp) % 4 * kLanesOfWarp;
  const bool half = first.shape == TensorShape::kTwice16x32;
  if (lane != own && !(half && lane == own + 16))
    fail("%s: warp %d begins at lane %u, expected %u%s: it has 32 lanes of its own", first.site,
         self->warp, lane, own, half ? " or 16 more" : "");
  const uint32_t column = first.at & 0xFFFF;
  if (half && thread >= 16) return {lane + static_cast<uint32_t>(thread) - 16, column + first.apart};
  return {lane + static_cast<uint32_t>(thread), column};
}

void transfer(void** brought, uint32_t) {
  const auto& first = *static_cast<Transfer*>(brought[0]);
  TensorMemory& memory = tensor_memory();
  const TensorWork work = first.to ? kTensorLoads : kTensorStores;
  const Step step = step_of(first.site, work, self->warp);
  // Any lane may issue it, so all must know of what it needs.
  const Clocks known =
      known_of_tensor_memory(block->fibers[size_t(self->warp) * 32 + block->random() % 32]);
  const int bytes = 4 * first.count;
  for (int thread = 0; thread < 32; ++thread) {
    const auto& mine = *static_cast<Transfer*>(brought[thread]);
    if (mine.at != first.at) fail("%s: lanes of a warp have different addresses", first.site);
    const auto [lane, column] = place_of(first, thread);
    expect_allocated(first.site, column, static_cast<uint32_t>(first.count));
    const uintptr_t at = in_tensor_memory(lane, column);
    const size_t cell = tensor_cell(lane, column);
    if (first.to) {
      if (options.check) memory.shadow->read(at, bytes, step, known);
      std::copy_n(memory.cells.begin() + static_cast<long>(cell), first.count, mine.to);
      continue;
    }
    if (options.check) memory.shadow->write(at, bytes, step, known);
    for (size_t i = 0; i < size_t(first.count); ++i)
      if (options.lazy)
        warp_of(self->warp).stores.push_back({cell + i, mine.from[i]});
      else
        memory.cells[cell + i] = mine.from[i];
  }
}

void wait(const char* site, TensorWork work) {
  const auto over = [](void** brought, uint32_t) {
    const auto work = *static_cast<TensorWork*>(brought[0]);
    TensorWarp& mine = warp_of(self->warp);
    ++mine.over[work];
    for (int lane = 0; lane < 32; ++lane)
      tell_of_tensor_memory(block->fibers[size_t(self->warp) * 32 + lane], work, self->warp,
                            mine.over[work]);
    if (work != kTensorStores) return;
    for (const auto& [cell, value] : mine.stores) tensor_memory().cells[cell] = value;
    mine.stores.clear();
  };
  together(site, over, &work);
}

}  // namespace

TensorMemory& tensor_memory() {
  std::shared_ptr<TensorMemory>& found = block->proxy.tensor;
  if (!found) {
    found = std::make_shared<TensorMemory>();
    found->cells.assign(kTensorLanes * kTensorColumns, ~0u);  // NaN
    found->shadow = shadow_of_tensor_memory();
    found->warps.resize(block->warps.size());
    found->told.assign(block->fibers.size(), Clocks::Known(kTensorWorks * block->warps.size()));
  }
  return *found;
}

void expect_allocated(const char* site, uint32_t column, uint32_t columns) {
  for (const TensorAllocation& each : tensor_memory().allocations)
    if (column >= each.column && column + columns <= each.column + each.columns) return;
  fail("%s: %u columns at %u of tensor memory, which were not allocated", site, columns, column);
}

Clocks known_of_tensor_memory(const Fiber& by) {
  Clocks known = by.clocks;
  if (!options.tensor_fences) return known;
  const Clocks::Known& told = tensor_memory().told[size_t(by.id)];
  for (size_t i = 0; i < told.size(); ++i)
    known.learn(static_cast<uint16_t>(block->agents.tensor(kTensorProducts, 0) + i), told[i]);
  return known;
}

void tell_of_tensor_memory(Fiber& fiber, TensorWork work, int warp, Clock clock) {
  tensor_memory().told[size_t(fiber.id)][work * block->warps.size() + size_t(warp)] = clock;
  fiber.clocks.learn(block->agents.tensor(work, warp), clock);
}

void tensor_allocate(const char* site, uint32_t to, uint32_t columns) {
  if (skipped(site)) return;
  Allocation mine{site, to, columns};
  together(site, allocate, &mine);
}

void tensor_deallocate(const char* site, uint32_t at, uint32_t columns) {
  if (skipped(site)) return;
  Allocation mine{site, at, columns};
  together(site, deallocate, &mine);
}

void tensor_relinquish(const char* site) {
  if (skipped(site)) return;
  together(site, [](void**, uint32_t) { tensor_memory().relinquished = true; }, nullptr);
}

void tensor_load(const char* site, uint32_t* to, int count, TensorShape shape, uint32_t at,
                 uint32_t apart) {
  Transfer mine{site, to, nullptr, count, shape, at, apart};
  together(site, transfer, &mine);
}

void tensor_store(const char* site, const uint32_t* from, int count, TensorShape shape, uint32_t at,
                  uint32_t apart) {
  Transfer mine{site, nullptr, from, count, shape, at, apart};
  together(site, transfer, &mine);
}

void tensor_wait(const char* site, bool for_loads) {
  if (!skipped(site)) wait(site, for_loads ? kTensorLoads : kTensorStores);
}

void tensor_fence(const char* site, bool before) {
  if (skipped(site)) return;
  Fiber& fiber = current();
  Clocks::Known& told = tensor_memory().told[size_t(fiber.id)];
  Clocks::Known& published = fiber.clocks.tensor;
  published.resize(told.size());
  for (size_t i = 0; i < told.size(); ++i)
    (before ? published : told)[i] = std::max(told[i], published[i]);
}

bool tensor_work_in_flight(const Step& step) {
  const size_t which = step.agent - block->agents.tensor(kTensorProducts, 0);
  const size_t warps = block->warps.size();
  return step.clock > warp_of(static_cast<int>(which % warps)).over[which / warps];
}

void tensor_memory_ends() {
  if (!block->proxy.tensor) return;
  for (size_t warp = 0; warp < block->warps.size(); ++warp) {
    const TensorWarp& each = tensor_memory().warps[warp];
    if (!each.commits.empty())
      return found("ends before products in tensor memory have arrived: " +
                   std::string(each.commits.front().site));
    if (!each.products.empty())
      return found("ends with products in tensor memory that no commit holds: " +
                   std::string(each.products.front().site));
  }
  for (const TensorAllocation& each : tensor_memory().allocations)
    return found("ends with " + std::to_string(each.columns) +
                 " columns of tensor memory allocated, expected tcgen05.dealloc before");
}

}  // namespace emu
