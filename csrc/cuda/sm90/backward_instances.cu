// The backward kernels of each head dim.
#include "backward_launch.cuh"

namespace fa {
namespace sm90 {

#if FA_CUDA_HAS_DIM(64)
FA_BACKWARD(64)
#endif
#if FA_CUDA_HAS_DIM(128)
FA_BACKWARD(128)
#endif

}  // namespace sm90
}  // namespace fa
