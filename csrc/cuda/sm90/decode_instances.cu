// The decode kernels of each head dim.
#include "decode_launch.cuh"

namespace fa {
namespace sm90 {

#if FA_CUDA_HAS_DIM(64)
FA_DECODE(64, 64)
#endif
#if FA_CUDA_HAS_DIM(96)
FA_DECODE(96, 96)
#endif
#if FA_CUDA_HAS_DIM(128)
FA_DECODE(128, 128)
#endif
#if FA_CUDA_HAS_DIM(192)
FA_DECODE(192, 128)
FA_DECODE(192, 192)
#endif
#if FA_CUDA_HAS_DIM(256)
FA_DECODE(256, 256)
#endif

}  // namespace sm90
}  // namespace fa
