// Runs one small case of the CPU kernels on one thread, for bench/instructions/x86.py to count
// under callgrind. With no arguments it prints the names of the cases.
//
// Built without optimisation: callgrind counts within `counted`, which must stay a function.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

// What differs from float32 self-attention of 2 heads, 200 tokens and D=64: lengths that fill
// no tile, so that edges count too.
struct Case {
  const char* name;
  int64_t dtype, pass;
  int64_t D, rows, groups;         // query heads that share a key head
  int64_t causal, window, length;  // window: keys before a row's own; length: valid keys
  int64_t bias;                    // float, (B,H,M,N); its gradient too in a backward pass
  double dropout;
};
static const struct Case kCases[] = {
    {"forward full"},
    {"forward causal", .causal = 1},
    {"forward window", .causal = 1, .window = 50},
    {"forward key length", .length = 150},
    {"forward bias", .bias = 1},
    {"forward dropout", .dropout = 0.1},
    {"forward D40", .D = 40},
    {"forward bfloat16", .dtype = FA_BF16},
    {"forward float16", .dtype = FA_F16},
    {"decode", .rows = 1, .groups = 4},
    {"backward full", .pass = FA_BACKWARD},
    {"backward causal", .pass = FA_BACKWARD, .causal = 1},
    {"backward bias", .pass = FA_BACKWARD, .bias = 1},
    {"backward few rows", .pass = FA_BACKWARD, .rows = 1, .groups = 4},
    {"jvp full", .pass = FA_JVP},
    {"second full", .pass = FA_SECOND},
};
enum { kNumCases = sizeof kCases / sizeof *kCases };

// A new tensor, batch size 1, of values between 0.5 and 1 of either sign: the same in every run,
// and as easily written in 16 bits as in 32.
static struct FaTensor tensor(int64_t dtype, int64_t heads, int64_t rows, int64_t columns) {
  static uint32_t random = 1;
  const int64_t count = heads * rows * columns;
  uint32_t* wide = malloc(count * sizeof *wide);
  uint16_t* narrow = (uint16_t*)wide;
  for (int64_t i = 0; i < count; ++i) {
    random = random * 1664525 + 1013904223;
    const uint32_t sign = random & 0x80000000, mantissa = random >> 8 & 0x7FFFFF;
    const uint32_t bits = sign | 0x3F000000 | mantissa;
    if (dtype == FA_F32) wide[i] = bits;
    if (dtype == FA_BF16) narrow[i] = bits >> 16;
    if (dtype == FA_F16) narrow[i] = sign >> 16 | 0x3800 | mantissa >> 13;
  }
  return (struct FaTensor){wide, {count, rows * columns, columns, 1}, dtype};
}

static struct FaParams params(const struct Case* c) {
  static int64_t length, seed = 1;
  const int64_t unlimited = INT64_C(1) << 40, dtype = c->dtype;
  const int64_t N = 200, M = c->rows ? c->rows : N, D = c->D ? c->D : 64;
  const int64_t Hk = 2, H = c->groups ? Hk * c->groups : Hk;
  struct FaParams p = {
      .q = tensor(dtype, H, M, D),
      .k = tensor(dtype, Hk, N, D),
      .v = tensor(dtype, Hk, N, D),
      .out = tensor(dtype, H, M, D),
      .lse = tensor(FA_F32, H, M, 2),
      .seed = &seed,
      .B = 1, .H = H, .Hk = Hk, .M = M, .N = N, .D = D, .Dv = D,
      .left = c->window ? c->window : unlimited,
      .right = c->causal ? 0 : unlimited,
      .threads = 1,
      .scale = 1 / sqrt(D),
      .dropout_p = c->dropout,
  };
  length = c->length;
  if (c->length) p.lengths = &length;
  if (c->bias) p.mask = tensor(dtype, H, M, N);
  if (c->pass >= FA_JVP) {
    p.q_t = tensor(dtype, H, M, D);
    p.k_t = tensor(dtype, Hk, N, D);
    p.v_t = tensor(dtype, Hk, N, D);
    p.out_t = tensor(dtype, H, M, D);
    p.lse_t = tensor(FA_F32, H, M, 1);
  }
  if (c->pass == FA_BACKWARD || c->pass == FA_SECOND) {
    p.dout = tensor(dtype, H, M, D);
    p.dq = tensor(dtype, H, M, D);
    p.dk = tensor(dtype, Hk, N, D);
    p.dv = tensor(dtype, Hk, N, D);
    if (c->bias) p.dmask = tensor(dtype, H, M, N);
  }
  return p;
}

// The sizes of what the passes write, as `params` made them.
static struct FaCall call(const struct Case* c) {
  const struct FaParams p = params(c);
  return (struct FaCall){
      .params = p,
      .size = {[FA_WRITES_OUT] = {1, p.H, p.M, p.Dv},
               [FA_WRITES_LSE] = {1, p.H, p.M, 2},
               [FA_WRITES_DQ] = {1, p.H, p.M, p.D},
               [FA_WRITES_DK] = {1, p.Hk, p.N, p.D},
               [FA_WRITES_DV] = {1, p.Hk, p.N, p.Dv},
               [FA_WRITES_DMASK] = {1, p.H, p.M, p.N},
               [FA_WRITES_OUT_T] = {1, p.H, p.M, p.Dv},
               [FA_WRITES_LSE_T] = {1, p.H, p.M, 1}},
  };
}

static int64_t counted(const struct FaCall* p, int64_t pass) { return fa_cpu_run(p, pass, 1); }

static int fail(const char* what, const char* got, const char* expected) {
  fprintf(stderr, "%s: got %s, expected %s\n", what, got, expected);
  return 1;
}

int main(int argc, char** argv) {
  if (argc == 1) {
    for (int i = 0; i < kNumCases; ++i) puts(kCases[i].name);
    return 0;
  }
  if (argc != 3 && argc != 4)
    return fail("arguments", "another number", "an instruction set, a case, and how many calls");
  if (fa_cpu_select(argv[1], argv[1])) return fail("instruction set", argv[1], fa_cpu_isas());
  const struct Case* c = kCases;
  while (c < kCases + kNumCases && strcmp(c->name, argv[2])) ++c;
  if (c == kCases + kNumCases)
    return fail("case", argv[2], "one that is printed without arguments");

  // The first call sets up what lasts, such as scratch memory and OpenMP, which is not counted.
  // Other passes need its out and lse, too.
  struct FaCall p = call(c);
  int64_t status = fa_cpu_run(&p, FA_FORWARD, 1);
  p.params.workspace = aligned_alloc(64, (fa_cpu_workspace(&p, c->pass) + 63) / 64 * 64);
  for (int64_t calls = argc == 4 ? atoi(argv[3]) : 1; calls > 0 && status == FA_OK; --calls)
    status = counted(&p, c->pass);
  if (status == FA_OK) return 0;
  return fail("status",
              status == FA_NO_MEMORY      ? "FA_NO_MEMORY"
              : status >= FA_BAD_EXTENT ? "FA_BAD_EXTENT"
                                        : "FA_BAD_LENGTH",
              "FA_OK");
}
