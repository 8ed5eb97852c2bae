// Decides which kernels run a call: which instruction sets this machine and this build have, which
// of them serves a chip, and which of its kernels a pass of a call. Nothing is timed in the process,
// because instruction sets differ in the last bits, and runs and ranks must repeat. Tiles go first,
// then wider vectors (on no measured chip are they slower); the question is only whether to use
// VDPBF16PS, the one instruction that avx512_bf16 adds.
#include "kernel_choice.h"

#include <atomic>
#include <cstring>
#include <string>

#include "../../common/item_size.h"
#include "../kernels.h"
#include "platform.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(FA_HAS_AMX_BF16)
#include "../amx/amx_enable.h"
#endif

// csrc/CMakeLists.txt has the list of instruction sets. It defines FA_ISAS with those that it builds,
// best first, as ISA(name, beside): the set beside it has the kernels that it lacks.
#if !defined(FA_ISAS)
#define FA_ISAS(ISA) ISA(generic, generic)
#endif

namespace fa {

// --- the machine -----------------------------------------------------------------------
// Everything that the flags in CMake allow the compiler to use, except F16C: every processor with
// AVX2 has it, and no builtin checks for it alone.
bool runs_here(const std::string& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return avx2;
  if (isa == "avx512" || isa == "amx_model") return avx512;
  if (isa == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(FA_HAS_AMX_BF16)
  if (isa == "amx_bf16") return avx512 && tiles_refused().empty();
#endif
#elif defined(__aarch64__)
  if (isa == "neon_bf16") return has_bf16_products();
  if (isa == "sve256") return has_sve256() && has_bf16_products();
#endif
  return isa == "generic";
}

// The table look-ups of VBMI, which a chip with AVX-512 may lack.
bool has_byte_tables() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
#else
  return false;
#endif
}

struct Chip {
  std::string vendor;  // as CPUID spells it; empty where there is none
  int64_t family, model;
};

Chip this_chip() {
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

const Served& served(const Chip& chip) {
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
Order order_for(const Chip& chip, const std::string& isas) {
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
  const bool everywhere = row.pairs == Pairs::everywhere;
  return {everywhere ? widest : "avx512", widest,
          (everywhere ? "" : "avx512_bf16 only decodes bfloat16; ") + named + row.why};
}

// Of some sets, the widest last, the best that a machine has: FASTATTN_ISAS=native.
std::string best_of(const Chip& chip, bool (*runs)(const std::string&), int count, char** names) {
  std::string here;
  for (int i = 0; i < count; ++i)
    if (std::strcmp(names[i], "amx_model") && runs(names[i]))
      here = names[i] + (here.empty() ? "" : "," + here);
  return order_for(chip, here).isa;
}

}  // namespace fa

#if defined(FA_PRINT_BEST)  // a program of the build
#include <cstdio>
int main(int count, char** names) {
  std::fputs(fa::best_of(fa::this_chip(), fa::runs_here, count - 1, names + 1).c_str(), stdout);
}
#else

namespace fa {

// --- the instruction sets --------------------------------------------------------------
#define FA_DECLARE(name, beside) \
  namespace name {               \
  extern const Kernels kernels;  \
  }
FA_ISAS(FA_DECLARE)
#undef FA_DECLARE

namespace {

struct Isa {
  const char *name, *other;
  const Kernels &own, &beside;

  // Kernels of its own, or else of the set beside it.
  const Arithmetic& of(Arithmetic Kernels::* kind) const {
    return (own.*kind).forward ? own.*kind : beside.*kind;
  }
  const Tangents& of(Tangents Kernels::* kind) const {
    return (own.*kind).jvp ? own.*kind : beside.*kind;
  }
  const Kernels& of_vectors() const { return own.f32.forward ? own : beside; }
  bool has_tiles() const { return own.tiles[0].forward; }
  // True if the other set runs all passes of this dtype, because it can multiply it.
  bool leaves(int64_t dtype) const {
    return dtype == FA_BF16 && own.f32.forward && !own.bf16.forward && beside.bf16.forward;
  }
};
#define FA_ROW(name, beside) {#name, #beside, name::kernels, beside::kernels},
const Isa kIsas[] = {FA_ISAS(FA_ROW)};
#undef FA_ROW

// --- the kernels of a pass -------------------------------------------------------------
int64_t group(const Params& p) { return p.H / std::max<int64_t>(p.Hk, 1); }

// Numbers of eight and four bits are multiplied in float32, except for float64 queries.
Plan decode_plan(const StoredKeys& stored, const Arithmetic& few, bool bf16, const Params& p) {
  const auto whole = [&](int64_t columns) { return p.D % columns == 0 && p.Dv % columns == 0; };
  if (p.q.dtype == FA_F64) return few.decode(p);
  switch (p.k.dtype) {
    case FA_BF16:
      return (bf16 ? few.decode : stored.bf16)(p);
    case FA_F16:
      return stored.f16(p);
    case FA_I8: {  // queries of float32 have more than the integers keep
      const bool integers = stored.i8_as_integers && item_size(p.q.dtype) == 2 && whole(32);
      return (integers ? stored.i8_as_integers : stored.i8)(p);
    }
    case FA_E4M3:
      return (stored.e4m3_in_tables && has_byte_tables() && whole(64) ? stored.e4m3_in_tables
                                                                      : stored.e4m3)(p);
    case FA_E5M2:
      return stored.e5m2(p);
    case FA_I4:
      return stored.i4(p);
    default:
      return few.decode(p);
  }
}

// `rescored`: forward ran on other kernels than these, which round scores differently.
Plan plan_on_vectors(const Isa& isa, const Params& p, int64_t pass, bool rescored = false) {
  const bool wide = p.q.dtype == FA_F64;
  const bool bf16 = p.q.dtype == FA_BF16 && isa.of(&Kernels::bf16).forward;
  const Arithmetic& few = isa.of(bf16 ? &Kernels::few_bf16 : wide ? &Kernels::f64 : &Kernels::f32);
  const bool is_few = has_few_rows(p, few.lanes);
  const Arithmetic& all = bf16 && !is_few ? isa.of(&Kernels::bf16) : few;
  const Tangents& tangents = isa.of(wide ? &Kernels::tangents_f64 : &Kernels::tangents_f32);
  rescored = rescored || bf16 || is_few;  // than those of tangents
  switch (pass) {
    case FA_FORWARD:
      return is_few ? decode_plan(isa.of_vectors().stored, few, bf16, p) : all.forward(p);
    case FA_WEIGHTS:
      return all.weights(p);
    case FA_BACKWARD:  // with more rows, the scores of a block of keys would leave a near cache
      if (p.page) return few.paged_gradients(p);
      if (is_few && group(p) * p.M <= 128 && !p.mod.dfloats) return few.few_gradients(p);
      return all.backward(p);
    case FA_WEIGHTS_BACKWARD:
      return all.backward(p);
    case FA_JVP:
      return tangents.jvp(p);
    case FA_FORWARD_JVP:
      if (!rescored) return tangents.forward_jvp(p);
      return plan_on_vectors(isa, p, FA_FORWARD).then(tangents.jvp(p));
    default:
      return (rescored ? tangents.second_of_others : tangents.second)(p);
  }
}

// Float64 has no planes for tiles, and float32 is taken off tiles on request. So do calls with a
// scale so large that products below the least normal number, which are 0 on tiles, would show.
std::atomic<bool> float32_on_tiles{true};
bool on_tiles(const Isa& isa, int64_t dtype) {
  return isa.has_tiles() &&
         (dtype == FA_BF16 || dtype == FA_F16 || (dtype == FA_F32 && float32_on_tiles));
}
bool on_tiles(const Isa& isa, const Params& p) {
  constexpr double most = 0x1p60;
  return on_tiles(isa, p.q.dtype) && (p.q.dtype == FA_BF16 || (-most < p.scale && p.scale < most));
}
const Arithmetic& tiles_for(const Isa& isa, int64_t dtype) {
  return isa.own.tiles[dtype == FA_BF16 ? 0 : dtype == FA_F16 ? 1 : 2];
}
constexpr int64_t kRowsOfTiles = 16;

Plan plan_on_tiles(const Isa& isa, const Params& p, int64_t pass) {
  const Arithmetic& tiles = tiles_for(isa, p.q.dtype);
  const bool few = !p.row_invariant && p.M > 0 && p.M <= kRowsOfTiles;
  switch (pass) {
    case FA_FORWARD:
      return (few ? tiles.decode : tiles.forward)(p);
    case FA_WEIGHTS:
      return tiles.weights(p);
    case FA_BACKWARD:
    case FA_WEIGHTS_BACKWARD:
      return shares_pages(p, pass) ? plan_on_vectors(isa, p, pass) : tiles.backward(p);
    case FA_FORWARD_JVP:
      return plan_on_tiles(isa, p, FA_FORWARD).then(plan_on_vectors(isa, p, FA_JVP));
    default:
      return plan_on_vectors(isa, p, pass, true);
  }
}

Plan plan_on(const Isa& isa, const Params& p, int64_t pass) {
  if (on_tiles(isa, p)) return plan_on_tiles(isa, p, pass);
  if (isa.leaves(p.q.dtype))
    return plan_on_vectors({isa.other, isa.other, isa.beside, isa.beside}, p, pass);
  return plan_on_vectors(isa, p, pass);
}

// True if the set for decoding runs this call: few rows on many keys, with keys and values read in
// place. Its gradients and weights run there, too: one set computes a call's scores.
//
// With fewer than four rows on the same keys, tiles are so empty that they gain nothing, measured.
// Splitting keys and values that are read once costs what vectors need for some ten or twenty rows,
// counted in instructions; not measured. So does converting eight and four bits.
bool decodes(const Isa& isa, const Params& p) {
  if (on_tiles(isa, p)) {
    const int64_t least = p.k.dtype == FA_BF16 ? 4 : p.q.dtype == FA_F32 ? 32 : 16;
    return !p.row_invariant && p.M <= kRowsOfTiles && p.M * group(p) < least;
  }
  const Kernels& all = isa.leaves(p.q.dtype) ? isa.beside : isa.of_vectors();
  return has_few_rows(p, (p.q.dtype == FA_F64 ? all.f64 : all.f32).lanes);
}

// --- the choice ------------------------------------------------------------------------
// One instruction set, or one for decoding and one for everything else.
struct Choice {
  const Isa *isa, *decoding;
  std::string why;

  const Isa& of(const Params& p) const { return *(decodes(*isa, p) ? decoding : isa); }
};

const Isa* named(const char* name) {
  for (const Isa& isa : kIsas)
    if (std::strcmp(isa.name, name) == 0 && runs_here(name)) return &isa;
  return nullptr;
}

// Its sets are null if this machine or this build lacks them.
Choice choice_of(const Order& order) {
  return {named(order.isa.c_str()), named(order.decoding.c_str()), order.why};
}

std::string names_here(const Isa* first) {  // in the order of kIsas, after this one
  std::string names = first ? first->name : "";
  for (const Isa& isa : kIsas)
    if (&isa != first && runs_here(isa.name))
      names += (names.empty() ? "" : ",") + std::string(isa.name);
  return names;
}

const Choice& best() {
  static const Choice choice = [] {
    Order order = order_for(this_chip(), names_here(nullptr));
#if defined(FA_HAS_AMX_BF16)
    if (announces_amx() && !tiles_refused().empty())
      order.why += "; not amx_bf16: " + tiles_refused();
#endif
    return choice_of(order);
  }();
  return choice;
}

// Selected by name, while no other thread is in a call: so the text needs no lock.
Choice selected;
std::atomic<const Choice*> chosen{&best()};

}  // namespace

Plan make_plan(const Params& p, int64_t pass) { return plan_on(chosen.load()->of(p), p, pass); }

IndexerTasks indexer_tasks(const FaIndexer& p) {
  const Isa& isa = *chosen.load()->isa;
  if (p.q.dtype == FA_BF16 && isa.has_tiles()) return isa.own.tiles[0].indexer(p);
  if (p.q.dtype == FA_BF16 && isa.of(&Kernels::bf16).indexer)
    return isa.of(&Kernels::bf16).indexer(p);
  return isa.of(&Kernels::f32).indexer(p);
}

NormRopeTasks norm_rope_tasks(const FaNormRope& p) {
  return chosen.load()->isa->of_vectors().norm_rope(p);
}

}  // namespace fa

extern "C" {

const char* fa_cpu_isas(void) {
  static const std::string names = fa::names_here(fa::best().isa);
  return names.c_str();
}

const char* fa_cpu_isa(void) { return fa::chosen.load()->isa->name; }

const char* fa_cpu_unit(const FaCall* call) {
  const fa::Params p{call->params, call->mod};
  const fa::Isa& isa = fa::chosen.load()->of(p);
  const bool own = isa.has_tiles() ? fa::on_tiles(isa, p) : !isa.leaves(p.q.dtype);
  return own ? isa.name : isa.other;
}

const char* fa_cpu_why(void) { return fa::chosen.load()->why.c_str(); }

const char* fa_cpu_served(const char* vendor, int64_t family, int64_t model, const char* isas) {
  std::string& said = fa::of_thread<std::string>();
  const fa::Order order = fa::order_for({vendor, family, model}, isas);
  said = order.isa + ", " + order.decoding + ": " + order.why;
  return said.c_str();
}

int64_t fa_cpu_select(const char* name, const char* decoding) {
  const fa::Choice choice = fa::choice_of({name, decoding, "selected by its name"});
  if (!choice.isa || !choice.decoding) return 1;
  fa::selected = choice;
  fa::chosen = &fa::selected;
  return 0;
}

void fa_cpu_float32_on_tiles(int64_t on) { fa::float32_on_tiles = on != 0; }

double fa_cpu_peak(int64_t dtype, double seconds) {
  const fa::Isa& isa = *fa::chosen.load()->isa;
  const bool bf16 = dtype == FA_BF16 && isa.of(&fa::Kernels::bf16).forward;
  const fa::Arithmetic& of = fa::on_tiles(isa, dtype) ? fa::tiles_for(isa, dtype)
                                                      : isa.of(dtype == FA_F64 ? &fa::Kernels::f64
                                                               : bf16 ? &fa::Kernels::few_bf16
                                                                      : &fa::Kernels::f32);
  return of.peak(seconds, fa::thread_seconds);
}

void fa_cpu_vector_function(int64_t which, int64_t dtype, const void* x, void* y, int64_t n) {
  fa::chosen.load()->isa->of_vectors().vector_function(which, dtype, x, y, n);
}

}  // extern "C"
#endif
