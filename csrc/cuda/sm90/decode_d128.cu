// Decode kernels for head dims up to 128.
#include "decode_launch.cuh"

#if FA_CUDA_HAS_DIM(128)
namespace fa {
namespace sm90 {

FA_DECODE(128, 128)

}  // namespace sm90
}  // namespace fa
#endif
