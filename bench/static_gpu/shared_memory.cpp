// The most shared memory that a block of each CUDA kernel asks for: lines of bytes and the type
// that the kernel is an instance of, mangled. Small kernels are listed by name. For bench/static_gpu/ptxas.py;
// any C++ compiler builds it, with the tests' emulator in the place of CUDA's headers.
#include <cstdio>
#include <type_traits>
#include <typeinfo>

#include "cuda/sm80/decode.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/mask_gradient.cuh"
#include "cuda/sm80/bwd_preprocess.cuh"
#include "cuda/sm80/weights.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/forward.cuh"

// 0 for kernels that ask for none.
template <class Kernel, class = void>
constexpr int kShared = 0;
template <class Kernel>
constexpr int kShared<Kernel, std::void_t<decltype(Kernel::kSharedBytes)>> = Kernel::kSharedBytes;

template <class Kernel>
void tell(int bytes = kShared<Kernel>) {
  std::printf("%d %s\n", bytes, typeid(Kernel).name());
}

// -- the kernels of sm90/ -------------------------------------------------------------------------

// ptxas.py writes a line for each that nvcc compiled: tell<fa::sm90::Forward<...>>();
void of_sm90() {
  using Wide = fa::sm90::Backward<fa::ptx::BF16, 128, false, false>;  // as start_query_gradient
  std::printf("%zu fa::sm90::query_gradient_kernel\n",
              sizeof(float) * Wide::kRows * (Wide::kD + 4));
#include "instances.inc"
}

// -- the kernels of sm80/ -------------------------------------------------------------------------

using namespace fa::sm80;

template <class Type, int D, int Dv, bool general>
void attention() {
  tell<Forward<Type, D, Dv, general>>();
  tell<PagedForward<Type, D, Dv, general>>();
  if (general) tell<MaskedForward<Type, D, Dv>>();
  tell<Decode<Type, D, Dv, 1, general>>();
  tell<Decode<Type, D, Dv, 4, general>>();
  tell<Backward<Type, D, Dv, kOfQ, general>>();
  tell<Backward<Type, D, Dv, kOfAll, general>>();
  tell<Backward<Type, D, Dv, kOfK, general>>();
  tell<Backward<Type, D, Dv, kOfV, general>>();
  tell<Backward<Type, D, Dv, kOfMask, general>>();
  if (!general) return;
  tell<MaskedBackward<Type, D, Dv, kOfQ>>();
  tell<MaskedBackward<Type, D, Dv, kOfAll>>();
  tell<MaskedBackward<Type, D, Dv, kOfK>>();
  tell<MaskedBackward<Type, D, Dv, kOfV>>();
}

template <class Type, int D>
void weights() {
  constexpr int kStages = 2;  // where the mean is wanted, else one
  tell<Weights<Type, D, false>>(kStages * Weights<Type, D, false>::kStageBytes);
  tell<Weights<Type, D, true>>(kStages * Weights<Type, D, true>::kStageBytes);
  tell<Backward<Type, D, 0, kDelta, true>>();
  tell<Backward<Type, D, 0, kOfQ, true>>();
  tell<Backward<Type, D, 0, kOfK, true>>();
  tell<Backward<Type, D, 0, kOfMask, true>>();
}

template <class Type, int D, int Dv = D>
void of_dims() {
  attention<Type, D, Dv, false>();
  attention<Type, D, Dv, true>();
  weights<Type, D>();
}

template <class Type>
void of_type() {
  of_dims<Type, 32>();
  of_dims<Type, 64>();
  of_dims<Type, 96>();
  of_dims<Type, 128>();
  of_dims<Type, 192, 128>();
  of_dims<Type, 192>();
  of_dims<Type, 256>();
}

int main() {
  constexpr int kWidest = 256;
  std::printf("0 delta_kernel\n");
  std::printf("%zu mask_tiles_kernel\n", sizeof(uint32_t) * fa::kMaskWarps);
  std::printf("0 query_gradient_kernel\n");
  std::printf("0 shown_tiles_kernel\n");
  std::printf("%zu sink_gradient_kernel\n", sizeof(float) * kRowThreads / 32);
  std::printf("%zu combine_kernel\n", sizeof(float) * kCombineWarps * kWidest);
  of_type<fa::ptx::BF16>();
  of_type<fa::ptx::F16>();
  of_sm90();
}
