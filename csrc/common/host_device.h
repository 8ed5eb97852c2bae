// FA_SHARED marks the scalar functions that the kernels for CPUs and for GPUs share.
#pragma once

#ifdef __CUDACC__
#define FA_SHARED __host__ __device__ inline
#else
// Always inlined: a linker keeps one copy of a function, and that could be one that was compiled
// for an instruction set that this machine does not have.
#define FA_SHARED inline __attribute__((always_inline))
#endif
