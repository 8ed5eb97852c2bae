// A CUDA library that launches no kernels: the functions that csrc/abi.h declares, for
// `bench race launch` to time what precedes a launch, and for tests to see which arguments arrive.
#include <cstring>

#include "../../csrc/abi.h"

namespace {

struct Run {
  FaCall call;
  int64_t pass, device, multiprocessors, architecture;
  void* stream;
  int64_t runs;
} last;
int64_t code;  // of the next runs

}  // namespace

extern "C" {

FA_EXPORT const char* fa_cuda_abi_fields(void) { return FA_FIELDS; }
FA_EXPORT int64_t fa_cuda_max_head_dim(void) { return FA_CUDA_MAX_HEAD_DIM; }
FA_EXPORT int64_t fa_cuda_driver_error(void) { return 0; }
FA_EXPORT int64_t fa_cuda_version(int64_t) { return 13000; }
FA_EXPORT int64_t fa_cuda_translates(void) { return 0; }
FA_EXPORT const char* fa_cuda_kernels(const FaParams*, int64_t, int64_t) { return "sm_80"; }
FA_EXPORT const char* fa_cuda_error(int64_t) { return "an error of the stub"; }
FA_EXPORT const char* fa_cuda_failed_kernel(void) { return "stub_kernel"; }

// As much as the kernels want: a float for each row, or for each row and part of the keys.
FA_EXPORT int64_t fa_cuda_workspace(const FaParams* p, int64_t pass, int64_t multiprocessors,
                                    int64_t) {
  if (pass == FA_WEIGHTS || (pass == FA_FORWARD && p->M > 16)) return 0;
  const int64_t rows = p->B * p->H * p->M * 4;
  return pass == FA_FORWARD ? rows * (p->Dv + 2) * multiprocessors : rows;
}

FA_EXPORT int64_t fa_cuda_run(const FaCall* call, int64_t pass, int64_t device,
                              int64_t multiprocessors, int64_t architecture, void* stream) {
  last = {*call, pass, device, multiprocessors, architecture, stream, last.runs + 1};
  return code;
}

FA_EXPORT const void* stub_last(void) { return &last; }
FA_EXPORT void stub_fail(int64_t with) { code = with; }
}
