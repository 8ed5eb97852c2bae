// The kernels for one instruction set: which plan runs a call, the indexer, and functions of vectors.
// CMake compiles this file and the plans of plans.h once for each set, with FA_ISA as its name. The
// caller must check first that the machine has the set.
#include "plans.h"
#include "selection/lightning_index.h"

namespace fa {
namespace FA_ISA {

template <class Mul>
IndexerTasks indexer_with(const FaIndexer& p) {
  using Index = LightningIndex<Mul>;
  return {Index::tasks(p), Index::scratch(p), Index::run};
}

#if defined(FA_AMX)
IndexerTasks indexer_tasks(const FaIndexer& p) { return indexer_with<Amx<1>>(p); }

template <int P>
Plan plan_with(const Params& p, int64_t pass) {
  switch (pass) {
    case FA_FORWARD:
      return AmxDecode<P>::suits(p) ? plan_of<AmxDecode<P>>(p) : plan_of<AmxForward<P>>(p);
    case FA_WEIGHTS:
      return plan_of<Weights<Amx<P>>>(p);
    default:
      return plan_of<Backward<Amx<P>>>(p);
  }
}

Plan make_plan(const Params& p, int64_t pass) {
  switch (p.q.dtype) {
    case FA_BF16:
      return plan_with<1>(p, pass);
    case FA_F16:
      return plan_with<2>(p, pass);
    default:
      return plan_with<3>(p, pass);
  }
}

// With fewer than four rows on the same keys, tiles are so empty that they gain nothing, measured.
// Splitting keys and values that are read once costs what vectors need for some ten or twenty rows,
// counted in instructions; not measured. So does converting eight and four bits.
bool decodes(const Params& p) {
  const bool in_place = p.k.dtype == FA_BF16;
  const int64_t least = in_place ? 4 : p.q.dtype == FA_F32 ? 32 : 16;
  return !p.row_invariant && p.M <= 16 && p.M * Decode<Plain<float>>::group(p) < least;
}
#else
IndexerTasks indexer_tasks(const FaIndexer& p) {
#if defined(FA_BF16_PRODUCTS)
  if (p.q.dtype == FA_BF16) return indexer_with<Bf16>(p);
#endif
  return indexer_with<Plain<float>>(p);
}

// Decoding reads keys and values as they are stored. Numbers of eight and four bits are multiplied
// in float32, except for float64 queries.
template <class Few>
Plan decode_plan(const Params& p) {
  using Single = Plain<float>;
  if constexpr (sizeof(typename Few::Real) == 4) switch (p.k.dtype) {
      case FA_BF16:
        if constexpr (Few::pair == 1) return plan_of<Decode<Single, StoredBf16>>(p);
        break;
      case FA_F16:
        return plan_of<Decode<Single, StoredF16>>(p);
      case FA_I8:
#if defined(__AVX2__)
        if (Int8Rows::suits(p)) return plan_of<Decode<Single, StoredInt8>>(p);
#endif
        return plan_of<Decode<Single, StoredByte<FA_I8>>>(p);
      case FA_E4M3:
#if defined(__AVX512F__)
        if (E4m3Table::suits(p)) return plan_of<Decode<Single, StoredE4m3>>(p);
#endif
        return plan_of<Decode<Single, StoredByte<FA_E4M3>>>(p);
      case FA_E5M2:
        return plan_of<Decode<Single, StoredByte<FA_E5M2>>>(p);
      case FA_I4:
        return plan_of<Decode<Single, StoredInt4>>(p);
    }
  return plan_of<Decode<Few>>(p);
}

// `Few` multiplies where lanes are columns: few_rows.h. Where that is another class than Mul, Few is
// also the Mul of calls of few rows: all passes of a call have the same roundings of scores.
template <class Mul, class Few = Mul>
Plan plan_with(const Params& p, int64_t pass) {
  using Real = typename Mul::Real;
  const bool other_scores = Mul::pair > 1 || FewRows<Few>::suit(p);  // than those of Plain
  switch (pass) {
    case FA_JVP:
      return plan_of<Jvp<Real>>(p, false);
    case FA_FORWARD_JVP:
      if (other_scores)
        return plan_with<Mul, Few>(p, FA_FORWARD).then(plan_with<Mul, Few>(p, FA_JVP));
      return plan_of<Jvp<Real>>(p, true);
    case FA_SECOND:
    case FA_SECOND | kOtherScores:
      return plan_of<Second<Real>>(p, other_scores || pass != FA_SECOND);
    case FA_FORWARD:
      return FewRows<Few>::suit(p) ? decode_plan<Few>(p) : plan_of<Forward<Mul>>(p);
    case FA_WEIGHTS:
      return plan_of<Weights<Mul>>(p);
    case FA_BACKWARD:
      if (p.page) return plan_of<PagedGradients<Few>>(p);
      return FewGradients<Few>::suit(p) ? plan_of<FewGradients<Few>>(p) : plan_of<Backward<Mul>>(p);
    default:
      return plan_of<Backward<Mul>>(p);
  }
}

Plan make_plan(const Params& p, int64_t pass) {
  if (p.q.dtype == FA_F64) return plan_with<Plain<double>>(p, pass);
#if defined(FA_BF16_PRODUCTS)
  if (p.q.dtype == FA_BF16 && FewRows<PairedBf16>::suit(p)) return plan_with<PairedBf16>(p, pass);
  if (p.q.dtype == FA_BF16) return plan_with<Bf16, PairedBf16>(p, pass);
#endif
  return plan_with<Plain<float>>(p, pass);
}

// True if the instruction set for decoding runs this call: few rows on many keys, with keys and
// values read in place. Its gradients and weights run there, too: one set computes a call's scores.
bool decodes(const Params& p) {
  return p.q.dtype == FA_F64 ? FewRows<Plain<double>>::suit(p) : FewRows<Plain<float>>::suit(p);
}
#endif

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

// GF/s of one core's multiply-adds on registers alone: the upper limit for kernels.
#if defined(FA_AMX)
double measure_peak(int64_t dtype, double seconds, double (*now)()) {
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
  const int products = dtype == FA_BF16  ? OfSums<1>::count
                       : dtype == FA_F16 ? OfSums<2>::count
                                         : OfSums<3>::count;
  return 2.0 * 4 * 16 * 16 * 32 * batch * batches / (end - start) * 1e-9 / products;
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
double measure_peak(int64_t dtype, double seconds, double (*now)()) {
  if (dtype == FA_F64) return peak<Plain<double>>(seconds, now);
#if defined(FA_BF16_PRODUCTS)
  if (dtype == FA_BF16) return peak<PairedBf16>(seconds, now);
#endif
  return peak<Plain<float>>(seconds, now);
}
#endif

}  // namespace FA_ISA
}  // namespace fa
