// Launches a forward pass on one kernel.
#pragma once
#include <type_traits>

#include "forward.cuh"
#include "instances.h"

#include "../launch.h"

namespace fa {
namespace sm90 {

// How many heads have their tasks taken together, if each has so many: as many as have 16 MB of keys
// and values, which leaves most of the L2 cache to the heads that blocks are done with late; and
// enough for about two tasks of each block, so that all have as much to do (schedule.cuh). Measured
// on an H200. Of a call with few tasks in all, all: a section of few heads would have odd ones.
inline int64_t heads_together(const FaParams& p, int64_t tasks, int64_t multiprocessors) {
  constexpr int64_t kSection = 16 << 20, kAll = 64 << 20;  // bytes
  const int64_t of_head = 2 * most(1, p.N) * (p.D + p.Dv), heads = p.B * p.H;
  if (tasks <= 8 * multiprocessors && of_head * p.B * p.Hk <= kAll) return heads;
  const int64_t of_section = most(1, kSection / of_head) * (p.H / p.Hk);
  return least(heads, most(of_section, ceil_div(19 * multiprocessors * heads, 10 * tasks)));
}

template <class F>
Schedule schedule_of(const FaParams& p, int64_t multiprocessors) {
  const int64_t blocks = ceil_div(p.M, F::kRows), heads = p.B * p.H;
  return {static_cast<int>(blocks * heads), static_cast<int>(blocks),
          static_cast<int>(heads_together(p, blocks * heads, multiprocessors)),
          static_cast<int>(heads), static_cast<int>(box_rows(p, F::kKeys))};
}

template <class Type, int kD, int kDv, bool general, bool masked>
int start_forward(const FaParams& p, int64_t multiprocessors, void* stream) {
  using F = std::conditional_t<general && !masked, UnmaskedForward<Type, kD, kDv>,
                               Forward<Type, kD, kDv, general>>;
  const int64_t tasks = ceil_div(p.M, F::kRows) * p.B * p.H;
  if (tasks > INT32_MAX) return checked(cudaErrorInvalidConfiguration, "forward_kernel");
  const Schedule schedule = schedule_of<F>(p, multiprocessors);
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

}  // namespace sm90
}  // namespace fa
