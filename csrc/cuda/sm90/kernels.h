// The passes that the kernels of this folder serve, on compute capability 9.0 alone: fp16 and bf16.
// Passes return what launch.h does. Workspaces are in bytes, of undefined contents.
// ../sm90_absent.cu defines these functions for a library without such kernels.
#pragma once
#include "../../abi.h"

namespace fa {
namespace sm90 {

// Null if these kernels serve the pass of this call, else why not: a sentence without its subject,
// as in "head dim 320 is over 256". It looks at addresses and strides, too, but at no workspace.
const char* declines(const FaParams& p, int64_t pass);

int forward(const FaParams& p, int64_t multiprocessors, void* stream);
int64_t forward_workspace(const FaParams& p, int64_t multiprocessors);
// Into how many parts a forward pass splits the keys: 1, except of few rows.
int64_t forward_splits(const FaParams& p, int64_t multiprocessors);

// dq, dk, dv, dmask and dsinks: those that are not null.
int backward(const FaParams& p, int64_t multiprocessors, void* stream);
int64_t backward_workspace(const FaParams& p, int64_t multiprocessors);

}  // namespace sm90
}  // namespace fa
