// FA_SHARED marks the scalar functions that the kernels for CPUs and for GPUs share.
#pragma once

#ifdef __CUDACC__
#define FA_SHARED __host__ __device__ inline
#else
// Always inlined: one copy, shared by objects compiled for different instruction sets, could be one
// that this machine cannot run.
#define FA_SHARED inline __attribute__((always_inline))
#endif
