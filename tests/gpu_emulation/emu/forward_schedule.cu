// What each block of a persistent forward pass has to do, by the schedule of csrc/cuda/sm90 itself.
// No kernel runs: the functions of the emulator that the schedule calls are those of one thread.
#include <stdlib.h>

#include "cuda/sm90/forward_launch.cuh"

dim3 gridDim, blockDim;

namespace {
unsigned block;

// A task: its place among all, by item, head and rows; and what it costs.
struct Cost {
  int64_t place;
  double cost;
};

// Adds what a block has to do to its load, and each of its tasks to `costs`: `fixed`, and its tiles of
// keys, in units of 64 keys. Never inlined, as the compiler takes the index of a block to be one.
template <class F>
[[gnu::noinline]] void add_tasks(const FaParams& batch, const fa::sm90::Schedule& schedule,
                                 double fixed, double& load, Cost*& costs) {
  for (int turn = 0; schedule.has(turn); ++turn) {
    const auto task = schedule.task(turn, F::kRows, batch.H);
    const fa::Item p(batch, task.b);
    if (task.first_row >= p.M) continue;
    const auto tiles = fa::sm90::TileRange::of<F>(p, task.b, task.first_row);
    const double cost = fixed + (tiles.end - tiles.begin) * F::kKeys / 64.0;
    *costs++ = {(task.b * batch.H + task.h) * schedule.blocks + task.first_row / F::kRows, cost};
    load += cost;
  }
}

template <int kD>
int64_t put_loads(const FaParams& batch, int64_t multiprocessors, double fixed, double* loads,
                  Cost* costs) {
  using F = fa::sm90::Forward<fa::ptx::BF16, kD, kD, false>;
  const auto schedule = fa::sm90::schedule_of<F>(batch, multiprocessors);
  gridDim.x = static_cast<unsigned>(multiprocessors);
  Cost* past = costs;
  for (block = 0; block < gridDim.x; ++block)
    add_tasks<F>(batch, schedule, fixed, loads[block] = 0, past);
  return past - costs;
}
}  // namespace

namespace emu {
uint3 block_index() { return {block, 0, 0}; }
// All lanes bring what the one thread brings.
void warp_meet(const char*, uint32_t, void* mine, Act act, const void*, const char*) {
  void* brought[32];
  for (void*& x : brought) x = mine;
  act(brought, ~0u);
}
void fail(const char*, ...) { abort(); }
}  // namespace emu

// Returns the number of tasks that have rows.
extern "C" int64_t forward_loads(const FaParams* p, int64_t multiprocessors, double fixed,
                                 double* loads, Cost* costs) {
  const auto put = [&](auto of) { return of(*p, multiprocessors, fixed, loads, costs); };
  switch (p->D) {
    case 64: return put(put_loads<64>);
    case 96: return put(put_loads<96>);
    case 128: return put(put_loads<128>);
    case 192: return put(put_loads<192>);
    default: return put(put_loads<256>);
  }
}
