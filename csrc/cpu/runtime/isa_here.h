// Which instruction sets this machine has. CMake defines FA_HAS_<set> for each that it builds besides
// "generic".
#pragma once
#include <string>

#include "platform.h"
#if defined(FA_HAS_AMX_BF16)
#include "../amx/amx_enable.h"
#endif

namespace fa {

// Everything that the flags in CMake allow the compiler to use, except F16C: every processor with
// AVX2 has it, and no builtin checks for it alone.
inline bool runs_here(const std::string& isa) {
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

}  // namespace fa
