// In place of the kernels: functions that return a number of their own, so that a test sees which
// of them library.cu calls. Those of sm_90 decline with the reason that
// `classes_decline` sets, unless it is empty.
#include <cuda_runtime.h>

#include <string>

#include "cuda/sm80/kernels.h"
#include "cuda/sm90/kernels.h"

namespace {
std::string reasons[4];  // of sm_90's kernels to decline a pass, or nothing
FaParams seen;           // by `declines`
}  // namespace

namespace fa {
namespace sm80 {
int forward(const FaParams&, void*) { return 8000; }
int64_t forward_workspace(const FaParams&) { return 8001; }
int decode(const FaParams&, int64_t multiprocessors, void*) { return 8010 + multiprocessors; }
int64_t decode_splits(const FaParams&, int64_t) { return 7; }
int64_t decode_workspace(const FaParams&, int64_t) { return 8011; }
int combine(const FaParams&, int64_t, void*) { return 8012; }
int backward(const FaParams&, void*) { return 8020; }
int64_t backward_workspace(const FaParams&) { return 8021; }
int weights(const FaParams&, void*) { return 8030; }
int weights_backward(const FaParams&, void*) { return 8040; }
int64_t weights_backward_workspace(const FaParams&) { return 8041; }
}  // namespace sm80

namespace sm90 {
const char* declines(const FaParams& p, int64_t pass) {
  seen = p;
  return reasons[pass].empty() ? nullptr : reasons[pass].c_str();
}
int forward(const FaParams&, int64_t multiprocessors, void*) { return 9000 + multiprocessors; }
int64_t forward_workspace(const FaParams&, int64_t) { return 9001; }
int64_t forward_splits(const FaParams&, int64_t) { return 9; }
int backward(const FaParams&, int64_t multiprocessors, void*) { return 9020 + multiprocessors; }
int64_t backward_workspace(const FaParams&, int64_t) { return 9021; }
}  // namespace sm90
}  // namespace fa

extern "C" void classes_decline(int64_t pass, const char* why) { reasons[pass] = why; }
extern "C" const void* classes_seen() { return &seen; }
