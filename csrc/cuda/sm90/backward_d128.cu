// Backward kernels for head dims up to 128.
#include "backward_launch.cuh"

#if FA_CUDA_HAS_DIM(128)
namespace fa {
namespace sm90 {

FA_BACKWARD(128)

}  // namespace sm90
}  // namespace fa
#endif
