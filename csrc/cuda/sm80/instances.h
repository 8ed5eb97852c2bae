// Which kernels a pass uses: general or plain, and for which head dims.
#pragma once
#include "../kernel_choice.h"

namespace fa {
namespace sm80 {

// The head dims that kernels exist for. Others are padded to them.
template <int d, int dv>
struct Dims {
  static constexpr int kD = d, kDv = dv;
};

template <int d, int dv, class Use>
int64_t instance(Use use) {
  if constexpr (FA_CUDA_HAS_DIM(d)) {
    return use(Dims<d, dv>());
  } else {
    return cudaErrorInvalidValue;
  }
}

// Calls `use` with the smallest Dims that hold this call's.
template <class Use>
int64_t with_dims(const FaParams& p, Use use) {
  const int64_t d = most(p.D, p.Dv);
  if (d <= 32) return instance<32, 32>(use);
  if (d <= 64) return instance<64, 64>(use);
  if (d <= 96) return instance<96, 96>(use);
  if (d <= 128) return instance<128, 128>(use);
  if (d <= 192 && p.Dv <= 128) return instance<192, 128>(use);
  if (d <= 192) return instance<192, 192>(use);
  return instance<FA_CUDA_MAX_HEAD_DIM, FA_CUDA_MAX_HEAD_DIM>(use);
}

}  // namespace sm80
}  // namespace fa
