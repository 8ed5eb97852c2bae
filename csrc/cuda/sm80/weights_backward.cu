// Launches the backward pass of attention weights: the kernels of backward.cuh, given dp. All are
// general ones.
#include "backward.cuh"
#include "bwd_preprocess.cuh"
#include "instances.h"
#include "kernels.h"
#include "mask_gradient.cuh"

namespace fa {
namespace sm80 {

template <class Type, int D>
int gradients_of_weights(const FaParams& p, float* workspace, void* stream) {
  int failed = start_delta<Type, true>(p, workspace, stream);
  if (!failed && !p.constant_lse)
    failed = start_gradient<Backward<Type, D, 0, kDelta, true>>(p, workspace, stream);
  if (!failed && p.dsinks.data) failed = start_sink_gradient(p, workspace, stream);
  if (!failed && p.dq.data)
    failed = start_gradient<Backward<Type, D, 0, kOfQ, true>>(p, workspace, stream);
  if (!failed && p.dk.data)
    failed = start_gradient<Backward<Type, D, 0, kOfK, true>>(p, workspace, stream);
  if (!failed && p.dmask.data)
    failed = start_mask_gradient<Backward<Type, D, 0, kOfMask, true>>(p, workspace, stream);
  return failed;
}

template <class Type>
int weights_backward_of(const FaParams& p, void* stream) {
  return with_dims(p, [&](auto dims) {  // v is absent: Dv is 0
    auto* workspace = static_cast<float*>(p.workspace);
    return gradients_of_weights<Type, decltype(dims)::kD>(p, workspace, stream);
  });
}

int64_t weights_backward_workspace(const FaParams& p) {
  return state_words(p) * static_cast<int64_t>(sizeof(float));
}

int weights_backward(const FaParams& p, void* stream) {
  return with_type(p, [&](auto type) { return weights_backward_of<decltype(type)>(p, stream); });
}

}  // namespace sm80
}  // namespace fa
