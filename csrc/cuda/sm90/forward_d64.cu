// Forward kernels for head dims up to 64.
#include "forward_launch.cuh"

#if FA_CUDA_HAS_DIM(64)
namespace fa {
namespace sm90 {

FA_FORWARD(64, 64)
FA_UNMASKED_FORWARD(64, 64)

}  // namespace sm90
}  // namespace fa
#endif
