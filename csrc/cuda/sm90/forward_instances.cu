// The forward kernels of each head dim.
#include "forward_launch.cuh"

namespace fa {
namespace sm90 {

#if FA_CUDA_HAS_DIM(64)
FA_FORWARD(64, 64)
FA_UNMASKED_FORWARD(64, 64)
#endif
#if FA_CUDA_HAS_DIM(96)
FA_FORWARD(96, 96)
#endif
#if FA_CUDA_HAS_DIM(128)
FA_FORWARD(128, 128)
FA_UNMASKED_FORWARD(128, 128)
#endif
#if FA_CUDA_HAS_DIM(192)
FA_FORWARD(192, 128)
FA_FORWARD(192, 192)
#endif
#if FA_CUDA_HAS_DIM(256)
FA_PLAIN_FORWARD(256, 256)
#endif

}  // namespace sm90
}  // namespace fa
