// The exports of libfastattn_cuda.so (csrc/abi.h). They choose the kernels of a pass and launch
// them.
#include <stdio.h>

#include "../common/band.h"
#include "../common/extents.h"
#include "launch.h"
#include "sm80/kernels.h"
#include "sm90/kernels.h"
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

// Which kernels of sm90/ run on: on 9.0 alone, as no other chip has their instructions.
constexpr int64_t kHopper = 90;

// Why the kernels of sm90/ do not run this pass on a chip that could; null if they do.
const char* sm90_declines(const FaParams& p, int64_t pass) {
  if (pass != FA_FORWARD && pass != FA_BACKWARD) return "the weights have no kernel of sm_90";
  // What they decline depends on addresses, and kernels of another class have other bits.
  if (p.row_invariant) return "row_invariant asks for one class of kernels at any address";
  return fa::sm90::declines(p, pass);
}

bool on_sm90(const FaParams& p, int64_t pass, int64_t architecture) {
  return architecture == kHopper && !sm90_declines(p, pass);
}

bool decodes(const FaParams& p, int64_t multiprocessors) {
  return multiprocessors > 0 && !p.row_invariant && p.M <= fa::kDecodeRows &&
         p.Dv > 0;  // without values, only the LSE
}

}  // namespace

extern "C" {

const char* fa_cuda_abi_fields(void) { return FA_FIELDS; }
int64_t fa_cuda_max_head_dim(void) { return FA_CUDA_MAX_HEAD_DIM; }

int64_t fa_cuda_splits(const FaParams* call, int64_t multiprocessors, int64_t architecture) {
  const FaParams p = cut(*call);
  if (on_sm90(p, FA_FORWARD, architecture)) return fa::sm90::forward_splits(p, multiprocessors);
  return decodes(p, multiprocessors) ? fa::sm80::decode_splits(p, multiprocessors) : 1;
}

const char* fa_cuda_kernels(const FaParams* call, int64_t pass, int64_t architecture) {
  if (architecture != kHopper) return "sm_80";
  const char* declined = sm90_declines(cut(*call), pass);
  if (!declined) return "sm_90";
  static thread_local char text[256];
  snprintf(text, sizeof text, "sm_80: %s", declined);
  return text;
}

int64_t fa_cuda_workspace(const FaParams* call, int64_t pass, int64_t multiprocessors,
                          int64_t architecture) {
  const FaParams p = cut(*call);
  if (on_sm90(p, pass, architecture))
    return pass == FA_FORWARD ? fa::sm90::forward_workspace(p, multiprocessors)
                              : fa::sm90::backward_workspace(p, multiprocessors);
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
                    int64_t architecture, void* stream) {
  if (const int64_t status = fa::bad_extent(*call, pass)) return status;
  if (const int failed = fa::use_device(device)) return failed;
  const FaParams p = cut(call->params);
  if (on_sm90(p, pass, architecture))
    return pass == FA_FORWARD ? fa::sm90::forward(p, multiprocessors, stream)
                              : fa::sm90::backward(p, multiprocessors, stream);
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
