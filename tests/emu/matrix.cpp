// ldmatrix and mma.sync, by the fragment layouts of the PTX ISA. tests/test_emulator.py holds them
// to an independent source of those layouts.
#include "block.h"

#define FA_ISA emulator
#include "cpu/convert.h"

namespace emu {

namespace {

struct Load {
  uint32_t* registers;
  uint32_t address;
  int count;
  bool transposed;
};

void load(void** brought, uint32_t) {
  const auto lane_of = [&](int lane) { return static_cast<Load*>(brought[lane]); };
  const Load& first = *lane_of(0);
  for (int matrix = 0; matrix < first.count; ++matrix) {
    uint16_t m[8][8];
    for (int row = 0; row < 8; ++row) {  // its address comes from lane 8 matrix + row
      const int lane = 8 * matrix + row;
      const uint32_t address = lane_of(lane)->address;
      std::memcpy(m[row], shared_pointer(address, 16), 16);
      note_read(block->fibers[self->warp * 32 + lane], address, 16, "ldmatrix");
    }
    for (int lane = 0; lane < 32; ++lane) {  // gets row lane / 4, columns 2 (lane % 4) + {0, 1}
      const int row = lane / 4, column = 2 * (lane % 4);
      const uint32_t low = first.transposed ? m[column][row] : m[row][column];
      const uint32_t high = first.transposed ? m[column + 1][row] : m[row][column + 1];
      lane_of(lane)->registers[matrix] = low | high << 16;
    }
  }
}

struct Multiply {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  bool bfloat16;
};

float element(const uint32_t* registers, int i, bool bfloat16) {
  return widened(static_cast<uint16_t>(registers[i / 2] >> (16 * (i % 2))), bfloat16);
}

// D (16 x 8) += A (16 x 16) B (16 x 8). Lane 4 g + t holds, two at a time along a row:
// of A the rows g and g + 8, columns 2 t and 2 t + 8; of B, which lies transposed, column g, rows
// 2 t and 2 t + 8; of D the rows g and g + 8, columns 2 t.
void multiply(void** brought, uint32_t) {
  report.multiplies++;
  const auto lane_of = [&](int lane) { return static_cast<Multiply*>(brought[lane]); };
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Multiply& x = *lane_of(lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i)
      a[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = element(x.a, i, x.bfloat16);
    for (int i = 0; i < 4; ++i) b[2 * t + i % 2 + 8 * (i / 2)][g] = element(x.b, i, x.bfloat16);
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = x.d[i];
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) lane_of(lane)->d[i] = d[g + 8 * (i / 2)][2 * t + i % 2];
  }
}

}  // namespace

float widened(uint16_t bits, bool bfloat16) {
  return bfloat16 ? fa::emulator::from_bf16(bits) : fa::emulator::from_f16(bits);
}

uint32_t narrowed(float x, bool bfloat16) {
  return bfloat16 ? fa::emulator::to_bf16(x) : fa::emulator::to_f16(x);
}

void load_matrices(uint32_t* registers, int count, bool transposed, uint32_t address) {
  Load mine{registers, address, count, transposed};
  warp_meet(transposed ? "ldmatrix.trans" : "ldmatrix", ~0u, &mine, load);
}

void multiply16816(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool bfloat16) {
  Multiply mine{d, a, {b0, b1}, bfloat16};
  warp_meet(bfloat16 ? "mma.bf16" : "mma.f16", ~0u, &mine, multiply);
}

}  // namespace emu
