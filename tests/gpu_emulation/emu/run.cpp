// Fibers, the schedules that interleave them and their blocks, and launches.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "block.h"
#include "tensor.h"

#if !defined(__x86_64__)
#error "emulator: the switch between fibers is written for x86-64"
#endif
// Saves the registers that a call must preserve on this stack, and switches to another.
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

dim3 blockDim, gridDim;

namespace emu {

Thread* self;
Here* here;
Block* block;
Options options;
Report report;

namespace {

// A running launch: a grid of blocks, some of which are resident.
struct Launch {
  dim3 grid, size;
  size_t shared = 0;
  const std::function<void()>* body = nullptr;
  int64_t blocks = 0, begun = 0;
  std::vector<int64_t> upcoming;  // blocks that may be the next
  std::vector<Block*> resident;
  void* scheduler = nullptr;  // its stack pointer
  long asked = 0;             // atomics since a block ended
  uint64_t random_state = 0;
};
Launch* running_launch;

std::array<Block, kResident> blocks;  // slots: a block runs in one, and then others do

uint32_t next_random(uint64_t& state) {  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<uint32_t>(state >> 32);
}

uint64_t random_state(uint64_t stream) {
  uint64_t state = options.seed * 0x9E3779B97F4A7C15ull + 0x1234567 * (stream + 1);
  if (!state) state = 0x1234567;  // of 0 there is no other number
  for (int i = 0; i < 8; ++i) next_random(state);
  return state;
}

}  // namespace

uint3 thread_index() { return self->index; }
uint3 block_index() { return here->block; }
int lane() { return self->lane; }
unsigned char* shared_memory() { return here->shared; }

uint32_t Block::random() { return next_random(random_state); }

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  found("thread " + std::to_string(self->id) + ": " + text);
  block->failed = true;
  void* never;
  emu_switch(&never, running_launch->scheduler);
  abort();
}

std::string coordinates(int64_t number) {
  const dim3& grid = running_launch->grid;
  const int64_t x = number % grid.x, y = number / grid.x % grid.y, z = number / grid.x / grid.y;
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

bool running(int64_t number) {
  for (const Block* resident : running_launch->resident)
    if (resident->number == number) return true;
  return false;
}

void found(const std::string& finding) {
  if (report.findings++) return;
  report.first = (block ? "block " + coordinates(block->number) + ": " : "") + finding;
}

bool skipped(const char* site) {
  const auto [known, fresh] = report.skipped.try_emplace(site, false);
  if (fresh) {
    report.sites.insert(site);
    known->second = options.disabled == site;
  }
  return known->second;
}

// -- fibers ----------------------------------------------------------------------------------------

void wait_for(const char* what, int barrier) {
  Fiber& fiber = current();
  settle_doubt(fiber);
  fiber.waits_for = what;
  fiber.at_barrier = barrier;
  report.switches++;
  emu_switch(&fiber.stack_pointer, running_launch->scheduler);
}

void wake(int fiber) { block->ready.push_back(fiber); }

// The thread that this one waits for may be in a block that has not begun yet.
void give_way() {
  constexpr long kMost = 4000000;
  if (++running_launch->asked > kMost)
    fail("LIVELOCK: %ld atomics since a block ended, and none is done", kMost);
  // Depth first runs the fiber that was woken last: all the others, before this one again.
  std::vector<int>& ready = block->ready;
  ready.insert(options.schedule == kDepthFirst ? ready.begin() : ready.end(), self->id);
  wait_for("its turn");
}

namespace {

void fiber_main() {
  (*running_launch->body)();
  Fiber& fiber = current();
  settle_doubt(fiber);
  if (!fiber.issued.empty()) fail("exits with asynchronous copies that no group holds");
  for (const auto& group : fiber.pending)
    if (!group.empty()) fail("exits with asynchronous copies in flight");
  products_end();
  bulk_end();
  lane_exits();
  fiber.done = true;
  block->live--;
  void* never;
  emu_switch(&never, running_launch->scheduler);
}

// An unwritten register is NaN, or a number that no index should be: all bits of a stack are set,
// from its end down to where they are still set.
void poison(unsigned char* end) {
  constexpr size_t kPiece = 256, kMost = 16 * 1024 / kPiece, kEnough = 16;
  static const std::array<unsigned char, kPiece> set = [] {
    std::array<unsigned char, kPiece> all;
    all.fill(0xFF);
    return all;
  }();
  for (size_t piece = 1, still = 0; piece <= kMost && still < kEnough; ++piece) {
    unsigned char* const at = end - piece * kPiece;
    still = std::memcmp(at, set.data(), kPiece) ? 0 : still + 1;
    if (!still) std::memcpy(at, set.data(), kPiece);
  }
}

void prepare(Fiber& fiber, const Block& of, int id, unsigned char* stack_end) {
  const dim3& size = of.block_size;
  fiber.id = id;
  fiber.warp = id / 32;
  fiber.lane = id % 32;
  fiber.index = {id % size.x, id / size.x % size.y, id / (size.x * size.y)};
  fiber.done = false;
  fiber.clocks.block = of.number;
  fiber.clocks.own.assign(of.agents.proxied(), 0);
  fiber.clocks.proxied.clear();
  fiber.clocks.proxied_global.clear();
  fiber.clocks.tensor.clear();
  fiber.clocks.own[id] = 1;
  fiber.clocks.others.reset();
  fiber.committed = 0;
  fiber.issued.clear();
  fiber.pending.clear();
  fiber.bulk = BulkGroups();
  fiber.fences.reset();
  fiber.doubt.at = nullptr;
  fiber.calls.clear();
  poison(stack_end);
  // The first switch pops six registers and returns to fiber_main, with the stack as a call has it.
  auto* top = reinterpret_cast<void**>(stack_end);
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
      std::vector<Warp>& warps = block->warps;
      if (block->random() % 512 == 0)
        warps[block->random() % warps.size()].priority = static_cast<int>(block->random() >> 1);
      size_t best = 0;
      for (size_t i = 1; i < ready.size(); ++i)
        if (warps[ready[i] / 32].priority > warps[ready[best] / 32].priority) best = i;
      return best;
    }
  }
  return 0;
}

void tell_deadlock() {
  std::map<std::string, int> waiting;
  for (const Fiber& fiber : block->fibers) {
    if (fiber.done) continue;
    std::string what = fiber.waits_for;
    if (fiber.at_barrier >= 0) what += " (barrier " + std::to_string(fiber.at_barrier) + ")";
    waiting[what]++;
  }
  std::string text = "DEADLOCK: no thread can run;";
  for (const auto& [what, count] : waiting) text += " " + std::to_string(count) + " at " + what + ",";
  found(text + " " + std::to_string(block->fibers.size() - block->live) + " have exited" +
        registers_wanted());
}

// -- blocks ----------------------------------------------------------------------------------------

// In order, backwards, or at random among the next few.
int64_t next_block(Launch& launch) {
  if (options.schedule == kInOrder) return launch.begun++;
  if (options.schedule == kDepthFirst) return launch.blocks - 1 - launch.begun++;
  while (launch.upcoming.size() < 64 && launch.begun < launch.blocks)
    launch.upcoming.push_back(launch.begun++);
  int64_t& chosen = launch.upcoming[next_random(launch.random_state) % launch.upcoming.size()];
  const int64_t next = chosen;
  chosen = launch.upcoming.back();
  launch.upcoming.pop_back();
  return next;
}

void begin(Launch& launch, int64_t number) {
  size_t slot = 0;
  const auto taken = [&](Block& x) {
    return std::find(launch.resident.begin(), launch.resident.end(), &x) != launch.resident.end();
  };
  while (taken(blocks[slot])) ++slot;
  Block& next = blocks[slot];
  const dim3 &grid = launch.grid, &size = launch.size;
  next.number = number;
  next.block = {static_cast<unsigned>(number % grid.x),
                static_cast<unsigned>(number / grid.x % grid.y),
                static_cast<unsigned>(number / grid.x / grid.y)};
  next.block_size = size;
  next.grid_size = grid;
  next.random_state = random_state(static_cast<uint64_t>(report.blocks++));
  const int threads = static_cast<int>(size.x * size.y * size.z);
  next.live = threads;
  next.failed = false;
  memory_of_block(next, static_cast<int>(slot), launch.shared);
  next.fibers.resize(threads);
  next.agents.threads = next.fibers.size();
  next.proxy = Proxy();
  next.warps.resize(threads / 32);
  for (Warp& warp : next.warps) {
    warp.live = kWholeWarp;
    warp.meetings = 0;
    warp.priority = static_cast<int>(next.random() >> 1);
  }
  for (Barrier& barrier : next.barriers) barrier = Barrier();
  next.ready.clear();
  for (int i = 0; i < threads; ++i) {
    prepare(next.fibers[i], next, i, stacks.at((slot * 1024 + i + 1) * kStackBytes));
    next.ready.push_back(i);
  }
  launch.resident.push_back(&next);
}

void enter(Block* next) { here = block = next; }

// Runs one fiber of the current block until it waits.
void run_one(Launch& launch) {
  const size_t chosen = choose();
  Fiber& fiber = block->fibers[block->ready[chosen]];
  block->ready.erase(block->ready.begin() + static_cast<long>(chosen));
  self = &fiber;
  emu_switch(&launch.scheduler, fiber.stack_pointer);
  self = nullptr;
}

void end(Launch& launch) {
  count_banks(*block);
  if (!block->failed && !block->live) {
    boxes_end();
    mbarriers_end();
    tensor_memory_ends();
    products_all_end();
    registers_end();
  }
  launch.asked = 0;
  launch.resident.erase(std::find(launch.resident.begin(), launch.resident.end(), block));
  enter(nullptr);
}

// Stays in the current block, or enters another one that can run; false if there is none.
bool choose_block(Launch& launch) {
  const std::vector<Block*>& resident = launch.resident;
  const auto ready = [](const Block* x) { return !x->ready.empty(); };
  const bool stay = block && ready(block) && next_random(launch.random_state) % 512;
  if (stay) return true;
  enter(resident[next_random(launch.random_state) % resident.size()]);
  if (ready(block)) return true;
  const auto other = std::find_if(resident.begin(), resident.end(), ready);
  if (other == resident.end()) return false;
  enter(*other);
  return true;
}

// A bulk copy lands, or what a commit of products in tensor memory waits for.
void land_one() {
  const bool boxes = !block->proxy.boxes.empty(), commits = commits_in_flight(*block);
  boxes && (!commits || block->random() % 2) ? land_box() : land_commit();
}

// If no thread can go on: one of these lands in some block, if there is one in flight.
bool a_box_lands(Launch& launch) {
  for (Block* const each : launch.resident) {
    if (each->proxy.boxes.empty() && !commits_in_flight(*each)) continue;
    enter(each);
    land_one();
    return true;
  }
  return false;
}

// At times one of these of any block lands: all threads of that block may wait for it, and those of
// another for them.
void a_box_may_land(Launch& launch) {
  if (next_random(launch.random_state) % 64) return;
  Block* const runs = block;
  enter(launch.resident[next_random(launch.random_state) % launch.resident.size()]);
  if (!block->proxy.boxes.empty() || commits_in_flight(*block)) land_one();
  enter(runs);
}

// How many blocks run at a time.
size_t most_resident(const Launch& launch) {
  if (launch.asked) return kResident;
  if (options.schedule == kInOrder) return 1;
  return options.schedule == kRandom ? 2 : kResident;
}

void run(Launch& launch) {
  while (true) {
    while (launch.resident.size() < most_resident(launch) &&
           (launch.begun < launch.blocks || !launch.upcoming.empty()))
      begin(launch, next_block(launch));
    if (launch.resident.empty()) return;
    if (!choose_block(launch)) {
      if (a_box_lands(launch)) continue;
      tell_deadlock();
      end(launch);
      continue;
    }
    a_box_may_land(launch);
    run_one(launch);
    if (!block->live || block->failed) end(launch);
  }
}

}  // namespace

bool can_launch(dim3 grid, dim3 size) {
  constexpr unsigned kMost = 65535, kMostInX = 0x7FFFFFFF;
  const size_t threads = size_t{size.x} * size.y * size.z;
  return threads && threads <= 1024 && grid.x && grid.y && grid.z && grid.x <= kMostInX &&
         grid.y <= kMost && grid.z <= kMost;
}

void launch(dim3 grid, dim3 size, size_t shared, const std::function<void()>& body) {
  const size_t threads = size_t{size.x} * size.y * size.z;
  if (shared > options.shared_limit || threads % 32)
    return found("launch: " + std::to_string(threads) + " threads and " + std::to_string(shared) +
                 " bytes of shared memory, expected whole warps and at most " +
                 std::to_string(options.shared_limit) + " bytes");
  if (!can_launch(grid, size))
    return found("launch: a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                 " x " + std::to_string(grid.z) + " blocks of " + std::to_string(threads) +
                 " threads, expected one at least, at most 2147483647 x 65535 x 65535 of 1024");
  gridDim = grid;
  blockDim = size;
  Launch now;
  now.grid = grid;
  now.size = size;
  now.shared = shared;
  now.body = &body;
  now.blocks = int64_t{grid.x} * grid.y * grid.z;
  now.random_state = random_state(~uint64_t(report.blocks));
  running_launch = &now;
  memory_begins();
  atomics_begin();
  run(now);
  running_launch = nullptr;
}

}  // namespace emu
