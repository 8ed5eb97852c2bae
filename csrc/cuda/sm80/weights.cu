// Launches attention weights: chooses the kernel.
#include "weights.cuh"

#include "../launch.h"
#include "instances.h"
#include "kernels.h"

namespace fa {
namespace sm80 {

template <class W>
int start_weights(const FaParams& p, void* stream) {
  const int64_t blocks = W::key_tiles(p) * W::row_tiles(p) * W::planes(p) * p.B;
  const int stages = p.average_heads ? 2 : 1;
  return launch_blocks("weights_kernel", weights_kernel<W>, blocks, W::kThreads,
                       stages * W::kStageBytes, stream, p);
}

template <class Type, bool general>
int weights_of(const FaParams& p, void* stream) {
  return with_dims(p, [&](auto dims) {  // v is absent: Dv is 0
    return start_weights<Weights<Type, decltype(dims)::kD, general>>(p, stream);
  });
}

template <class Type>
int weights_of(const FaParams& p, void* stream) {
  // Sinks are in the normaliser.
  return is_general(p) ? weights_of<Type, true>(p, stream) : weights_of<Type, false>(p, stream);
}

int weights(const FaParams& p, void* stream) {
  return with_type(p, [&](auto type) { return weights_of<decltype(type)>(p, stream); });
}

}  // namespace sm80
}  // namespace fa
