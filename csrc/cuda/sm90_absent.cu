// In place of the kernels of sm90/, in a library that has none of them: every call is declined, and
// so no pass is called.
#include <cuda_runtime.h>

#include "sm90/kernels.h"

// Why there are none: CMake writes it.
#if __has_include("why_no_sm90.h")
#include "why_no_sm90.h"
#else
#define FA_WHY_NO_SM90 "no kernel of this class is built"
#endif

namespace fa {
namespace sm90 {

const char* declines(const FaParams&, int64_t) { return FA_WHY_NO_SM90; }

int forward(const FaParams&, int64_t, void*) { return cudaErrorInvalidValue; }
int64_t forward_workspace(const FaParams&, int64_t) { return 0; }
int64_t forward_splits(const FaParams&, int64_t) { return 1; }

int backward(const FaParams&, int64_t, void*) { return cudaErrorInvalidValue; }
int64_t backward_workspace(const FaParams&, int64_t) { return 0; }

}  // namespace sm90
}  // namespace fa

extern "C" int64_t fa_cuda_probe_sm90(const FaProbe*, void*) { return cudaErrorNotSupported; }
