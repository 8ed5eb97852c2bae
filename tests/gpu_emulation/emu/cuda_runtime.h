// The part of CUDA's runtime that csrc/cuda/launch.h calls, over the emulator: the tests use the
// launch path of a GPU, compiled against this header instead of CUDA's. runtime.cpp implements it:
// devices with separate memory, streams, graphs, and refusals by CUDA's rules.
#pragma once
#include <vector>

#include "emu.h"

// The CUDA error codes that these calls return.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotSupported = 801,
};
const char* cudaGetErrorString(cudaError_t error);

cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);

// The driver's functions, which the runtime finds by name and version: encode.cpp has one.
// As the real one it succeeds, with a null pointer, if there is no such function.
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};
enum cudaGetDriverEntryPointFlags {
  cudaEnableDefault = 0,
  cudaEnableLegacyStream = 1,
  cudaEnablePerThreadDefaultStream = 2,
};
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** funcPtr, unsigned cudaVersion, unsigned long long flags,
    cudaDriverEntryPointQueryResult* driverStatus = nullptr);

using cudaStream_t = struct CUstream_st*;  // null is each device's default stream

struct cudaFuncAttributes {  // other fields are not read
  int ptxVersion, binaryVersion;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace emu {

cudaError_t attributes_of(cudaFuncAttributes* found, const void* kernel);
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

// A kernel with the values of its parameters, to be run now or later: as often as a graph replays,
// and then released. (No std::shared_ptr: its atomics would be checked as a kernel's.)
struct Work {
  const void* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  std::vector<Argument> arguments;  // into `values`
  void* values;
  void (*run)(const Work&);
  void (*release)(void* values);
};
cudaError_t launch_on(cudaStream_t stream, const Work& work);

}  // namespace emu

template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, void (*kernel)(P...)) {
  return emu::attributes_of(found, reinterpret_cast<const void*>(kernel));
}
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  return emu::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), P... values) {
  using Values = std::tuple<P...>;
  using Kernel = void (*)(P...);
  auto* copies = new Values(values...);  // by value, as a kernel's parameters are
  emu::Work work{reinterpret_cast<const void*>(kernel),
                 config->gridDim,
                 config->blockDim,
                 config->dynamicSmemBytes,
                 {},
                 copies,
                 [](const emu::Work& me) {
                   const auto kernel = reinterpret_cast<Kernel>(const_cast<void*>(me.kernel));
                   std::apply([&](const P&... x) {
                     emu::launch(kernel, me.grid, me.block, me.shared_bytes, x...);
                   }, *static_cast<Values*>(me.values));
                 },
                 [](void* values) { delete static_cast<Values*>(values); }};
  std::apply([&](const P&... x) { (work.arguments.push_back({&x, sizeof x}), ...); }, *copies);
  return emu::launch_on(config->stream, work);
}
