// What decides in both classes which kernel a call gets.
#pragma once
#include "../abi.h"
#include "ptx.cuh"

namespace fa {

// True if something other than a positive scale and a band changes the scores or the weights. Plain
// kernels take the maximum of products, which only a positive scale preserves.
inline bool is_general(const FaParams& p) {
  return p.mask.data || p.slopes.data || p.softcap > 0 || p.dropout_p > 0 ||
         !(static_cast<float>(p.scale) > 0);
}

// Calls `use` with the format of this call's elements.
template <class Use>
int with_type(const FaParams& p, Use use) {
  return p.q.dtype == FA_BF16 ? use(ptx::BF16()) : use(ptx::F16());
}

// The head dims with kernels: all, except in tests that omit some to save minutes.
#ifndef FA_CUDA_HAS_DIM
#define FA_CUDA_HAS_DIM(d) true
#endif

}  // namespace fa
