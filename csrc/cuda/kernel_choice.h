// What decides in both classes which kernel a call gets.
#pragma once
#include "../abi.h"
#include "mask.cuh"

namespace fa {

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
