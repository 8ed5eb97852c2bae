// Which of its kernels a pass takes: general or plain, and for which head dims.
#pragma once
#include "../../abi.h"
#include "../ptx.cuh"

namespace fa {
namespace sm80 {

// Does something other than a positive scale and a band change the scores or the weights? Plain
// kernels take the maximum of products, which another scale does not keep.
inline bool is_general(const FaParams& p) {
  return p.mask.data || p.slopes.data || p.softcap > 0 || p.dropout_p > 0 ||
         !(static_cast<float>(p.scale) > 0);
}

// What use makes of the format of this call's elements.
template <class Use>
int with_type(const FaParams& p, Use use) {
  return p.q.dtype == FA_BF16 ? use(ptx::BF16()) : use(ptx::F16());
}

// The head dims that kernels exist for. Others are padded to them.
template <int d, int dv>
struct Dims {
  static constexpr int kD = d, kDv = dv;
};

// What use makes of the smallest that hold this call's.
template <class Use>
auto with_dims(const FaParams& p, Use use) {
  const int64_t d = most(p.D, p.Dv);
  if (d <= 32) return use(Dims<32, 32>());
  if (d <= 64) return use(Dims<64, 64>());
  if (d <= 96) return use(Dims<96, 96>());
  if (d <= 128) return use(Dims<128, 128>());
  if (d <= 192 && p.Dv <= 128) return use(Dims<192, 128>());
  if (d <= 192) return use(Dims<192, 192>());
  return use(Dims<FA_CUDA_MAX_HEAD_DIM, FA_CUDA_MAX_HEAD_DIM>());
}

}  // namespace sm80
}  // namespace fa
