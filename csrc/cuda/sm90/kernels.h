// The passes that the kernels of this folder serve, in fp16 and bf16, on compute capability 9.0.
// Workspaces are in bytes, at multiples of 16, of undefined contents.
#pragma once
#include "../../abi.h"

namespace fa {
namespace sm90 {

// Why these kernels cannot run this pass of this call, or null if they can: a sentence without its
// subject.
const char* declines(const FaParams& p, int64_t pass);

// Return what launch.h does. Calls that are declined must not come here. The grid has at most
// `multiprocessors` blocks; 0 is for any number.
int forward(const FaParams& p, int64_t multiprocessors, void* stream);

}  // namespace sm90
}  // namespace fa
