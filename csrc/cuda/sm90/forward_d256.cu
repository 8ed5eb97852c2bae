// Forward kernels for head dims up to 256.
#include "forward_launch.cuh"

#if FA_CUDA_HAS_DIM(256)
namespace fa {
namespace sm90 {

FA_PLAIN_FORWARD(256, 256)

}  // namespace sm90
}  // namespace fa
#endif
