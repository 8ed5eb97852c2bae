// Launches a forward pass: chooses its kernel.
#include "forward.cuh"

#include "../launch.h"
#include "instances.h"
#include "kernels.h"

namespace fa {
namespace sm80 {

template <class F>
int start_forward(const FaParams& p, void* stream) {
  const int64_t blocks = (p.M + F::kRows - 1) / F::kRows * p.H * p.B;
  const auto start = [&](bool again) {
    return launch_blocks("forward_kernel", forward_kernel<F>, blocks, F::kThreads, F::kSharedBytes,
                         stream, p, again);
  };
  if (!F::kTiled) return start(false);
  int failed = start_mask_tiles(p, F::kTiling, stream);
  if (!failed) failed = start(false);
  return failed || !MaskTiling::may_hold_least(p) ? failed : start(true);
}

template <class Type, bool general>
int forward_of(const FaParams& p, void* stream) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    if constexpr (general)
      if (MaskTiling::suits(p))
        return start_forward<MaskedForward<Type, To::kD, To::kDv>>(p, stream);
    return p.page ? start_forward<PagedForward<Type, To::kD, To::kDv, general>>(p, stream)
                  : start_forward<Forward<Type, To::kD, To::kDv, general>>(p, stream);
  });
}

template <class Type>
int forward_of(const FaParams& p, void* stream) {
  return is_general(p) ? forward_of<Type, true>(p, stream) : forward_of<Type, false>(p, stream);
}

int64_t forward_workspace(const FaParams& p) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    return MaskedForward<ptx::BF16, To::kD, To::kDv>::kTiling.bytes(p);
  });
}

int forward(const FaParams& p, void* stream) {
  return with_type(p, [&](auto type) { return forward_of<decltype(type)>(p, stream); });
}

}  // namespace sm80
}  // namespace fa
