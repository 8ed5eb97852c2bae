// Chooses the instruction set for a chip, from facts about the chip and measurements of some chips.
// It never times anything in the process, because instruction sets differ in the last bits, and
// runs and ranks must repeat. Tiles go first, then wider vectors (on no measured chip are they
// slower); the question is only whether to use VDPBF16PS, the one instruction that avx512_bf16
// adds.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fa {

struct Chip {
  std::string vendor;  // as CPUID spells it; empty where there is none
  int64_t family, model;
};

inline Chip this_chip() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    char vendor[13] = {};
    std::memcpy(vendor, &b, 4);
    std::memcpy(vendor + 4, &d, 4);
    std::memcpy(vendor + 8, &c, 4);
    __get_cpuid(1, &a, &b, &c, &d);
    const unsigned family = a >> 8 & 15, extended = a >> 20 & 255;
    const unsigned model = (a >> 4 & 15) | (a >> 16 & 15) << 4;
    return {vendor, family == 15 ? family + extended : family, model};
  }
#endif
  return {"", 0, 0};
}

// When avx512_bf16 is preferred to avx512, if a chip has both and no tiles. Decoding gains where
// the other passes lose: it is bound by memory, and multiplies pairs in place, while avx512 first
// widens them.
enum class Pairs { everywhere, decoding };

struct Served {
  const char* vendor;  // null: any
  int64_t family, first_model, last_model;
  Pairs pairs;
  const char* why;
  const char* tiles = "not measured; where they were, tiles had many times the rate of vectors";
};
constexpr int64_t kAny = -1, kLast = 255;  // any family; the largest model there is

// The first row that matches applies. Times are thread CPU time of bfloat16, interleaved, one
// thread.
constexpr Served kServed[] = {
    {"GenuineIntel", 6, 207, 207, Pairs::decoding,
     "Emerald Rapids, measured: VDPBF16PS does 121 GF/s and float32 241, so with it forward and "
     "backward (N 512 and 2048, D 64 and 128) take 1.5 to 1.8 times as long; decoding 0.4 to 0.5",
     "Emerald Rapids, not measured with these kernels: prototypes did 1.7 to 4.7 times torch "
     "forward in bfloat16, 3.4 to 5.2 in float16 and 1.85 to 3.1 in float32, and 3.6 to 8.5 times "
     "backward in bfloat16"},
    {"GenuineIntel", 6, 143, 143, Pairs::decoding,
     "Sapphire Rapids, not measured: the vector units of Emerald Rapids",
     "Sapphire Rapids, not measured: the tiles of Emerald Rapids"},
    {"GenuineIntel", 6, 173, 174, Pairs::decoding,
     "Granite Rapids, not measured: the vector units of Emerald Rapids, as far as published",
     "Granite Rapids, not measured: the tiles of Emerald Rapids, as far as published"},
    {"GenuineIntel", kAny, 0, kLast, Pairs::decoding,
     "an Intel chip that is not in the table: on the one measured VDPBF16PS has half the rate"},
    {"AuthenticAMD", 26, 0, kLast, Pairs::everywhere,
     "Zen 5, measured: VDPBF16PS does 465 to 489 GF/s and float32 234"},
    {"AuthenticAMD", 25, 0, kLast, Pairs::everywhere,
     "Zen 4, measured: VDPBF16PS does 235 GF/s and float32 117"},
    {nullptr, kAny, 0, kLast, Pairs::everywhere,
     "a chip that is not in the table: it has the instruction to gain by it"},
};

inline const Served& served(const Chip& chip) {
  for (const Served& row : kServed)
    if ((!row.vendor || chip.vendor == row.vendor) &&
        (row.family == kAny || chip.family == row.family) && row.first_model <= chip.model &&
        chip.model <= row.last_model)
      return row;
  return kServed[sizeof kServed / sizeof *kServed - 1];
}

// What to use, by name: one instruction set to decode with and one for everything else.
struct Order {
  std::string isa, decoding, why;
};

// `isas`: the instruction sets that the chip and the build have, separated by commas, tiles and
// then the widest vectors first.
inline Order order_for(const Chip& chip, const std::string& isas) {
  const size_t end = isas.find(',');
  const std::string widest = isas.substr(0, end);
  const Served& row = served(chip);
  const std::string named = chip.vendor + " family " + std::to_string(chip.family) + " model " +
                            std::to_string(chip.model) + ": ";
  if (widest == "amx_bf16") {
    const std::string vectors = isas.substr(end + 1, isas.find(',', end + 1) - end - 1);
    return {widest, vectors, "not float64, nor a few rows; " + named + row.tiles};
  }
  if (widest != "avx512_bf16")
    return {widest, widest, "the widest vectors that this machine and this build have"};
  // A build may have chosen instruction sets alone (FASTATTN_ISAS).
  const bool alone = ("," + isas + ",").find(",avx512,") == std::string::npos;
  const bool everywhere = alone || row.pairs == Pairs::everywhere;
  return {everywhere ? widest : "avx512", widest,
          (everywhere ? "" : "avx512_bf16 only decodes bfloat16; ") + named + row.why};
}

}  // namespace fa
