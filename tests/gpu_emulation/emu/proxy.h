// What is in flight through a block's asynchronous proxy.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "hopper.h"

namespace emu {

struct Mbarrier {
  int index = 0;  // among all that its block initialised
  bool valid = false;
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;             // that are yet to arrive
  Clocks arrived, completed;     // of arrived threads: in this phase, and before
  std::vector<int> waiting;
};

// An arrival of bytes at an mbarrier, in the phase in which they were asked for.
struct Arrival {
  uint32_t address;
  int index;
  uint32_t phase;
};

// The 128 bytes of a tensor map, as this emulator has them; a GPU's are not documented.
struct TensorMap {
  uint64_t address, strides[4];  // in bytes, from the second dimension on
  uint32_t dims[5], box[5], element_strides[5];
  uint8_t rank, type, interleave, swizzle, fill;  // the rank: one less
  uint64_t origin;                                // kOfHost: cuTensorMapEncodeTiled made it
};
constexpr uint64_t kOfHost = 0x7E4504A9B0C5ED11;
constexpr int kMapBytes = 128, kMapAlign = 64;
static_assert(sizeof(TensorMap) <= kMapBytes);

int bytes_of(const TensorMap& map);  // of an element; 0 for none that is known
uint64_t box_bytes(const TensorMap& map);
// The map of so many dimensions at this address, which the current thread may use.
TensorMap map_at(const char* site, const void* map, int rank);
// Is this memory a parameter's, of the kernel that runs? A kernel from g++ has copies of those on
// each thread's stack, with the thread's own variables.
bool is_parameter(const void* at, size_t bytes);

// A map that a block published, and the steps that acquired it since.
struct Published {
  Step by;
  TensorMap map;
  std::vector<Step> acquired;
};

// A box in flight.
struct Box {
  const char* site;
  TensorMap map;
  int32_t at[5];
  uint32_t to;
  Arrival arrives;
};

// A row of a box: the address of its first byte in shared memory, before a swizzle; how many bytes
// precede the tensor's first column; and the address and number of those inside the tensor, 0 in a
// row outside.
struct BoxRow {
  uint32_t shared;
  uint64_t address;
  int64_t first, bytes;

  unsigned char* global() const { return reinterpret_cast<unsigned char*>(address); }
};
std::vector<BoxRow> rows_of(const TensorMap& map, const int32_t* at, uint32_t shared);
// Copies from memory that may not exist, or, if it writes, to such memory: a wrong map must not end
// the process. False if there is none.
bool copied(void* to, const void* from, int64_t bytes, bool writes);

// A copy from shared memory to global memory, in flight.
struct Bulk {
  const char* site;
  bool adds;      // to float32 numbers
  uint32_t span;  // of a swizzle, in chunks of 16 bytes
  std::vector<BoxRow> rows;
  std::vector<std::vector<unsigned char>> data;  // of each row, once it is read
  bool done = false;
};
struct BulkGroups {  // of a thread
  Clock committed = 0, read = 0;          // groups: all, and those that are known to have been read
  std::vector<Bulk> issued;               // since the last commit
  std::deque<std::vector<Bulk>> pending;  // groups that were not waited for, oldest first
};

// The registers of a warp's threads, as setmaxnreg changes them.
struct WarpRegisters {
  int has = 0, asks = 0;    // of each thread; asks: what the warp waits for
  std::vector<Step> steps;  // one for each setmaxnreg of the warp
};
struct Registers {  // of a block
  std::vector<WarpRegisters> warps;  // none before the first setmaxnreg
  int spare = 0;                     // that no warp has
  std::vector<int> waiting;          // threads
};

// Registers that products add to, of all lanes of a warp, and the values that they will get.
struct Accumulator {
  std::vector<uint32_t*> registers;
  std::vector<float> values;
  int in_flight = 0;
};
struct ProductInFlight {
  const char* site;
  Product of;  // without registers
  std::vector<const uint32_t*> a_registers;
  std::vector<uint32_t> a;
  std::shared_ptr<Accumulator> to;
  bool multiplied = false;
};
struct Products {  // of a warp
  Clock committed = 0;
  std::vector<ProductInFlight> issued;               // since the last commit
  std::deque<std::vector<ProductInFlight>> pending;  // committed groups, oldest first
  std::vector<std::shared_ptr<Accumulator>> accumulators;
  std::vector<int> waiting;  // threads, for another warp's commit
  size_t instructions = 0;
};

struct GroupInstruction {  // of a warpgroup
  const char* site;
  Product product;  // of one, without registers
};

struct TensorMemory;  // tensor.h

struct Proxy {
  std::map<uint32_t, Mbarrier> mbarriers;  // by address
  std::vector<uint32_t> phases;            // completed ones of each mbarrier so far
  std::map<const void*, Published> maps;
  std::vector<Box> boxes;
  // The phases of mbarriers, by index and number, in which bytes arrive, and a place that asked.
  std::map<std::pair<int, uint32_t>, const char*> arrivals;
  Registers registers;
  std::vector<Products> products;  // of each warp
  // The instructions that warps of a warpgroup execute together, in order.
  std::vector<std::vector<GroupInstruction>> instructions;
  std::shared_ptr<TensorMemory> tensor;  // null until some of it is allocated
};

Arrival mbarrier_arrival(const char* site, uint32_t address);
void bytes_arrive(const char* site, const Arrival& at, uint32_t bytes);
void arrival_lands(const char* site, const Arrival& at, const Clocks& of);  // and counts as one
void mbarriers_end();      // of the current block, after all of its threads
void land_box();           // any one of the current block
void boxes_end();          // of the current block, after all of its threads
void bulk_end();           // of the current thread, which exits
void products_end();       // of the current thread, which exits
void products_all_end();   // of the current block, after all of its threads
void registers_end();      // of the current block, after all of its threads
std::string registers_wanted();  // what a deadlock should tell of them

}  // namespace emu
