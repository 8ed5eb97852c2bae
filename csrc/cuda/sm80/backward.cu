// Which backward kernels serve a call, and their launches.
#include "backward.cuh"

#include "../launch.h"
#include "instances.h"
#include "mask_gradient.cuh"
#include "row_sums.cuh"

namespace fa {
namespace sm80 {

template <class B>
int start_gradient(const FaParams& p, const float* deltas, void* stream) {
  const int64_t heads = B::kKeysStay ? p.Hk : p.H, length = B::kKeysStay ? p.N : p.M;
  const int64_t blocks = (length + B::kStaying - 1) / B::kStaying * heads * p.B;
  return launch_blocks(backward_kernel<B>, blocks, B::kThreads, B::kSharedBytes, stream, p, deltas);
}

template <class B>
int start_mask_gradient(const FaParams& p, const float* deltas, void* stream) {
  const int64_t blocks = extent(p, 0, p.B).parts * extent(p, 1, p.H).parts *
                         extent(p, 2, tiles_of_rows<B>(p)).parts *
                         extent(p, 3, tiles_of_keys<B>(p)).parts;
  return launch_blocks(mask_gradient_kernel<B>, blocks, B::kThreads, B::kSharedBytes, stream, p,
                       deltas);
}

// Gradients of keys and values come from one kernel where the registers of a lane hold both.
template <class Type, int D, int Dv, bool general>
int gradients(const FaParams& p, const float* deltas, void* stream) {
  int failed = start_gradient<Backward<Type, D, Dv, kOfQ, general>>(p, deltas, stream);
  if constexpr (D <= 128) {
    if (!failed)
      failed = start_gradient<Backward<Type, D, Dv, kOfKV, general>>(p, deltas, stream);
  } else {
    if (!failed) failed = start_gradient<Backward<Type, D, Dv, kOfK, general>>(p, deltas, stream);
    if (!failed) failed = start_gradient<Backward<Type, D, Dv, kOfV, general>>(p, deltas, stream);
  }
  if (general && !failed && p.dmask.data)
    failed = start_mask_gradient<Backward<Type, D, Dv, kOfMask, true>>(p, deltas, stream);
  return failed;
}

template <class Type, bool general>
int gradients(const FaParams& p, const float* deltas, void* stream) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    return gradients<Type, To::kD, To::kDv, general>(p, deltas, stream);
  });
}

template <class Type>
int backward_of(const FaParams& p, void* stream) {
  auto* deltas = static_cast<float*>(p.workspace);
  const int64_t rows = p.B * p.H * p.M, warps = kRowThreads / 32;
  int failed = launch_blocks(delta_kernel<Type>, (rows + warps - 1) / warps, kRowThreads, 0, stream,
                             p, deltas);
  if (!failed && p.dsinks.data)
    failed = launch_blocks(sink_gradient_kernel, p.H, kRowThreads, sizeof(float) * warps, stream, p,
                           deltas);
  if (failed) return failed;
  return is_general(p) ? gradients<Type, true>(p, deltas, stream)
                 : gradients<Type, false>(p, deltas, stream);
}

}  // namespace sm80
}  // namespace fa

// Of the workspace that fa_cuda_backward needs.
extern "C" int64_t fa_cuda_backward_workspace(const FaParams* p) {
  return p->B * p->H * p->M * static_cast<int64_t>(sizeof(float));
}

extern "C" int fa_cuda_backward(const FaParams* p, void* stream) {
  return p->q.dtype == FA_BF16 ? fa::sm80::backward_of<fa::ptx::BF16>(*p, stream)
                               : fa::sm80::backward_of<fa::ptx::F16>(*p, stream);
}
