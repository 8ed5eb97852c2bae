// How a kernel is launched: by a function, so that the same line is C++ to nvcc and to g++, which
// compiles kernels for the tests with the cuda_runtime.h of tests/gpu_emulation. Every call returns
// the CUDA error code, 0 for none, and waits for no kernel.
#pragma once
#include <cuda_runtime.h>
#include <stddef.h>

#include "../abi.h"

namespace fa {

// The last error on this thread, and the kernel that it is about.
struct Failure {
  int code;
  const char* kernel;
};
inline thread_local Failure last_failure = {};

inline int checked(int code, const char* kernel) {
  if (code) last_failure = {code, kernel};
  return code;
}

inline const char* error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// 0 if the driver can load code of this library onto the current device, else CUDA's error. The
// driver may be too old for this library's CUDA runtime, or for its PTX.
template <class... P>
int loadable(void (*kernel)(P...)) {
  cudaFuncAttributes of_kernel;
  return cudaFuncGetAttributes(&of_kernel, kernel);
}

// True if the driver compiles the kernel's PTX for the current device. Code from nvcc is not of a
// newer architecture than its PTX.
template <class... P>
bool translated(void (*kernel)(P...)) {
  cudaFuncAttributes of_kernel;
  return !cudaFuncGetAttributes(&of_kernel, kernel) &&
         of_kernel.binaryVersion > of_kernel.ptxVersion;
}

inline int version(bool of_driver) {
  int number = 0;
  const cudaError_t failed =
      of_driver ? cudaDriverGetVersion(&number) : cudaRuntimeGetVersion(&number);
  return failed ? 0 : number;
}

inline int use_device(int64_t device) {
  int current;
  const int failed = cudaGetDevice(&current);
  if (!failed && current == device) return 0;  // keeps the caller's own context
  return checked(failed ? failed : cudaSetDevice(static_cast<int>(device)), "cudaSetDevice");
}

// `name` is for messages; shared_bytes may be up to the limit of a block; stream is a cudaStream_t.
template <class... P, class... A>
int launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
           void* stream, A... arguments) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking) {
    const cudaError_t refused = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (refused) return checked(refused, name);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return checked(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...), name);
}

// A row of blocks: 0 means no launch, and more than a grid has are refused, not wrapped around.
template <class... P, class... A>
int launch_blocks(const char* name, void (*kernel)(P...), int64_t blocks, int threads,
                  size_t shared_bytes, void* stream, A... arguments) {
  constexpr int kInvalidConfiguration = 9;  // cudaErrorInvalidConfiguration
  if (blocks == 0) return 0;
  if (blocks > INT32_MAX) return checked(kInvalidConfiguration, name);
  return launch(name, kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(static_cast<unsigned>(threads)), shared_bytes, stream, arguments...);
}

}  // namespace fa
