// Which weights kernel serves a call, and its launch.
#include "weights.cuh"

#include "../launch.h"

namespace fa {
namespace sm80 {

template <class W>
int start_weights(const FaParams& p, void* stream) {
  const int64_t blocks = W::key_tiles(p) * W::row_tiles(p) * W::planes(p) * p.B;
  const int stages = p.average_heads ? 2 : 1;
  return launch_blocks(weights_kernel<W>, blocks, W::kThreads, stages * W::kStageBytes, stream, p);
}

template <class Type, bool general>
int weights_of(const FaParams& p, void* stream) {
  if (p.D <= 32) return start_weights<Weights<Type, 32, general>>(p, stream);
  if (p.D <= 64) return start_weights<Weights<Type, 64, general>>(p, stream);
  if (p.D <= 96) return start_weights<Weights<Type, 96, general>>(p, stream);
  if (p.D <= 128) return start_weights<Weights<Type, 128, general>>(p, stream);
  if (p.D <= 192) return start_weights<Weights<Type, 192, general>>(p, stream);
  return start_weights<Weights<Type, 256, general>>(p, stream);
}

template <class Type>
int weights_of(const FaParams& p, void* stream) {
  // Sinks are in the LSE.
  const bool general = p.mask.data || p.slopes.data || p.softcap > 0 || p.dropout_p > 0;
  return general ? weights_of<Type, true>(p, stream) : weights_of<Type, false>(p, stream);
}

}  // namespace sm80
}  // namespace fa

extern "C" int fa_cuda_weights(const FaParams* p, void* stream) {
  return p->q.dtype == FA_BF16 ? fa::sm80::weights_of<fa::ptx::BF16>(*p, stream)
                               : fa::sm80::weights_of<fa::ptx::F16>(*p, stream);
}
