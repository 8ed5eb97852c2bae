// The kernels of one instruction set, FA_ISA, in units that are compiled apart: so several compilers
// work on a set, and an edit of a header compiles the units that include it. CMake compiles this file
// once for each unit of a set, with FA_UNIT and the unit's name; without FA_UNIT it has all of them.
// The caller must check first that the machine has the set.
#include "kernels.h"

#if defined(FA_AMX)  // avx512 has what these two lack
#define FA_ONLY_TILES
#elif defined(__AVX512BF16__)
#define FA_ONLY_BF16
#endif
#if !defined(FA_UNIT)
#define FA_UNIT_TABLE
#if defined(FA_ONLY_TILES)
#define FA_UNIT_TILES_FORWARD
#define FA_UNIT_TILES_DECODE
#define FA_UNIT_TILES_BACKWARD
#else
#define FA_UNIT_FORWARD_BF16
#define FA_UNIT_BACKWARD_BF16
#if !defined(FA_ONLY_BF16)
#define FA_UNIT_FORWARD
#define FA_UNIT_DECODE
#define FA_UNIT_FEW_BITS
#define FA_UNIT_BACKWARD
#define FA_UNIT_FEW_GRADIENTS
#define FA_UNIT_NORM_ROPE
#define FA_UNIT_TANGENTS
#if !defined(FA_WITHOUT_F64)  // tests compile sooner without it
#define FA_UNIT_FORWARD_F64
#define FA_UNIT_BACKWARD_F64
#define FA_UNIT_TANGENTS_F64
#endif
#endif
#endif
#endif

// What all kernels call, the interpreter of score_mods above all, is compiled by one unit of a set.
#if defined(FA_UNIT)
#if defined(FA_UNIT_FORWARD) || defined(FA_UNIT_TILES_FORWARD) || \
    (defined(FA_ONLY_BF16) && defined(FA_UNIT_FORWARD_BF16))
#define FA_HOME
#else
#define FA_HOME extern
#endif
#if defined(FA_UNIT_FORWARD_F64)
#define FA_HOME_F64
#else
#define FA_HOME_F64 extern
#endif
#endif

#define FA_PLAN(name, ...)                                    \
  namespace fa::FA_ISA {                                      \
  Plan name(const Params& p) { return __VA_ARGS__::plan(p); } \
  }
#define FA_TANGENT_PLANS(name, R)                                                    \
  namespace fa::FA_ISA {                                                             \
  Plan jvp_##name(const Params& p) { return Jvp<R>::plan(p, false); }                \
  Plan forward_jvp_##name(const Params& p) { return Jvp<R>::plan(p, true); }         \
  Plan second_##name(const Params& p) { return Second<R>::plan(p, false); }          \
  Plan second_of_others_##name(const Params& p) { return Second<R>::plan(p, true); } \
  }

#if defined(FA_UNIT_FORWARD)
#include "forward/forward.h"
FA_PLAN(forward_f32, Forward<Plain<float>>)
#endif
#if defined(FA_UNIT_DECODE)
#include "forward/decode.h"
FA_PLAN(decode_f32, Decode<Plain<float>>)
FA_PLAN(decode_stored_f16, Decode<Plain<float>, StoredF16>)
FA_PLAN(decode_stored_bf16, Decode<Plain<float>, StoredBf16>)
#endif
#if defined(FA_UNIT_FEW_BITS)
#include "forward/decode.h"
FA_PLAN(decode_i8, Decode<Plain<float>, StoredByte<FA_I8>>)
FA_PLAN(decode_e4m3, Decode<Plain<float>, StoredByte<FA_E4M3>>)
FA_PLAN(decode_e5m2, Decode<Plain<float>, StoredByte<FA_E5M2>>)
FA_PLAN(decode_i4, Decode<Plain<float>, StoredInt4>)
#if defined(__AVX2__)
FA_PLAN(decode_i8_as_integers, Decode<Plain<float>, StoredInt8>)
#endif
#if defined(__AVX512F__)
FA_PLAN(decode_e4m3_in_tables, Decode<Plain<float>, StoredE4m3>)
#endif
#endif
// What few rows share with the others: compiled with backward.
#define FA_SHARED_PHASES(declared)                                                       \
  namespace fa::FA_ISA {                                                                 \
  declared template void Backward<Plain<float>>::prepare(const Params&, int64_t, char*); \
  declared template void Backward<Plain<float>>::sinks(const Params&, int64_t, char*);   \
  declared template void MaskGradient<Plain<float>>::run(const Params&, int64_t, char*); \
  }
#if defined(FA_UNIT_BACKWARD)
#include "backward/backward.h"
#include "forward/weights.h"
FA_SHARED_PHASES()
FA_PLAN(backward_f32, Backward<Plain<float>>)
FA_PLAN(weights_f32, Weights<Plain<float>>)
#endif
#if defined(FA_UNIT_FEW_GRADIENTS)
#include "backward/paged_gradients.h"
#if !defined(FA_UNIT_BACKWARD)
FA_SHARED_PHASES(extern)
#endif
FA_PLAN(few_gradients_f32, FewGradients<Plain<float>>)
FA_PLAN(paged_gradients_f32, PagedGradients<Plain<float>>)
#endif
#if defined(FA_UNIT_TANGENTS)
#include "backward/backward_jvp.h"
FA_TANGENT_PLANS(f32, float)
#endif

#if defined(FA_UNIT_NORM_ROPE)
#include "rotation/norm_rope.h"
namespace fa::FA_ISA {
template <class X>
NormRopeTasks norm_rope_of(const FaNormRope& p) {
  using Rows = NormRope<X>;
  return {Rows::tasks(p), Rows::scratch(p), Rows::workspace(p), Rows::run, Rows::finish};
}
NormRopeTasks norm_rope(const FaNormRope& p) {
  switch (p.part[0].y.dtype) {
    case FA_F64:
      return norm_rope_of<double>(p);
    case FA_BF16:
      return norm_rope_of<StoredBf16>(p);
    case FA_F16:
      return norm_rope_of<StoredF16>(p);
    default:
      return norm_rope_of<float>(p);
  }
}
}  // namespace fa::FA_ISA
#endif

#if defined(FA_UNIT_FORWARD_F64)
#include "forward/decode.h"
#include "forward/forward.h"
FA_PLAN(forward_f64, Forward<Plain<double>>)
FA_PLAN(decode_f64, Decode<Plain<double>>)
#endif
#if defined(FA_UNIT_BACKWARD_F64)
#include "backward/paged_gradients.h"
#include "forward/weights.h"
FA_PLAN(backward_f64, Backward<Plain<double>>)
FA_PLAN(weights_f64, Weights<Plain<double>>)
FA_PLAN(few_gradients_f64, FewGradients<Plain<double>>)
FA_PLAN(paged_gradients_f64, PagedGradients<Plain<double>>)
#endif
#if defined(FA_UNIT_TANGENTS_F64)
#include "backward/backward_jvp.h"
FA_TANGENT_PLANS(f64, double)
#endif

#include "base/bf16_quads.h"
#if defined(FA_BF16_PRODUCTS) && defined(FA_UNIT_FORWARD_BF16)
#include "forward/decode.h"
#include "forward/forward.h"
FA_PLAN(forward_bf16, Forward<PairedBf16>)
FA_PLAN(decode_bf16, Decode<PairedBf16>)
#if defined(FA_BF16_QUADS)
FA_PLAN(forward_quads, Forward<QuadBf16>)
#endif
#endif
#if defined(FA_BF16_PRODUCTS) && defined(FA_UNIT_BACKWARD_BF16)
#include "backward/paged_gradients.h"
#include "forward/weights.h"
FA_PLAN(backward_bf16, Backward<PairedBf16>)
FA_PLAN(weights_bf16, Weights<PairedBf16>)
FA_PLAN(few_gradients_bf16, FewGradients<PairedBf16>)
FA_PLAN(paged_gradients_bf16, PagedGradients<PairedBf16>)
#if defined(FA_BF16_QUADS)
FA_PLAN(backward_quads, Backward<QuadBf16>)
FA_PLAN(weights_quads, Weights<QuadBf16>)
#endif
#endif

#if defined(FA_UNIT_TILES_FORWARD)
#include "amx/amx_forward.h"
FA_PLAN(forward_1, AmxForward<1>)
FA_PLAN(forward_2, AmxForward<2>)
FA_PLAN(forward_3, AmxForward<3>)
void fa::FA_ISA::over_keys_on_vectors(const Params& p, int64_t tiles,
                                      Forward<Plain<float>>::Buffers& buf) {
  Forward<Plain<float>>::over_keys(p, tiles, buf);
}
#endif
#if defined(FA_UNIT_TILES_DECODE)
#include "amx/amx_decode.h"
FA_PLAN(decode_1, AmxDecode<1>)
FA_PLAN(decode_2, AmxDecode<2>)
FA_PLAN(decode_3, AmxDecode<3>)
#endif
#if defined(FA_UNIT_TILES_BACKWARD)
#include "amx/amx_operand.h"
#include "backward/backward.h"
#include "forward/weights.h"
FA_PLAN(backward_1, Backward<Amx<1>>)
FA_PLAN(backward_2, Backward<Amx<2>>)
FA_PLAN(backward_3, Backward<Amx<3>>)
FA_PLAN(weights_1, Weights<Amx<1>>)
FA_PLAN(weights_2, Weights<Amx<2>>)
FA_PLAN(weights_3, Weights<Amx<3>>)
#endif

// --- the table, the indexer, functions of vectors, and peaks --------------------------
#if defined(FA_UNIT_TABLE)
#if defined(FA_AMX)
#include "amx/amx_operand.h"
#endif
#include "selection/lightning_index.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
IndexerTasks indexer(const FaIndexer& p) {
  using Index = LightningIndex<Mul>;
  return {Index::tasks(p), Index::scratch(p), Index::run};
}

#if defined(FA_ONLY_TILES)
template <int P>
double peak(double seconds, double (*now)()) {
  const amx::Tiles registers;
  constexpr int64_t batch = 1 << 12;
  uint16_t half[512];  // no zeros: the clock depends on the data
  for (int i = 0; i < 512; ++i) half[i] = uint16_t(0x3f80 ^ (i * 40503 & 0x807f));
  amx::load<4>(half, 64), amx::load<5>(half, 64), amx::load<6>(half, 64), amx::load<7>(half, 64);
  int64_t batches = 0;
  const double start = now();
  double end = start;
  for (; end - start < seconds; ++batches, end = now())
    for (int64_t i = 0; i < batch; ++i)
      amx::dot<0, 4, 6>(), amx::dot<1, 4, 7>(), amx::dot<2, 5, 6>(), amx::dot<3, 5, 7>();
  return 2.0 * 4 * 16 * 16 * 32 * batch * batches / (end - start) * 1e-9 / OfSums<P>::count;
}
#else
template <class Mul>
double peak(double seconds, double (*now)()) {
  using R = typename Mul::Real;
  using E = typename Mul::Element;
  constexpr int chains = register_rows(kRegisterVectors) * kRegisterVectors;
  constexpr int64_t batch = 1 << 14;
  Vec<R> acc[chains] = {};
  E x = E(0);
  const Vec<E> y = {};
  int64_t batches = 0;
  const double start = now();
  double end = start;
  while (end - start < seconds) {
    for (int64_t i = 0; i < batch; ++i)
#pragma GCC unroll 32
      for (int c = 0; c < chains; ++c) acc[c] = Mul::fma(acc[c], &x, y);
    __asm__ volatile("" : "+m"(x), "+m"(acc));  // the loop must happen
    ++batches;
    end = now();
  }
  return 2.0 * Mul::pair * kLanes<R> * chains * batch * batches / (end - start) * 1e-9;
}
template <class R>
void each_vector(int64_t which, const R* x, R* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes<R>) {
    const int64_t here = std::min<int64_t>(kLanes<R>, n - i);
    const Vec<R> at = load_some(x + i, here);
    const Vec<R> value = which == FA_EXP   ? Vec<R>(exp(at))
                         : which == FA_LOG ? Vec<R>(log(at))
                                           : Vec<R>(tanh<R>(at));
    std::memcpy(y + i, &value, here * sizeof(R));
  }
}
void vector_function(int64_t which, int64_t dtype, const void* x, void* y, int64_t n) {
  if (dtype == FA_F64)
    each_vector(which, static_cast<const double*>(x), static_cast<double*>(y), n);
  else
    each_vector(which, static_cast<const float*>(x), static_cast<float*>(y), n);
}

#endif

#define FA_DECLARE(name) Plan name(const Params& p)
#define FA_DECLARE_ALL(x)          \
  FA_DECLARE(forward_##x);         \
  FA_DECLARE(weights_##x);         \
  FA_DECLARE(backward_##x);        \
  FA_DECLARE(decode_##x);          \
  FA_DECLARE(few_gradients_##x);   \
  FA_DECLARE(paged_gradients_##x); \
  FA_DECLARE(jvp_##x);             \
  FA_DECLARE(forward_jvp_##x);     \
  FA_DECLARE(second_##x);          \
  FA_DECLARE(second_of_others_##x)
FA_DECLARE_ALL(f32);
FA_DECLARE_ALL(f64);
FA_DECLARE_ALL(bf16);
FA_DECLARE_ALL(quads);
FA_DECLARE_ALL(1);
FA_DECLARE_ALL(2);
FA_DECLARE_ALL(3);
NormRopeTasks norm_rope(const FaNormRope& p);
FA_DECLARE(decode_stored_f16);
FA_DECLARE(decode_stored_bf16);
FA_DECLARE(decode_i8);
FA_DECLARE(decode_e4m3);
FA_DECLARE(decode_e5m2);
FA_DECLARE(decode_i4);
FA_DECLARE(decode_i8_as_integers);
FA_DECLARE(decode_e4m3_in_tables);

#define FA_ARITHMETIC(x, ...)                                                           \
  Arithmetic {                                                                          \
    kLanes<__VA_ARGS__::Real>, forward_##x, weights_##x, backward_##x, decode_##x,      \
        few_gradients_##x, paged_gradients_##x, indexer<__VA_ARGS__>, peak<__VA_ARGS__> \
  }
#define FA_ARITHMETIC_OF_TILES(P)                                                              \
  Arithmetic {                                                                                 \
    16, forward_##P, weights_##P, backward_##P, decode_##P, nullptr, nullptr, indexer<Amx<P>>, \
        peak<P>                                                                                \
  }
#define FA_TANGENTS_OF(x) \
  Tangents { jvp_##x, forward_jvp_##x, second_##x, second_of_others_##x }

constexpr Kernels all_kernels() {
  Kernels all;
#if defined(FA_ONLY_TILES)
  all.tiles[0] = FA_ARITHMETIC_OF_TILES(1);
  all.tiles[1] = FA_ARITHMETIC_OF_TILES(2);
  all.tiles[2] = FA_ARITHMETIC_OF_TILES(3);
#else
#if defined(FA_BF16_PRODUCTS)
  all.bf16 = all.few_bf16 = FA_ARITHMETIC(bf16, PairedBf16);
#if defined(FA_BF16_QUADS)
  all.bf16.forward = forward_quads;
  all.bf16.weights = weights_quads;
  all.bf16.backward = backward_quads;
  all.bf16.indexer = indexer<QuadBf16>;
#endif
#endif
#if !defined(FA_ONLY_BF16)
  all.f32 = FA_ARITHMETIC(f32, Plain<float>);
  all.tangents_f32 = FA_TANGENTS_OF(f32);
#if !defined(FA_WITHOUT_F64)
  all.f64 = FA_ARITHMETIC(f64, Plain<double>);
  all.tangents_f64 = FA_TANGENTS_OF(f64);
#endif
  all.stored = {decode_stored_f16, decode_stored_bf16, decode_i8,
                decode_e4m3,       decode_e5m2,        decode_i4};
#if defined(__AVX2__)
  all.stored.i8_as_integers = decode_i8_as_integers;
#endif
#if defined(__AVX512F__)
  all.stored.e4m3_in_tables = decode_e4m3_in_tables;
#endif
  all.norm_rope = norm_rope;
  all.vector_function = vector_function;
#endif
#endif
  return all;
}
extern const Kernels kernels;
constexpr Kernels kernels = all_kernels();  // data alone: any machine may read it

}  // namespace FA_ISA
}  // namespace fa
#endif
