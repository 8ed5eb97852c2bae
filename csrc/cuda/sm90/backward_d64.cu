// Backward kernels for head dims up to 64.
#include "backward_launch.cuh"

#if FA_CUDA_HAS_DIM(64)
namespace fa {
namespace sm90 {

FA_BACKWARD(64)

}  // namespace sm90
}  // namespace fa
#endif
