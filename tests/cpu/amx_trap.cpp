// For test_amx.py: runs the tile instructions of compiled kernels on a chip that has none. Each is
// illegal there; the handler decodes its bytes and executes it by amx_rules.h. This tests the
// assembly: operands, their order, addresses, and what the compiler moved past them.
#include <signal.h>
#include <ucontext.h>

#include "amx_rules.h"

namespace {

struct Tiles {
  uint8_t configuration[64];
  uint32_t tile[8][16][16];
};
thread_local Tiles state;
thread_local int64_t executed;

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};
enum Prefix { kNone, k66, kF3, kF2 };

// Eight whole tiles, as the kernels configure them; everything else is illegal here.
bool whole() {
  bool yes = state.configuration[0] == 1;
  for (int t = 0; t < 8; ++t)
    yes = yes && state.configuration[16 + 2 * t] == 64 && state.configuration[48 + t] == 16;
  return yes;
}

// Executes the instruction at the program counter and steps over it; false if it is none of these.
bool execute(greg_t* r) {
  const uint8_t* at = reinterpret_cast<const uint8_t*>(r[REG_RIP]);
  if (at[0] != 0xC4 || (at[1] & 31) != 2) return false;  // VEX, map 0F38
  const bool high_reg = !(at[1] & 128), high_index = !(at[1] & 64), high_base = !(at[1] & 32);
  const int prefix = at[2] & 3, third = ~at[2] >> 3 & 15, opcode = at[3], modrm = at[4];
  const int mod = modrm >> 6, reg = (modrm >> 3 & 7) + 8 * high_reg, rm = modrm & 7;
  if (reg > 7 || at[2] & 0x84) return false;  // eight tiles; no W, no L
  const uint8_t* next = at + 5;
  char* address = nullptr;
  int64_t stride = 0;
  if (mod != 3) {
    int64_t base = 0;
    bool far = mod == 2, relative = false;
    if (rm == 4) {
      const int sib = *next++, index = (sib >> 3 & 7) + 8 * high_index, low = sib & 7;
      if (index != 4) stride = r[kRegisters[index]] << (sib >> 6);
      if (low == 5 && mod == 0)
        far = true;
      else
        base = r[kRegisters[low + 8 * high_base]];
    } else if (rm == 5 && mod == 0) {
      far = relative = true;
    } else {
      base = r[kRegisters[rm + 8 * high_base]];
    }
    int32_t displacement = 0;
    if (mod == 1) displacement = static_cast<int8_t>(*next++);
    if (far) std::memcpy(&displacement, next, 4), next += 4;
    if (relative) base = reinterpret_cast<int64_t>(next);
    address = reinterpret_cast<char*>(base + displacement);
  }
  if (opcode == 0x49 && mod != 3 && prefix == kNone && reg == 0) {  // LDTILECFG
    std::memcpy(state.configuration, address, 64);
    std::memset(state.tile, 0, sizeof state.tile);
  } else if (opcode == 0x49 && mod != 3 && prefix == k66 && reg == 0) {  // STTILECFG
    std::memcpy(address, state.configuration, 64);
  } else if (opcode == 0x49 && modrm == 0xC0 && prefix == kNone) {  // TILERELEASE
    std::memset(&state, 0, sizeof state);
  } else if (!whole()) {
    return false;
  } else if (opcode == 0x49 && mod == 3 && prefix == kF2 && rm == 0) {  // TILEZERO
    std::memset(state.tile[reg], 0, 1024);
  } else if (opcode == 0x4B && mod != 3 && rm == 4 && prefix == kF2) {  // TILELOADD
    for (int i = 0; i < 16; ++i) std::memcpy(state.tile[reg][i], address + i * stride, 64);
  } else if (opcode == 0x4B && mod != 3 && rm == 4 && prefix == kF3) {  // TILESTORED
    for (int i = 0; i < 16; ++i) std::memcpy(address + i * stride, state.tile[reg][i], 64);
  } else if (opcode == 0x5C && mod == 3 && prefix == kF3 && third < 8 && reg != rm &&
             reg != third && rm != third) {  // TDPBF16PS
    plain::multiply(state.tile[rm][0], state.tile[third][0], state.tile[reg][0]);
  } else {
    return false;
  }
  r[REG_RIP] = reinterpret_cast<greg_t>(next);
  ++executed;
  return true;
}

void on_illegal(int number, siginfo_t*, void* context) {
  if (!execute(static_cast<ucontext_t*>(context)->uc_mcontext.gregs)) signal(number, SIG_DFL);
}
struct sigaction before;

}  // namespace

extern "C" {

void begin() {
  struct sigaction mine = {};
  mine.sa_sigaction = on_illegal;
  mine.sa_flags = SA_SIGINFO;
  executed = 0;
  sigaction(SIGILL, &mine, &before);
}
// Returns how many instructions were executed; -1 if tiles were left configured.
int64_t end() {
  sigaction(SIGILL, &before, nullptr);
  return state.configuration[0] ? -1 : executed;
}

}  // extern "C"
