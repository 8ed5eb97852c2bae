// The exports of libfastattn_cuda.so (csrc/abi.h). They choose the kernels of a pass and launch
// them.
#include "../common/band.h"
#include "../common/extents.h"
#include "launch.h"
#include "sm80/kernels.h"
#include "splits.h"

namespace {

__global__ void smallest_kernel() {}

// Clamps M and N: no sequence of a packed batch has more than all together, or than its pages.
FaParams cut(FaParams p) {
  if (p.cu_q) p.M = fa::least(p.M, p.T);
  if (p.cu_k) p.N = fa::least(p.N, p.S);
  if (p.page) p.N = fa::least(p.N, p.blocks * p.page);
  return p;
}

bool decodes(const FaParams& p, int64_t multiprocessors) {
  return multiprocessors > 0 && !p.row_invariant && p.M <= fa::kDecodeRows &&
         p.Dv > 0;  // without values, only the LSE
}

}  // namespace

extern "C" {

const char* fa_cuda_abi_fields(void) { return FA_FIELDS; }
int64_t fa_cuda_max_head_dim(void) { return FA_CUDA_MAX_HEAD_DIM; }

int64_t fa_cuda_splits(const FaParams* call, int64_t multiprocessors) {
  const FaParams p = cut(*call);
  return decodes(p, multiprocessors) ? fa::sm80::decode_splits(p, multiprocessors) : 1;
}

int64_t fa_cuda_workspace(const FaParams* call, int64_t pass, int64_t multiprocessors) {
  const FaParams p = cut(*call);
  switch (pass) {
    case FA_FORWARD:
      return decodes(p, multiprocessors) ? fa::sm80::decode_workspace(p, multiprocessors)
                                         : fa::sm80::forward_workspace(p);
    case FA_WEIGHTS:
      return 0;
    case FA_BACKWARD:
      return fa::sm80::backward_workspace(p);
    default:
      return fa::sm80::weights_backward_workspace(p);
  }
}

int64_t fa_cuda_run(const FaCall* call, int64_t pass, int64_t device, int64_t multiprocessors,
                    void* stream) {
  if (const int64_t status = fa::bad_extent(*call, pass)) return status;
  if (const int failed = fa::use_device(device)) return failed;
  const FaParams p = cut(call->params);
  switch (pass) {
    case FA_FORWARD:
      return decodes(p, multiprocessors) ? fa::sm80::decode(p, multiprocessors, stream)
                                         : fa::sm80::forward(p, stream);
    case FA_BACKWARD:
      return fa::sm80::backward(p, stream);
    case FA_WEIGHTS:
      return fa::sm80::weights(p, stream);
    default:
      return fa::sm80::weights_backward(p, stream);
  }
}

int64_t fa_cuda_driver_error(void) { return fa::loadable(smallest_kernel); }
int64_t fa_cuda_version(int64_t of_driver) { return fa::version(of_driver); }
int64_t fa_cuda_translates(void) { return fa::translated(smallest_kernel); }
const char* fa_cuda_failed_kernel(void) { return fa::last_failure.kernel; }
const char* fa_cuda_error(int64_t code) { return fa::error_text(static_cast<int>(code)); }
}
