// Decode kernels for head dims up to 64.
#include "decode_launch.cuh"

#if FA_CUDA_HAS_DIM(64)
namespace fa {
namespace sm90 {

FA_DECODE(64, 64)

}  // namespace sm90
}  // namespace fa
#endif
