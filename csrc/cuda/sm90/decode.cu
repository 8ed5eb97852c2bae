// Launches a forward pass of few rows: chooses its kernel.
#include "decode.cuh"

#include "../launch.h"
#include "../sm80/kernels.h"
#include "instances.h"

namespace fa {
namespace sm90 {

template <class Type, int kD, int kDv>
int start_decode(const FaParams& p, int64_t splits, void* stream) {
  using F = Decode<Type, kD, kDv>;
  const DecodeRows rows(p);
  const Shares shares = {static_cast<int>(splits), static_cast<int>(rows.tiles),
                         static_cast<int>(rows.heads), static_cast<int>(box_rows(p, F::kKeys))};
  TensorMap q, k, v;
  int failed = encode(q, p.q, rows_of(p, p.D), p.M, rows.heads);
  if (!failed) failed = encode(k, p.k, keys_of(p, p.D), shares.key_box);
  if (!failed) failed = encode(v, p.v, keys_of(p, p.Dv), shares.key_box);
  if (failed) return checked(failed, "cuTensorMapEncodeTiled");
  failed = launch_blocks("decode_kernel", decode_kernel<F>, rows.blocks(p) * splits, F::kThreads,
                         F::kSharedBytes, stream, q, k, v, p, shares);
  return failed || splits == 1 ? failed : sm80::combine(p, splits, stream);
}

template <class Type>
int decode_of(const FaParams& p, int64_t splits, void* stream) {
  return with_dims(p, [&](auto dims) {
    using To = decltype(dims);
    if constexpr (FA_CUDA_HAS_DIM(To::kD))
      return start_decode<Type, To::kD, To::kDv>(p, splits, stream);
    else
      return static_cast<int>(cudaErrorInvalidValue);
  });
}

int decode(const FaParams& p, int64_t splits, void* stream) {
  return with_type(p, [&](auto type) { return decode_of<decltype(type)>(p, splits, stream); });
}

}  // namespace sm90
}  // namespace fa
