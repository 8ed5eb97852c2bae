// The passes that the kernels of this folder serve, in fp16 and bf16, for head dims up to 256. Each
// returns what launch.h does. Workspaces are in bytes, at multiples of 16, of undefined contents.
#pragma once
#include "../../abi.h"

namespace fa {
namespace sm80 {

int forward(const FaParams& p, void* stream);
int64_t forward_workspace(const FaParams& p);

// Forward of at most 16 rows of each head: the rows of all query heads that share keys make one
// tile, and the keys are split among as many blocks as keep the multiprocessors busy.
int decode(const FaParams& p, int64_t multiprocessors, void* stream);
int64_t decode_splits(const FaParams& p, int64_t multiprocessors);
int64_t decode_workspace(const FaParams& p, int64_t multiprocessors);

// Combines the parts of decode's plain kernels, also those of sm90/: `splits` of them for each row,
// in the workspace (../decode_parts.cuh). Their levels are in powers of two.
int combine(const FaParams& p, int64_t splits, void* stream);

// dq, dk, dv, dmask and dsinks: those that are not null.
int backward(const FaParams& p, void* stream);
int64_t backward_workspace(const FaParams& p);

int weights(const FaParams& p, void* stream);

// dq, dk, dmask and dsinks, those that are not null, from dweights.
int weights_backward(const FaParams& p, void* stream);
int64_t weights_backward_workspace(const FaParams& p);

}  // namespace sm80
}  // namespace fa
