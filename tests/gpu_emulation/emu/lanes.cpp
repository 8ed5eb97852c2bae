// What lanes of a warp do together on sm_90: stmatrix, and the choice of one of them.
#include "block.h"

namespace emu {

namespace {

struct Store {
  const uint32_t* registers;
  uint32_t address;
  int count;
  bool transposed;
  const char* site;
};

void store(void** brought, uint32_t) {
  const auto lane_of = [&](int lane) { return static_cast<Store*>(brought[lane]); };
  const Store& first = *lane_of(0);
  for (int matrix = 0; matrix < first.count; ++matrix) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4, column = 2 * (lane % 4) + half;
        const auto x = static_cast<uint16_t>(lane_of(lane)->registers[matrix] >> (16 * half));
        (first.transposed ? m[column][row] : m[row][column]) = x;
      }
    std::vector<uint32_t> offsets;
    for (int row = 0; row < 8; ++row) {  // its address comes from lane 8 matrix + row
      const int lane = 8 * matrix + row;
      const uint32_t address = lane_of(lane)->address;
      note_write(block->fibers[self->warp * 32 + lane], address, 16, first.site);
      std::memcpy(shared_pointer(address, 16), m[row], 16);
      if (options.banks) offsets.push_back(address - kWindow);
    }
    if (options.banks) note_turn("stmatrix", offsets, 16);
  }
}

}  // namespace

void store_matrices(const uint32_t* registers, int count, bool transposed, uint32_t address,
                    const char* site) {
  Store mine{registers, address, count, transposed, site};
  warp_meet(site, ~0u, &mine, store, site);
}

int elected(const char* site, uint32_t mask) {
  int leader = 0;
  const auto elect = [](void** brought, uint32_t lanes) {
    // The ISA does not specify which one: here the seed decides.
    const uint64_t chosen = (options.seed * 0x9E3779B97F4A7C15ull ^ lanes) * 0xD1B54A32D192ED03ull >> 32;
    uint32_t rest = lanes;
    if (options.schedule != kInOrder)
      for (uint64_t i = chosen % static_cast<uint64_t>(__builtin_popcount(lanes)); i; --i)
        rest &= rest - 1;
    for (int lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) *static_cast<int*>(brought[lane]) = __builtin_ctz(rest);
  };
  warp_meet("elect.sync", mask, &leader, elect, nullptr, site);
  return leader;
}

}  // namespace emu
