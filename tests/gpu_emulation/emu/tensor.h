// The tensor memory of a block, and what is in flight there.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "blackwell.h"
#include "block.h"
#include "operands.h"

namespace emu {

constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512;
constexpr uintptr_t kTensorRow = 4 * kTensorColumns, kTensorBytes = kTensorLanes * kTensorRow;

// Lanes of a matrix with 64 or 128 rows: 64 rows are in half of the lanes, 16 of every 32.
struct TensorPlace {
  uint32_t lane, column, rows, columns;

  uint32_t lane_of(uint32_t row) const {
    return rows == kTensorLanes ? row : row / 16 * 32 + row % 16 + lane;
  }
  bool overlaps(const TensorPlace& other) const {
    const bool halves = rows != kTensorLanes && other.rows != kTensorLanes;
    return !(halves && lane != other.lane) && column < other.column + other.columns &&
           other.column < column + columns;
  }
  bool operator==(const TensorPlace& other) const {
    return lane == other.lane && column == other.column && rows == other.rows &&
           columns == other.columns;
  }
};

struct TensorMultiplication {
  const char* site;
  Element element;
  TensorPlace d, a;  // A, if it is there; else 0 columns
  Matrix a_shared, b;
  int sign;
  bool add;
  int lane;     // of the thread that issued it
  Clock clock;  // of the commit that it is waited for by
};

struct TensorCommit {
  const char* site;
  Arrival arrives;
  Clocks of;
  Clock clock;
};

struct TensorWarp {
  Clock over[kTensorWorks] = {};  // commits that have landed; waits for loads; for stores
  Clock committed = 0;
  std::deque<TensorMultiplication> products;  // that have not been computed
  std::vector<TensorMultiplication> recent;   // that this warp may not know to be over
  std::deque<TensorCommit> commits;
  std::vector<std::pair<size_t, uint32_t>> stores;  // in flight: cell and value
};

struct TensorAllocation {
  uint32_t column, columns;
};

struct TensorMemory {
  std::vector<uint32_t> cells;
  std::unique_ptr<Shadow> shadow;
  std::vector<TensorAllocation> allocations;
  bool relinquished = false;
  std::vector<TensorWarp> warps;
  std::vector<Clocks::Known> told;  // what each thread knows by waits of its own and by fences
};

TensorMemory& tensor_memory();  // of the current block

inline uintptr_t in_tensor_memory(uint32_t lane, uint32_t column) {
  return kTensorMemory + lane * kTensorRow + 4 * column;
}
inline size_t tensor_cell(uint32_t lane, uint32_t column) {
  return size_t{lane} * kTensorColumns + column;
}

// Fails unless these columns are allocated.
void expect_allocated(const char* site, uint32_t column, uint32_t columns);
// What this thread knows of when it accesses tensor memory.
Clocks known_of_tensor_memory(const Fiber& by);
// This thread learns that work of a warp is over.
void tell_of_tensor_memory(Fiber& fiber, TensorWork work, int warp, Clock clock);

bool tensor_work_in_flight(const Step& step);
bool commits_in_flight(const Block& of);
void land_commit();           // any one of the current block
void tensor_memory_ends();    // of the current block, after all of its threads

}  // namespace emu
