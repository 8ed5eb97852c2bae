// Launches a forward pass of one instance.
#pragma once
#include <type_traits>

#include "forward.cuh"
#include "instances.h"

#include "../launch.h"

namespace fa {
namespace sm90 {

// How many heads have their tasks taken together.
inline int64_t heads_together(const FaParams& p) {
  constexpr int64_t kCache = 32 << 20;  // bytes of keys and values, of 50 MB of L2
  const int64_t of_head = 2 * most(1, p.N) * (p.D + p.Dv);
  return most(1, kCache / of_head) * (p.H / p.Hk);
}

template <class Type, int kD, int kDv, bool general, bool masked>
int start_forward(const FaParams& p, int64_t multiprocessors, void* stream) {
  using F = std::conditional_t<general && !masked, UnmaskedForward<Type, kD, kDv>,
                               Forward<Type, kD, kDv, general>>;
  const int64_t blocks = ceil_div(p.M, F::kRows), heads = p.B * p.H, tasks = blocks * heads;
  if (tasks > INT32_MAX) return checked(cudaErrorInvalidConfiguration, "forward_kernel");
  Schedule schedule = {static_cast<int>(tasks), static_cast<int>(blocks),
                       static_cast<int>(least(heads, heads_together(p))), static_cast<int>(heads),
                       static_cast<int>(box_rows(p, F::kKeys))};
  TensorMap q, k, v, out;
  int failed = encode(q, p.q, rows_of(p, p.D), kGroupRows);
  if (!failed) failed = encode(k, p.k, keys_of(p, p.D), schedule.key_box);
  if (!failed) failed = encode(v, p.v, keys_of(p, p.Dv), schedule.key_box);
  if (!failed) failed = encode(out, p.out, rows_of(p, p.Dv), 16);
  if (failed) return checked(failed, "cuTensorMapEncodeTiled");
  const int64_t grid = multiprocessors > 0 ? least(tasks, multiprocessors) : tasks;
  return launch_blocks("forward_kernel", forward_kernel<F>, grid, F::kThreads, F::kSharedBytes,
                       stream, q, k, v, out, p, schedule);
}

// The instances of two head dims: FA_FORWARD(64, 64).
#define FA_FORWARD_OF(D, DV, GENERAL, MASKED)                                                     \
  template int start_forward<ptx::BF16, D, DV, GENERAL, MASKED>(const FaParams&, int64_t, void*); \
  template int start_forward<ptx::F16, D, DV, GENERAL, MASKED>(const FaParams&, int64_t, void*);
#define FA_PLAIN_FORWARD(D, DV) FA_FORWARD_OF(D, DV, false, false)
#define FA_UNMASKED_FORWARD(D, DV) FA_FORWARD_OF(D, DV, true, false)
#define FA_FORWARD(D, DV) \
  FA_PLAIN_FORWARD(D, DV) \
  FA_FORWARD_OF(D, DV, true, true)

}  // namespace sm90
}  // namespace fa
