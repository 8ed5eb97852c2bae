// Plans of kernels, in units that are compiled apart, so that several compilers work on one
// instruction set. CMake compiles unit.cpp once for each unit: for FORWARD, FA_IN_FORWARD is empty and
// the names of the others are `extern`; all are for kernels_for_isa.cpp. Without FA_UNITS that file
// compiles whatever it calls.
#pragma once
#if defined(FA_AMX)
#include "amx/amx_decode.h"
#include "amx/amx_forward.h"
#endif
#include "backward/backward.h"
#include "backward/backward_jvp.h"
#include "backward/few_gradients.h"
#include "backward/paged_gradients.h"
#include "forward/decode.h"
#include "forward/forward.h"
#include "forward/jvp.h"
#include "forward/weights.h"

namespace fa {
namespace FA_ISA {

#if defined(FA_BF16_QUADS)
using Bf16 = QuadBf16;
#elif defined(FA_BF16_PRODUCTS)
using Bf16 = PairedBf16;
#endif

template <class Kernels, class... More>
Plan plan_of(const Params& p, More... more) {
  return Kernels::plan(p, more...);
}

#if defined(FA_UNITS)
#if defined(FA_AMX)
#define FA_PLANS(P)                                                    \
  FA_IN_FORWARD template Plan plan_of<AmxForward<P>>(const Params&);   \
  FA_IN_FORWARD template Plan plan_of<Weights<Amx<P>>>(const Params&); \
  FA_IN_DECODE template Plan plan_of<AmxDecode<P>>(const Params&);     \
  FA_IN_GRADIENTS template Plan plan_of<Backward<Amx<P>>>(const Params&);
FA_PLANS(1)
FA_PLANS(2)
FA_PLANS(3)
#else
#define FA_PLANS_OF_TILES(Mul, forward, gradients)            \
  forward template Plan plan_of<Forward<Mul>>(const Params&); \
  forward template Plan plan_of<Weights<Mul>>(const Params&); \
  gradients template Plan plan_of<Backward<Mul>>(const Params&);
#define FA_PLANS_OF_ROWS(Mul, decode, gradients)                     \
  decode template Plan plan_of<Decode<Mul>>(const Params&);          \
  gradients template Plan plan_of<FewGradients<Mul>>(const Params&); \
  gradients template Plan plan_of<PagedGradients<Mul>>(const Params&);
#define FA_PLANS_OF_TANGENTS(R, tangents)                            \
  tangents template Plan plan_of<Jvp<R>, bool>(const Params&, bool); \
  tangents template Plan plan_of<Second<R>, bool>(const Params&, bool);
FA_PLANS_OF_TILES(Plain<float>, FA_IN_FORWARD, FA_IN_GRADIENTS)
FA_PLANS_OF_ROWS(Plain<float>, FA_IN_DECODE, FA_IN_GRADIENTS)
FA_PLANS_OF_TANGENTS(float, FA_IN_TANGENTS)
FA_PLANS_OF_TILES(Plain<double>, FA_IN_FLOAT64, FA_IN_FLOAT64)
FA_PLANS_OF_ROWS(Plain<double>, FA_IN_FLOAT64, FA_IN_FLOAT64)
FA_PLANS_OF_TANGENTS(double, FA_IN_FLOAT64)
FA_IN_DECODE template Plan plan_of<Decode<Plain<float>, StoredF16>>(const Params&);
FA_IN_DECODE template Plan plan_of<Decode<Plain<float>, StoredBf16>>(const Params&);
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredByte<FA_I8>>>(const Params&);
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredByte<FA_E4M3>>>(const Params&);
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredByte<FA_E5M2>>>(const Params&);
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredInt4>>(const Params&);
#if defined(__AVX2__)
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredInt8>>(const Params&);
#endif
#if defined(__AVX512F__)
FA_IN_FEW_BITS template Plan plan_of<Decode<Plain<float>, StoredE4m3>>(const Params&);
#endif
#if defined(FA_BF16_PRODUCTS)
FA_PLANS_OF_TILES(PairedBf16, FA_IN_BF16, FA_IN_BF16)
FA_PLANS_OF_ROWS(PairedBf16, FA_IN_BF16, FA_IN_BF16)
#endif
#if defined(FA_BF16_QUADS)
FA_PLANS_OF_TILES(QuadBf16, FA_IN_BF16, FA_IN_BF16)
#endif
#endif
#endif

}  // namespace FA_ISA
}  // namespace fa
