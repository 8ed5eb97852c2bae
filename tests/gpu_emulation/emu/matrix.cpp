// ldmatrix and mma.sync, by the fragment layouts of the PTX ISA. test_emulator.py compares
// them with an independent source of those layouts. And arithmetic that hardware approximates.
#include <algorithm>
#include <cmath>

#include "block.h"

#define FA_ISA emulator
#include "cpu/base/convert.h"

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
    std::vector<uint32_t> offsets;
    for (int row = 0; row < 8; ++row) {  // its address comes from lane 8 matrix + row
      const int lane = 8 * matrix + row;
      const uint32_t address = lane_of(lane)->address;
      std::memcpy(m[row], shared_pointer(address, 16), 16);
      note_read(block->fibers[self->warp * 32 + lane], address, 16, "ldmatrix");
      if (options.banks) offsets.push_back(address - kWindow);
    }
    if (options.banks) note_turn("ldmatrix", offsets, 16);
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

}  // namespace

// Terms are truncated to the last bit of the largest, and one more; the sum to a float's last bit.
float truncated_sum(const double (&terms)[9]) {
  double plain = 0, largest = 0;
  for (const double x : terms) {
    plain += x;
    largest = std::max(largest, std::fabs(x));
  }
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, std::max(std::ilogb(largest), -126) - 24);
  double sum = 0;  // exact: whole numbers of units, of which there are few
  for (const double x : terms) sum += std::trunc(x / unit);
  sum *= unit;
  if (sum == 0) return 0.0f;
  const double last = std::ldexp(1.0, std::max(std::ilogb(sum), -126) - 23);
  return static_cast<float>(std::trunc(sum / last) * last);
}

namespace {

// Eight products at a time, added to d.
void multiply_pessimistically(const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j)
      for (int first = 0; first < 16; first += 8) {
        double terms[9] = {d[i][j]};
        for (int k = 0; k < 8; ++k) terms[k + 1] = double{a[i][first + k]} * b[first + k][j];
        d[i][j] = truncated_sum(terms);
      }
}

float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// From -1 to 1, derived from the bits of the argument.
float error_of(float x) {
  return static_cast<float>((__float_as_uint(x) * 2654435761u >> 16) % 5) / 2 - 1;
}

// Off by up to two units in the last place, up or down.
float within_two_ulp(float exact, float x) {
  const bool normal = std::fabs(exact) >= 0x1p-125f && std::isfinite(exact);
  if (!options.pessimistic || !normal || exact == 1) return exact;
  const int off = static_cast<int>(2 * error_of(x));
  return __uint_as_float(__float_as_uint(exact) + static_cast<unsigned>(off));
}

// D (16 x 8) += A (16 x 16) B (16 x 8). Lane 4 g + t holds, two at a time along a row: of A the
// rows g and g + 8, columns 2 t and 2 t + 8; of B, which is stored transposed, column g, rows 2 t
// and 2 t + 8; of D the rows g and g + 8, columns 2 t.
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
  if (options.pessimistic)
    multiply_pessimistically(a, b, d);
  else
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 16; ++k)
        for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) lane_of(lane)->d[i] = d[g + 8 * (i / 2)][2 * t + i % 2];
  }
}

struct Multiply32 {
  float* d;
  const uint32_t *a, *b;
};

// tf32 has the first 10 bits of a float32's fraction: the others are cut off.
float tf32(uint32_t bits) { return __uint_as_float(bits & ~0x1FFFu); }

// D (16 x 8) += A (16 x 8) B (8 x 8). Lane 4 g + t holds of A the rows g and g + 8 of columns t and
// t + 4; of B, column g of rows t and t + 4; D as above.
void multiply32(void** brought, uint32_t) {
  float a[16][8], b[8][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<Multiply32*>(brought[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32(mine.a[i]);
      d[g + 8 * (i / 2)][2 * t + i % 2] = mine.d[i];
    }
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = tf32(mine.b[i]);
  }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      double terms[9] = {d[i][j]};
      for (int k = 0; k < 8; ++k) {
        terms[k + 1] = double{a[i][k]} * b[k][j];
        d[i][j] += a[i][k] * b[k][j];
      }
      if (options.pessimistic) d[i][j] = truncated_sum(terms);
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      static_cast<Multiply32*>(brought[lane])->d[i] =
          d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

}  // namespace

float widened(uint16_t bits, bool bfloat16) {
  return bfloat16 ? fa::emulator::from_bf16(bits) : fa::emulator::from_f16(bits);
}

uint32_t narrowed(float x, bool bfloat16) {
  return bfloat16 ? fa::emulator::to_bf16(x) : fa::emulator::to_f16(x);
}

float approximate_exp2(float x, bool ftz) {
  const float exact = within_two_ulp(std::exp2(ftz ? without_subnormal(x) : x), x);
  return ftz ? without_subnormal(exact) : exact;
}

// The error is absolute where the result is below 1, and relative beyond.
float approximate_log2(float x, bool ftz) {
  const float exact = std::log2(ftz ? without_subnormal(x) : x);
  if (!options.pessimistic || !std::isfinite(exact)) return exact;
  return exact + 0x1p-23f * error_of(x) * std::max(1.0f, std::fabs(exact));
}

float approximate_quotient(float a, float b) { return within_two_ulp(a / b, b); }

void load_matrices(uint32_t* registers, int count, bool transposed, uint32_t address,
                   const char* site) {
  Load mine{registers, address, count, transposed};
  const char* const name = site ? site : transposed ? "ldmatrix.trans" : "ldmatrix";
  warp_meet(name, ~0u, &mine, load, site ? site : place_here(__builtin_return_address(0)));
}

void multiply1688(float* d, const uint32_t* a, const uint32_t* b, const char* site) {
  Multiply32 mine{d, a, b};
  warp_meet(site, ~0u, &mine, multiply32, site);
}

void multiply16816(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool bfloat16,
                   const char* site) {
  Multiply mine{d, a, {b0, b1}, bfloat16};
  const char* const name = site ? site : bfloat16 ? "mma.bf16" : "mma.f16";
  warp_meet(name, ~0u, &mine, multiply, site ? site : place_here(__builtin_return_address(0)));
}

}  // namespace emu
