// Launches a backward pass of one head dim.
#pragma once
#include "backward.cuh"
#include "instances.h"

#include "../launch.h"

namespace fa {
namespace sm90 {

template <class B>
int start_gradients(const FaParams& p, float* workspace, void* stream) {
  TensorMap q, dout, k, v;
  int failed = encode(q, p.q, rows_of(p, p.D), B::kRows);
  if (!failed) failed = encode(dout, p.dout, rows_of(p, p.Dv), B::kRows);
  if (!failed) failed = encode(k, p.k, keys_of(p, p.D), B::kKeys);
  if (!failed) failed = encode(v, p.v, keys_of(p, p.Dv), B::kKeys);
  if (failed) return checked(failed, "cuTensorMapEncodeTiled");
  const KeySchedule schedule(p, B::kD, B::kBanded, B::kReversible);
  const int64_t blocks = (p.N + B::kKeys - 1) / B::kKeys * p.Hk * p.B;
  return launch_blocks("backward_kernel", backward_kernel<B>, blocks, B::kThreads, B::kSharedBytes,
                       stream, q, dout, k, v, p, schedule, workspace);
}

template <class Type, int kD, bool banded, bool general>
int start_backward(const FaParams& p, void* stream) {
  using B = Backward<Type, kD, banded, general>;
  auto* workspace = static_cast<float*>(p.workspace);
  using Form = typename B::Form;
  int failed = sm80::start_states<Form>(delta_kernel<Type, general, Form>, p, workspace, stream);
  if (!failed && p.dsinks.data)
    failed = sm80::start_sinks(sink_gradient_kernel<Form>, p, workspace, stream);
  if (!failed && (p.dq.data || p.dk.data || p.dv.data))
    failed = start_gradients<B>(p, workspace, stream);
  if (!failed && p.dq.data) failed = start_query_gradient<B>(p, workspace, stream);
  return failed;
}

// The instances of a head dim.
#define FA_BACKWARD_OF(TYPE, D, BANDED, GENERAL) \
  template int start_backward<TYPE, D, BANDED, GENERAL>(const FaParams&, void*);
#define FA_BACKWARD_FOR(D, BANDED, GENERAL)     \
  FA_BACKWARD_OF(ptx::BF16, D, BANDED, GENERAL) \
  FA_BACKWARD_OF(ptx::F16, D, BANDED, GENERAL)
#define FA_BACKWARD(D)             \
  FA_BACKWARD_FOR(D, false, false) \
  FA_BACKWARD_FOR(D, true, false)  \
  FA_BACKWARD_FOR(D, true, true)

}  // namespace sm90
}  // namespace fa
