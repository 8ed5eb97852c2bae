// Launches a backward pass: chooses its kernels, or says why there are none.
#include "backward.cuh"

#include "../launch.h"
#include "../mask_tiling.h"
#include "instances.h"
#include "kernels.h"

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

// `banded` if a band hides keys.
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

// Calls `use` with the head dim, whether a band hides keys, and whether the call is general.
// General kernels are compiled with a band only.
template <class Use>
int64_t with_backward(const FaParams& p, Use use) {
  using std::integral_constant;
  constexpr int64_t kFar = 1 << 30;  // no sequence reaches it: see Visible
  const bool banded = p.left < kFar || p.right < kFar;
  const auto of = [&](auto d) {
    if (is_general(p)) return use(d, std::true_type(), std::true_type());
    return banded ? use(d, std::true_type(), std::false_type())
                  : use(d, std::false_type(), std::false_type());
  };
  if (most(p.D, p.Dv) <= 64) return of(integral_constant<int, 64>());
  return of(integral_constant<int, 128>());
}

const char* declines_backward(const FaParams& p) {
  constexpr double kSmallest = 1e-30;
  const Sizes q = rows_of(p, p.D), k = keys_of(p, p.D), v = keys_of(p, p.Dv);
  if (p.D % 8 || p.Dv % 8 || !p.Dv) return "its head dims are not multiples of 8";
  if (most(p.D, p.Dv) > kWidestBackward) return "its head dim is over 128";
  if (p.dmask.data) return "it computes the gradient of a mask";
  if (MaskTiling::suits(p)) return "other kernels skip tiles of its mask";
  if (!is_general(p) && p.scale < kSmallest) return "its scale is below 1e-30";
  if (is_empty(q) || is_empty(k)) return "it has no queries or no keys";
  if (!has_tensor_map(p.q, q) || !has_tensor_map(p.k, k) || !has_tensor_map(p.v, v) ||
      !has_tensor_map(p.dout, rows_of(p, p.Dv)))
    return "rows of its tensors are in one place, or not at multiples of 16 bytes";
  return nullptr;
}

int64_t backward_workspace(const FaParams& p, int64_t) {
  return with_backward(p, [&](auto d, auto banded, auto general) {
    constexpr int kD = decltype(d)::value;
    constexpr int64_t kRows = backward_rows(kD, banded(), general());
    const int64_t sums = p.H * sm80::rows_of_head(p, kRows) * kD;
    return (sm80::state_words(p, kRows) + sums) * static_cast<int64_t>(sizeof(float));
  });
}

int backward(const FaParams& p, int64_t, void* stream) {
  return static_cast<int>(with_backward(p, [&](auto d, auto banded, auto general) -> int64_t {
    constexpr int kD = decltype(d)::value;
    if constexpr (FA_CUDA_HAS_DIM(kD))
      return with_type(p, [&](auto type) {
        return start_backward<decltype(type), kD, banded(), general()>(p, stream);
      });
    else
      return static_cast<int64_t>(cudaErrorInvalidValue);
  }));
}

}  // namespace sm90
}  // namespace fa
