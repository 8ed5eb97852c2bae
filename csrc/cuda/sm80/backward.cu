// Launches a backward pass: chooses its kernels, and their order.
#include "backward.cuh"

#include "bwd_preprocess.cuh"
#include "instances.h"
#include "kernels.h"
#include "mask_gradient.cuh"

namespace fa {
namespace sm80 {

// Up to this width a lane's registers hold the gradients of its keys and values, and the tiles of a
// block leave room for ds in shared memory: one kernel computes all gradients that are wanted.
constexpr int64_t kWidestAtOnce = 128;

bool adds_in_turn(const FaParams& p) { return p.dq.data && most(p.D, p.Dv) <= kWidestAtOnce; }

// The bytes at the start of a workspace: the tiles of a mask, for one kernel after another.
int64_t mask_bytes(const FaParams& p) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    const auto of = [&](auto what) {
      return ShownTiles<MaskedBackward<ptx::BF16, To::kD, To::kDv, what()>>::bytes(p);
    };
    using std::integral_constant;
    if constexpr (To::kD <= kWidestAtOnce)
      return of(integral_constant<Gradient, kOfAll>());
    else
      return most(
          of(integral_constant<Gradient, kOfQ>()),
          most(of(integral_constant<Gradient, kOfK>()), of(integral_constant<Gradient, kOfV>())));
  });
}

template <class Type, int D, int Dv, Gradient what, bool general, bool tiled>
using BackwardOf = std::conditional_t<tiled, MaskedBackward<Type, D, Dv, what>,
                                      Backward<Type, D, Dv, what, general>>;

template <class Type, int D, int Dv, bool general, bool tiled>
int gradients(const FaParams& p, float* workspace, void* stream) {
  int failed = 0;
  if constexpr (D <= kWidestAtOnce) {
    using All = BackwardOf<Type, D, Dv, kOfAll, general, tiled>;
    if (p.dq.data || p.dk.data || p.dv.data) failed = start_gradient<All>(p, workspace, stream);
    if (!failed && p.dq.data) failed = start_query_gradient<All>(p, workspace, stream);
  } else {
    if (p.dq.data)
      failed = start_gradient<BackwardOf<Type, D, Dv, kOfQ, general, tiled>>(p, workspace, stream);
    if (!failed && p.dk.data)
      failed = start_gradient<BackwardOf<Type, D, Dv, kOfK, general, tiled>>(p, workspace, stream);
    if (!failed && p.dv.data)
      failed = start_gradient<BackwardOf<Type, D, Dv, kOfV, general, tiled>>(p, workspace, stream);
  }
  if (general && !failed && p.dmask.data)
    failed = start_mask_gradient<Backward<Type, D, Dv, kOfMask, true>>(p, workspace, stream);
  return failed;
}

template <class Type, bool general>
int gradients(const FaParams& p, float* workspace, void* stream) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    if constexpr (general)
      if (MaskTiling::suits(p))
        return gradients<Type, To::kD, To::kDv, true, true>(p, workspace, stream);
    return gradients<Type, To::kD, To::kDv, general, false>(p, workspace, stream);
  });
}

template <class Type, bool general>
int backward_of(const FaParams& p, void* stream) {
  auto* workspace = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + mask_bytes(p));
  int failed = start_delta<Type, general>(p, workspace, stream);
  if (!failed && p.dsinks.data) failed = start_sink_gradient(p, workspace, stream);
  return failed ? failed : gradients<Type, general>(p, workspace, stream);
}

template <class Type>
int backward_of(const FaParams& p, void* stream) {
  return is_general(p) ? backward_of<Type, true>(p, stream) : backward_of<Type, false>(p, stream);
}

int64_t backward_workspace(const FaParams& p) {
  const int64_t columns = with_dims(p, [](auto dims) { return int64_t{decltype(dims)::kD}; });
  const int64_t sums = adds_in_turn(p) ? p.H * rows_of_head(p) * columns : 0;
  return mask_bytes(p) + (state_words(p) + sums) * static_cast<int64_t>(sizeof(float));
}

int backward(const FaParams& p, void* stream) {
  return with_type(p, [&](auto type) { return backward_of<decltype(type)>(p, stream); });
}

}  // namespace sm80
}  // namespace fa
